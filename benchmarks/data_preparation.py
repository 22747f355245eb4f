"""Preparing the same rows with Expert and with TRL's SFTTrainer, side by side in one run.

Both read JSONL, write prompts with ChatML, tokenise with the same tokenizer, mark the answers, pack
to 2048 and keep the result on disk. TRL gets the rows as prompt/completion and is timed with each
number of processes; its best counts. Both are run equally often, Expert before and after TRL, and
the best run of each counts. Fixed costs (imports, building a model, loading a tokenizer)
are taken off both: the time of preparing four rows, measured just before.

    python benchmarks/data_preparation.py --tokenizer FOLDER --out FILE rows.jsonl [rows.jsonl …]
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
LENGTH = 2048
PROCESSES = (None, 1, 2)


def chatml_rows(file: Path) -> list[dict[str, str]]:
    """Prompt and completion with the same text that Expert's chatml template writes."""
    rows = []
    for line in file.open(encoding="utf-8"):
        row = json.loads(line)
        label = "Schema" if "CREATE TABLE" in row["input"] else "Input"
        asked = row["instruction"] + (f"\n\n{label}:\n{row['input']}" if row["input"] else "")
        prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        rows.append({"prompt": prompt, "completion": row["output"] + "<|im_end|>\n"})
    return rows


def four_rows_of(file: Path) -> Path:
    """The first rows, which show what preparing costs whatever the data."""
    few = Path(tempfile.mkdtemp(prefix="few-")) / file.name
    with file.open(encoding="utf-8") as stream:
        few.write_text("".join(next(stream) for _ in range(4)), encoding="utf-8")
    return few


def time_expert(file: Path, tokenizer: Path) -> dict[str, Any]:
    """Seconds of expert.prepare with an empty cache, beyond its fixed cost."""
    fixed, _ = prepare_with_expert(four_rows_of(file), tokenizer)
    seconds, statistics = prepare_with_expert(file, tokenizer)
    return {
        "seconds": seconds - fixed,
        "fixed_seconds": fixed,
        "tokens": statistics.tokens,
        "fill": statistics.fill,
    }


def prepare_with_expert(file: Path, tokenizer: Path) -> tuple[float, Any]:
    from expert.run.open import prepare

    folder = Path(tempfile.mkdtemp(prefix="expert-bench-"))
    manifest = {
        "name": "bench",
        "base_model": {"name": str(tokenizer.resolve()), "prompt_template": "chatml"},
        "training": {
            "dataset": {"path": str(file.resolve()), "validation_split": 0},
            "config": {"max_seq_length": LENGTH},
        },
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    started = time.perf_counter()
    made = prepare(path)
    seconds = time.perf_counter() - started
    statistics = made.train.index.statistics()  # before the mapped files go
    shutil.rmtree(folder)
    return seconds, statistics


def make_trl(tokenizer: Path) -> Any:
    """A function that lets TRL prepare rows, with a model so small that it does not count."""
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tok = transformers.AutoTokenizer.from_pretrained(tokenizer)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=len(tok), **sizes, **heads)

    def prepare_rows(rows: list[dict[str, str]], processes: int | None) -> tuple[float, Any]:
        model = transformers.LlamaForCausalLM(config)
        arguments = SFTConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-bench-"),
            max_length=LENGTH,
            packing=True,
            completion_only_loss=True,
            dataset_num_proc=processes,
            report_to=[],
            use_cpu=True,
            bf16=False,
        )
        data = datasets.Dataset.from_list(rows)
        started = time.perf_counter()
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tok)
        return time.perf_counter() - started, trainer.train_dataset

    return prepare_rows


def time_trl(file: Path, prepare_rows: Any, repeats: int) -> dict[str, Any]:
    """TRL's best seconds, its fixed cost taken off: every number of processes is tried once, and
    the best of them as often as Expert is timed."""
    rows = chatml_rows(file)
    runs: dict[int | None, list[float]] = {processes: [] for processes in PROCESSES}
    prepare_rows(rows[:4], None)  # the first call of all loads more than the others

    def run(processes: int | None) -> Any:
        fixed, _ = prepare_rows(rows[:4], None if processes is None else 1)
        seconds, made = prepare_rows(rows, processes)
        runs[processes].append(seconds - fixed)
        return made

    for processes in PROCESSES:
        made = run(processes)
    best = min(runs, key=lambda processes: runs[processes][0])
    while len(runs[best]) < repeats:
        run(best)
    return {
        "seconds": min(min(seconds) for seconds in runs.values()),
        "by_processes": {str(processes): seconds for processes, seconds in runs.items()},
        "tokens": sum(len(ids) for ids in made["input_ids"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    prepare_rows = make_trl(args.tokenizer)
    time_expert(args.files[0], args.tokenizer)  # warm the disk cache and the imports
    results = []
    for file in args.files:
        before = [time_expert(file, args.tokenizer) for _ in range(args.repeats // 2)]
        theirs = time_trl(file, prepare_rows, args.repeats)
        after = [time_expert(file, args.tokenizer) for _ in range(args.repeats - len(before))]
        ours = min(before + after, key=lambda run: run["seconds"])
        ours["runs"] = [run["seconds"] for run in before + after]
        ratio = theirs["seconds"] / ours["seconds"]
        results.append({"file": file.name, "data": file.parent.name, "expert": ours, "trl": theirs})
        results[-1]["ratio"] = ratio
        print(f"{file.parent.name}/{file.name}: {ours['seconds']:.2f} s against {ratio:.2f}x that")
    packages = ("trl", "transformers", "datasets", "tokenizers", "torch", "pyarrow", "numpy")
    environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "command": "python benchmarks/data_preparation.py --tokenizer qwen3 --out "
        f"data-preparation.json --repeats {args.repeats} "
        + " ".join(f"{file.parent.name}/{file.name}" for file in args.files),
    }
    args.out.write_text(
        json.dumps({"environment": environment, "results": results}, indent=2) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
