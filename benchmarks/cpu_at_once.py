"""How many packed sequences a CPU computes fastest at once: `tiny`, LoRA, rows of sums.

Every number of sequences is tried in turn, and all of them as often as asked; the same rows, the
same updates. Learning is the median rate of the updates, judging the time of one evaluation.

    python benchmarks/cpu_at_once.py --out FILE [--rounds N]
"""

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from surroundings import environment

import expert
from expert.core.events import read_events
from expert.core.files import write_text_atomically

AT_ONCE = (1, 4, 16, 64)
ROWS, HELD_OUT, UPDATES = 3000, 0.2, 4
NOTE = (
    "An update has about 15 sequences: of 64 at once most places stay empty in training, so only "
    "the evaluation of that row counts."
)
CONFIG = {
    "adapter_type": "lora",
    "rank": 16,
    "max_seq_length": 1024,
    "batch_size": 128,
    "epochs": 1,
    "max_steps": UPDATES,
    "logging_steps": 1,
    "save_strategy": "no",
    "trackers": [],
    "device": "cpu",
}


def write_manifest(folder: Path) -> Path:
    draw = random.Random(0)
    rows = []
    for _ in range(ROWS):
        numbers = [draw.randint(1, 99) for _ in range(draw.randint(5, 60))]
        text = f"Add up: {' '.join(map(str, numbers))}"
        rows.append(json.dumps({"instruction": text, "response": f"{sum(numbers)} in all."}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    training = {"dataset": {"path": "rows.jsonl", "validation_split": HELD_OUT}, "config": CONFIG}
    path = folder / "manifest.json"
    data = {"name": "at-once", "base_model": {"name": "tiny"}, "training": training}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def measured(manifest: Path, at_once: int) -> tuple[float, float]:
    """Tokens learnt in a second, and seconds of an evaluation."""
    both = (f"micro_batch_size={at_once}", f"eval_batch_size={at_once}")
    done = expert.train(manifest, overrides=tuple(f"training.config.{each}" for each in both))
    events = list(read_events(done.folder / "events.jsonl"))
    rates = [e["tokens"] / e["seconds"] for e in events if e["event"] == "step"]
    looked = [e["seconds"] for e in events if e["event"] == "eval"]
    return statistics.median(rates), looked[-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    results: dict[int, dict[str, Any]] = {
        count: {"tokens_per_second": [], "evaluation_seconds": []} for count in AT_ONCE
    }
    with tempfile.TemporaryDirectory() as place:
        manifest = write_manifest(Path(place))
        for _ in range(args.rounds):
            for count in AT_ONCE:
                rate, seconds = measured(manifest, count)
                results[count]["tokens_per_second"].append(round(rate))
                results[count]["evaluation_seconds"].append(round(seconds, 1))
                print(f"{count:3} at once: {rate:6,.0f} tokens/s, evaluation {seconds:5.1f} s")
                found = {"cores": os.cpu_count(), "sequence_length": 1024, "note": NOTE}
                found["at_once"] = results
                text = json.dumps({"environment": environment(), **found}, indent=1)
                write_text_atomically(args.out, text + "\n")


if __name__ == "__main__":
    main()
