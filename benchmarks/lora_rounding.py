"""How LoRA learns in float32, in bfloat16, and in bfloat16 as PEFT adds it: losses by update.

    python benchmarks/lora_rounding.py --out FILE --rows FILE [--model NAME] [--updates N]

All three learn the same rows in the same order from the same first values, packed; only what is
rounded differs. Rows are JSONL with `instruction`, `input` and `output`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from surroundings import environment
from torch import nn

from expert.core.files import write_text_atomically
from expert.model.lora.lora import replace_lora_layers

WAYS = {"float32": {"bf16": False}, "bfloat16": {"bf16": True}, "bfloat16, PEFT": {"bf16": True}}
AS_PEFT = "EXPERT_BENCHMARK_AS_PEFT"
ROWS = 4800
SIZES = (1e-4, 1e-3, 3e-3, 1e-2)


def manifest_of(place: Path, args: argparse.Namespace) -> Path:
    lines = args.rows.read_text(encoding="utf-8").splitlines()[:ROWS]
    (place / "train.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    config = {
        "adapter_type": "lora",
        "rank": 16,
        "alpha": 32,
        "target_modules": "all-linear",
        "learning_rate": 5e-4,
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.05,
        "batch_size": 32,
        "max_seq_length": 1024,
        "packing": True,
        "max_steps": args.updates,
        "logging_steps": 1,
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "seed": 42,
    }
    dataset = {"path": "train.jsonl", "format": "jsonl"}
    facts = {
        "name": "rounding",
        "base_models": [{"name": args.model, "prompt_template": "chatml"}],
        "training": {"dataset": dataset, "config": config},
    }
    file = place / "manifest.json"
    file.write_text(json.dumps(facts), encoding="utf-8")
    return file


def learnt(manifest: Path, way: str) -> list[dict[str, Any]]:
    """Every update; each way in a process of its own."""
    runs = manifest.parent / way.replace(", ", "-")
    command = [sys.executable, __file__, "--train", str(manifest), "--output", str(runs)]
    for key, value in WAYS[way].items():
        command += ["--set", f"training.config.{key}={json.dumps(value)}"]
    subprocess.run(command, check=True, env={**os.environ, AS_PEFT: str(int("PEFT" in way))})
    (events,) = runs.glob("*/events.jsonl")
    found = map(json.loads, events.read_text(encoding="utf-8").splitlines())
    return [event for event in found if event["event"] == "step"]


def tokens_per_second(steps: list[dict[str, Any]]) -> float:
    """Of the second half of the updates: the first ones compile."""
    late = steps[len(steps) // 2 :]
    return float(sum(each["tokens"] for each in late) / sum(each["seconds"] for each in late))


def arrived() -> dict[str, dict[str, float]]:
    """Which share of an adapter's change arrives in bfloat16, by the size of the change.

    A layer of 64 x 48 whose input and output are about 1, 12,000 random rows.
    """
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    found: dict[str, dict[str, float]] = {"here": {}, "PEFT": {}}
    for size in SIZES:
        torch.manual_seed(0)
        base = nn.Linear(64, 48, bias=False)
        nn.init.normal_(base.weight, std=64**-0.5)
        layer: Any = Linear(base, "default", config=LoraConfig(r=4), r=4, lora_alpha=4)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        nn.init.normal_(a, std=64**-0.5)
        nn.init.normal_(b, std=size / 2)
        layer.to(torch.bfloat16).requires_grad_(requires_grad=False)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        x = torch.randn(12_000, 64, dtype=torch.bfloat16)
        meant = x.double() @ a.double().T @ b.double().T
        for way in ("PEFT", "here"):
            if way == "here":
                replace_lora_layers(nn.Sequential(layer), "default")
            change = layer(x).double() - base(x).double()
            found[way][f"{size:g}"] = float((change * meant).sum() / meant.square().sum())
    return found


def train(arguments: list[str]) -> None:
    """`expert train`, with PEFT's own layers where the environment says so."""
    from expert.__main__ import main as command_line
    from expert.model import adapters

    if os.environ[AS_PEFT] == "1":
        adapters.replace_lora_layers = lambda wrapped, adapter: None  # type: ignore[assignment]
    manifest, *more = arguments
    sys.argv = ["expert", "train", "--manifest", manifest, *more]
    command_line()


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2:])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--updates", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        manifest = manifest_of(Path(place), args)
        steps = {way: learnt(manifest, way) for way in WAYS}
    found = {way: [step["loss"] for step in each] for way, each in steps.items()}
    rates = {way: tokens_per_second(each) for way, each in steps.items()}
    results: dict[str, Any] = {
        "losses": found,
        "above_float32": {},
        "arrives": arrived(),
        "tokens_per_second": rates,
    }
    for way in list(WAYS)[1:]:
        pairs = zip(found[way], found["float32"], strict=True)
        above = [one / other - 1 for one, other in pairs]
        halves = (above[1 : len(above) // 2], above[len(above) // 2 :])
        results["above_float32"][way] = [statistics.fmean(half) for half in halves]
        words = " and ".join(f"{statistics.fmean(half):+.2%}" for half in halves)
        print(
            f"{way:16} {words} of float32's loss in the first and the second half, "
            f"{rates[way]:,.0f} tokens/s",
            flush=True,
        )
    facts = {"environment": environment(), "model": args.model, "rows": args.rows.name}
    write_text_atomically(args.out, json.dumps({**facts, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
