"""Updates so small that a card waits for its host: run, compiled, recorded as CUDA graphs.

Every case is a whole run through the product with random weights of a real shape and made-up short
rows, or the character GPT. Rates are medians over the second half of the updates.

    python benchmarks/small_updates.py --out FILE [--only TEXT ...] [--updates N] [--data FOLDER]

With --data (as for training_speed.py) also a few real rows of very different lengths to an update.
"""

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from planted_faults import write_model, write_rows
from surroundings import environment
from training_speed import write_model as write_model_for

import expert
from expert.core.events import read_events

ADAPTER = {"adapter_type": "lora", "rank": 16, "max_seq_length": 512, "train_on_prompt": True}
CHARACTERS = {"adapter_type": "full"}
WORK: dict[str, tuple[str, dict[str, Any]]] = {
    "135m, 16 rows": ("smollm2-135m", {**ADAPTER, "batch_size": 16}),
    "0.6b, 16 rows": ("qwen3-0.6b", {**ADAPTER, "batch_size": 16}),
    "char-gpt, 64 blocks": ("char-gpt", {**CHARACTERS, "batch_size": 64}),
    "char-gpt, 128 blocks": ("char-gpt", {**CHARACTERS, "batch_size": 128}),
}
CORPUS = {**ADAPTER, "max_seq_length": 2048}
REAL_WORK = {
    f"0.6b, {rows} real rows": ("qwen3-0.6b", {**CORPUS, "batch_size": rows})
    for rows in (2, 5, 10, 16)
}
WAYS: dict[str, dict[str, Any]] = {
    "run": {"torch_compile": False, "use_cuda_graphs": False},
    "recorded": {"torch_compile": False, "use_cuda_graphs": True},
    "compiled": {"torch_compile": True, "use_cuda_graphs": False},
    "compiled, recorded": {"torch_compile": True, "use_cuda_graphs": True},
}


def write_manifest(
    shape: str, config: dict[str, Any], folder: Path, models: Path, data: Path | None
) -> Path:
    characters = shape == "char-gpt"
    if data is None:
        rows = write_rows(folder, "characters" if characters else "mixed", few=False)
    else:
        rows = shutil.copyfile(data / "corpus.jsonl", folder / "corpus.jsonl").name
    base: dict[str, Any] = {"name": "char-gpt"}
    if data is not None:
        write_model_for(shape, models / f"{shape}-real", data / "tok")
        base = {"name": str(models / f"{shape}-real")}
    elif not characters:
        write_model(shape, models / shape)
        base = {"name": str(models / shape), "prompt_template": "chatml"}
    training = {"dataset": {"path": rows, "validation_split": 0.1}, "config": config}
    path = folder / "manifest.json"
    path.write_text(json.dumps({"name": "small", "base_model": base, "training": training}))
    return path


def measured(
    shape: str, config: dict[str, Any], data: Path | None, args: argparse.Namespace
) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="small-"))
    settings = {
        "max_steps": args.updates * (4 if shape == "char-gpt" else 1),
        "epochs": 1000,
        "logging_steps": 5,
        "save_strategy": "no",
        "evaluation_strategy": "no",
        "trackers": [],
        **config,
    }
    began = time.perf_counter()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of the case before
    done = expert.train(write_manifest(shape, settings, folder, args.work / "models", data))
    if done.exit_code in (130, 143):  # somebody wants all of this to end, not the one case
        sys.exit(done.exit_code)
    seconds = time.perf_counter() - began
    events = list(read_events(done.folder / "events.jsonl"))
    plan = json.loads((done.folder / "plan.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]

    def median(key: str) -> float | None:
        values = [event[key] for event in late if event.get(key) is not None]
        return statistics.median(values) if values else None

    return {
        "tokens_per_second": median("tokens_per_second"),
        "samples_per_second": median("samples_per_second"),
        "milliseconds": 1000 / (median("steps_per_second") or 1),
        "gpu_utilization": median("gpu_utilization"),
        "phases": {key: median(key) for key in late[-1] if key.startswith("time_")},
        "loss": steps[-1]["loss"],
        "losses": [event["loss"] for event in steps],
        "rates": [event["tokens_per_second"] for event in steps],
        "peak_reserved_bytes": steps[-1].get("peak_reserved_bytes"),
        "planned_bytes": plan["memory"]["peak_bytes"],
        "flat": plan["data"]["flat"],
        "batch": plan["batch"],
        "kernels": plan["kernels"],
        "seconds": seconds,
        "fallbacks": [event["reason"] for event in events if event["event"] == "fell_back"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--data", type=Path)
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="small-work-"))
    results = []
    for name, (shape, config) in {**WORK, **(REAL_WORK if args.data else {})}.items():
        for way, switches in WAYS.items():
            if args.only and not any(text in f"{name}, {way}" for text in args.only):
                continue
            found: dict[str, Any] = {"case": name, "way": way}
            results.append(found)
            try:
                data = args.data if name in REAL_WORK else None
                found |= measured(shape, {**config, **switches}, data, args)
            except Exception as error:  # noqa: BLE001 - the other ways are still worth knowing
                found["error"] = f"{type(error).__name__}: {error}"
                print(f"{name:22}{way:20}{found['error'][:200]}", flush=True)
                continue
            print(
                f"{name:22}{way:20}{found['tokens_per_second']:12,.0f} tokens/s"
                f"{found['milliseconds']:9.1f} ms  GPU {found['gpu_utilization'] or 0:3.0f} %  "
                f"loss {found['loss']:.4f}  {'; '.join(found['fallbacks'])[:120]}",
                flush=True,
            )
            record = {"environment": environment(), "results": results}
            args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
