"""How fast an untrained base answers held-out prompts, in the three ways there are.

    python benchmarks/answering_speed.py --out FILE --rows FILE... [--model NAME] [--count N]

`growing`: all prompts of a batch padded to the longest of them, transformers' own cache, kernels
launched one by one. `fixed`: prompts read in groups of their own lengths, keys and values in memory
that stays where it is. `recorded`: the same with a step recorded as a CUDA graph, on a card. The
ways take turns; answers of all three are compared. Rows are JSONL with `instruction` and `input`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from surroundings import environment

from expert.answer import cache, steps
from expert.answer.decoding import DecodingSettings
from expert.answer.engine import answer_all
from expert.core.files import write_text_atomically
from expert.data.records import Example, Turn
from expert.manifest.reader import read_manifest
from expert.run.open import plan as plan_of
from expert.run.stored.load import Trained, load_base, pick_device

TURNS = 3


def the_base(model: str) -> Trained:
    """As a run of an expert's manifest would load it."""
    with tempfile.TemporaryDirectory() as place:
        manifest = Path(place) / "manifest.json"
        rows = Path(place) / "rows.jsonl"
        rows.write_text('{"instruction": "say a word", "output": "word"}\n', encoding="utf-8")
        training = {"dataset": {"path": rows.name, "format": "jsonl"}}
        facts = {"name": "base", "base_model": model, "training": training}
        manifest.write_text(json.dumps(facts), encoding="utf-8")
        return load_base(plan_of(read_manifest(manifest)), device=pick_device("auto"))


def prompts(file: Path, count: int) -> list[Example]:
    """The first rows of a file that fit a context of 2,048 tokens, as they are asked."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        if len(text) < 6000:
            found.append(Example((Turn("user", text),)))
    return found[:count]


def timed(
    trained: Trained, questions: list[Example], how: DecodingSettings, way: str
) -> dict[str, Any]:
    """All answers in one way, and how long they took."""
    fixed, recorder = cache.supports_fixed_cache, steps.step_capture
    notes: list[str] = []
    if way == "growing":
        cache.supports_fixed_cache = lambda model: False  # type: ignore[assignment]
    if way != "recorded":
        steps.step_capture = lambda device: None  # type: ignore[assignment]
    try:
        began = time.perf_counter()
        answers = answer_all(trained, questions, how, note=notes.append)
        seconds = time.perf_counter() - began
    finally:
        cache.supports_fixed_cache, steps.step_capture = fixed, recorder
    return {"seconds": seconds, "answers": [each.text for each in answers], "notes": notes,
            "tokens": sum(each.tokens for each in answers)}  # fmt: skip


def measured(trained: Trained, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    ways = ["growing", "fixed", *(["recorded"] if trained.device.type == "cuda" else [])]
    how = DecodingSettings(
        temperature=0.0,
        top_p=1.0,
        top_k=None,
        min_p=0.0,
        repetition_penalty=1.0,
        max_new_tokens=args.tokens,
        stop_sequences=(),
    )
    questions = prompts(file, args.count)
    for way in ways:
        timed(trained, questions[:8], how, way)
    seen: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way in ways:
            seen[way].append(timed(trained, questions, how, way))
    first = seen["growing"][0]
    result: dict[str, Any] = {"rows": f"{file.parent.name}/{file.name}", "prompts": len(questions)}
    for way, runs in seen.items():
        seconds = [run["seconds"] for run in runs]
        same = sum(a == b for a, b in zip(first["answers"], runs[0]["answers"], strict=True))
        times = [one["seconds"] / other["seconds"]
                 for one, other in zip(seen["growing"], runs, strict=True)]  # fmt: skip
        result[way] = {
            "seconds": seconds,
            "tokens": runs[0]["tokens"],
            "tokens_per_second": runs[0]["tokens"] / statistics.median(seconds),
            "times_as_fast": statistics.median(times),
            "same_answers": same,
            "notes": runs[0]["notes"],
        }
        print(
            f"{result['rows']:20} {way:9} {statistics.median(seconds):7.2f} s "
            f"{result[way]['tokens_per_second']:9,.0f} tokens/s "
            f"{result[way]['times_as_fast']:6.2f} times, {same} of {len(questions)} answers alike",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64, help="at most, to an answer")
    args = parser.parse_args()
    trained = the_base(args.model)
    results = [measured(trained, file, args) for file in args.rows]
    record = {"environment": environment(), "model": args.model, "results": results,
              "device": trained.device.type, "threads": torch.get_num_threads()}  # fmt: skip
    write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
