"""What the scripts of the peers have in common: arguments, rows, the clock, the record.

Imports nothing of the peers: Unsloth must be imported before the others.
"""

import argparse
import json
import statistics
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import TrainerCallback

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS += ["qkv_proj", "gate_up_proj"]  # of Phi
LENGTH = 2048


class Clock(TrainerCallback):
    """Real tokens and seconds of every update, read off the card after the last one. The rate is
    the median after the first third, so that updates which still compile do not count."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.tokens = torch.zeros((), dtype=torch.long, device="cuda")
        self.ends: list[tuple[torch.cuda.Event, torch.Tensor]] = []
        self.shape: tuple[int, ...] = ()
        """Of the last batch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.ends.append((event, self.tokens.clone()))

    def rates(self) -> list[float]:
        """Tokens a second of every update after the first third."""
        torch.cuda.synchronize()
        return [
            int(tokens - before) / (start.elapsed_time(end) / 1000)
            for (start, before), (end, tokens) in pairwise(self.ends[self.steps // 3 - 1 :])
        ]

    def whole_rate(self) -> float:
        """Tokens a second of all updates after the first third together."""
        torch.cuda.synchronize()
        (start, before), (end, tokens) = self.ends[self.steps // 3 - 1], self.ends[-1]
        return int(tokens - before) / (start.elapsed_time(end) / 1000)

    def count(self, trainer: Any) -> None:
        """Count the tokens of every batch that this trainer takes."""
        plain = trainer.training_step

        def training_step(model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            self.tokens.add_((inputs["input_ids"] != 0).sum())
            self.shape = tuple(inputs["input_ids"].shape)
            return plain(model, inputs, *more, **options)

        trainer.training_step = training_step


def asked(*flags: str, **numbers: int) -> argparse.Namespace:
    """The arguments, with those of one peer; the card is held to --memory."""
    parser = argparse.ArgumentParser()
    for name in ("--data", "--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    for name, usual in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--micro", type=int)
    parser.add_argument("--memory", type=float)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if args.memory:
        card = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.memory * 1e9 / card)
    return args


def rows_in(folder: Path) -> Any:
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return datasets.Dataset.from_dict({"text": [json.loads(line)["text"] for line in lines]})


def measure(
    peer: str,
    trainer: Any,
    clock: Clock,
    args: argparse.Namespace,
    *also: str,
    median: bool = True,
) -> None:
    """Train, and write what was measured; `also`: packages whose versions matter; `median`: of the
    updates' rates, else the rate of all together, for updates of few rows, which vary in tokens."""
    clock.count(trainer)
    trainer.train()
    rates = clock.rates()
    packages = ("torch", "trl", "peft", "bitsandbytes", *also)
    result = {
        "peer": peer,
        "model": args.model.name,
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "model", "out")},
        "tokens_per_second": statistics.median(rates) if median else clock.whole_rate(),
        "rates": [round(rate) for rate in rates],
        "batch": clock.shape,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "versions": {name: version(name) for name in packages},
    }
    print(json.dumps(result), flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
