"""Events of a run, and a screen with a hand-cranked clock that shows them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from expert.cli.show.progress import RunProgress

STARTED = {
    "event": "started",
    "expert": "expert-json",
    "model": "Qwen/Qwen3-0.6B",
    "device": "NVIDIA H200",
    "total_steps": 900,
    "epochs": 3,
    "run": "runs/a",
    "trainable_parameters": 4_600_000,
    "tokens_per_epoch": 1_200_000,
}
STEP = {
    "event": "step",
    "step": 120,
    "loss": 1.23449,
    "rate": 1.9e-4,
    "tokens_per_second": 104_233.4,
    "steps_per_second": 2.3149,
    "gpu_utilization": 98.0,
    "gpu_memory_bytes": 27 * 2**30,
    "peak_reserved_bytes": 25 * 2**30,
    "data_wait": 0.001,
    "eta_seconds": 720,
    "epoch": 1,
}
EPOCH = {
    "event": "epoch",
    "step": 300,
    "epoch": 1,
    "loss": 1.714,
    "eval_loss": 1.65,
    "seconds": 42.0,
    "tokens_per_second": 103_000.0,
    "samples_per_second": 5.1,
}
PLAIN_STEP = (
    "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s  2.31 it/s  GPU 98 %  peak 25.0 GiB  "
    "data wait 0.1 %  ETA 12 min"
)


def recorded(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    how: dict[str, Any] = {"force_terminal": terminal, "width": width, "color_system": None}
    return Console(file=file, record=True, **how), file


class Screen:
    """A recorded console and the view on it, with a hand-cranked clock."""

    def __init__(self, *, terminal: bool, width: int = 100) -> None:
        self.console, self.file = recorded(terminal=terminal, width=width)
        self.now = 0.0
        self.view = RunProgress(self.console, clock=lambda: self.now)

    def show(self, *events: dict[str, Any]) -> Screen:
        with self.view:
            for event in events:
                self.view(event)
        return self

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def plain(*events: dict[str, Any]) -> list[str]:
    return Screen(terminal=False).show(*events).lines()
