"""The character GPT on Shakespeare with nanoGPT's published configuration, and its speed.

Loss: 5000 updates of 64 blocks with dropout 0.2, as nanoGPT's config/train_shakespeare_char.py has
it, once for every seed; validation is the last tenth of the text, all of it, and the best
evaluation counts. Speed: samples a second at batch 128 and 512, first updates left out.

    python benchmarks/char_gpt.py --text input.txt --out FILE [--seeds 1 2 3] [--speed]
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import expert
from expert.core.events import read_events

NANOGPT = {
    "adapter_type": "full",
    "batch_size": 64,
    "epochs": 1000,
    "max_steps": 5000,
    "learning_rate": 1e-3,
    "lr_scheduler": "cosine",
    "lr_scheduler_kwargs": {"min_lr": 1e-4},
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "betas": [0.9, 0.99],
    "max_grad_norm": 1.0,
    "eval_steps": 250,
    "save_strategy": "no",
    "torch_compile": True,
    "logging_steps": 50,
    "trackers": [],
}


def run(text: Path, settings: dict[str, Any], dropout: float) -> tuple[list[dict[str, Any]], float]:
    folder = Path(tempfile.mkdtemp(prefix="char-"))
    shutil.copyfile(text, folder / "corpus.txt")
    manifest = {
        "name": "shakespeare",
        "base_model": {"name": "char-gpt", "architecture": {"dropout": dropout}},
        "training": {"dataset": {"path": "corpus.txt"}, "config": {**NANOGPT, **settings}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    began = time.perf_counter()
    done = expert.train(folder / "manifest.json")
    seconds = time.perf_counter() - began
    events = list(read_events(done.folder / "events.jsonl"))
    shutil.rmtree(folder)
    return events, seconds


def measure_loss(text: Path, seed: int) -> dict[str, Any]:
    events, seconds = run(text, {"seed": seed}, 0.2)
    curve = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
    best = min(curve, key=lambda step: curve[step])
    return {
        "seed": seed,
        "best_validation_loss": curve[best],
        "at_update": best,
        "targets": next(event["tokens"] for event in events if event["event"] == "eval"),
        "curve": curve,
        "seconds": seconds,
    }


def measure_speed(text: Path, batch: int, **settings: Any) -> dict[str, Any]:
    more = {"batch_size": batch, "max_steps": 600, "evaluation_strategy": "no", **settings}
    events, _ = run(text, {**more, "micro_batch_size": batch}, 0.0)
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]

    def median(key: str) -> float | None:
        values = [event[key] for event in late if event.get(key) is not None]
        return statistics.median(values) if values else None

    phases = {key: median(key) for key in late[-1] if key.startswith("time_")}
    return {
        "batch": batch,
        **settings,
        "samples_per_second": median("samples_per_second"),
        "milliseconds": 1000 / (median("steps_per_second") or 1),
        "gpu_utilization": median("gpu_utilization"),
        "data_wait": median("data_wait"),
        "phases_of_50_updates": phases,
        "loss": steps[-1]["loss"],
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--speed", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "environment": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
            "command": "python benchmarks/char_gpt.py --text input.txt --seeds "
            + " ".join(map(str, args.seeds))
            + (" --speed" if args.speed else ""),
        },
        "speed": [],
        "loss": [],
    }

    def keep(part: str, result: dict[str, Any]) -> None:
        record[part].append(result)
        shown = {k: v for k, v in result.items() if k != "curve"}
        print(json.dumps(shown), flush=True)
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    if args.speed:
        for batch in (128, 512):
            keep("speed", measure_speed(args.text, batch))
        keep("speed", measure_speed(args.text, 128, torch_compile=False))
        graphs = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
        keep("speed", measure_speed(args.text, 128, **graphs))
    for seed in args.seeds:
        keep("loss", measure_loss(args.text, seed))


if __name__ == "__main__":
    main()
