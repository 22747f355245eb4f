"""Small experts that really train, in a second or two."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import Tensor

from expert.core.events import read_events
from expert.jobs.train import train
from expert.model.load import LoadedModel
from expert.run import build
from expert.run.session.result import RunResult
from expert.telemetry.cpu import available_cores
from expert.telemetry.timeline import Timeline
from expert.training import loop
from expert.training.step import seed_step
from tests.model.models import tiny_model

Found = TypeVar("Found")
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog")
ROWS = [
    {"instruction": f"say {word} {number}", "response": f"{word} {'and ' * (number % 4)}{number}"}
    for number in range(6)
    for word in WORDS
]
EVERY_STEP: dict[str, Any] = {"epochs": 1, "save_steps": 1, "save_total_limit": None}
"""A run of an epoch whose every checkpoint stays."""


@cache
def place() -> Path:
    """A folder that lasts as long as this process."""
    folder = tempfile.mkdtemp(prefix="expert-runs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def base_model(layers: int = 1) -> Path:
    """A tiny random model, made once in a process; a second layer costs half a run more."""
    return tiny_model(place() / f"layers-{layers}" / "qwen3", num_hidden_layers=layers)


def write_expert(folder: Path, base: Path | str, config: dict[str, Any], **more: Any) -> Path:
    """A manifest with 48 rows of training data beside it; answers are short unless `decoding` says
    otherwise: a model that was hardly trained never ends one."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = more.pop("rows", ROWS)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    dataset = {"path": "train.jsonl", **more.pop("dataset", {})}
    manifest = {
        "name": "demo",
        "base_model": {"name": str(base), "prompt_template": "chatml", **more.pop("model", {})},
        "training": {
            "dataset": dataset,
            "decoding": {"max_new_tokens": 12, **more.pop("decoding", {})},
            "config": {
                "adapter_type": "lora",
                "rank": 4,
                "max_seq_length": 64,
                "batch_size": 8,
                "epochs": 2,
                "learning_rate": 1e-2,
                "logging_steps": 1,
                "trackers": [],
                **config,
            },
        },
        **more,
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return path


def run(manifest: Path, **more: Any) -> RunResult:
    return train(manifest, **more)


def run_undisturbed(manifest: Path) -> RunResult:
    """Train it, with the phases of its steps timed by what this process computes: on a busy machine
    the threads that fill its batches wait for a core, and it would seem to wait for its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Timeline", partial(Timeline, clock=time.process_time))
        return run(manifest)


def times_slower() -> float:
    """How many times as long this machine may take for something while others use its cores."""
    return max(1.0, os.getloadavg()[0] / len(available_cores()) - 1)


def events_of(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Events of these kinds, or all, in the order they happened."""
    found = list(read_events(folder / "events.jsonl"))
    return [event for event in found if not names or event["event"] in names]


def until(
    holds: Callable[[], Found | None],
    seconds: float = 120.0,
    why: Callable[[], str] = lambda: "it never came to that",
) -> Found:
    """What `holds` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, why()
        time.sleep(0.02)
    return found


def run_with_steps(runs: Path, steps: int) -> Path | None:
    """The run in a folder that has made that many steps since it was last started."""
    for folder in runs.glob("demo-*"):
        if (folder / "events.jsonl").is_file() and len(events_of(folder, "step")) >= steps:
            return folder
    return None


def rewrite_events(folder: Path, change: Callable[[str], str]) -> None:
    """Change the text of all events, as if a run had written them so; without checksums."""
    text = "".join(json.dumps(event) + "\n" for event in events_of(folder))
    (folder / "events.jsonl").write_text(change(text), encoding="utf-8")


def losses_of(folder: Path) -> dict[int, str]:
    """The loss after each step, to the last bit; of a step taken twice the second."""
    return {event["step"]: float(event["loss"]).hex() for event in events_of(folder, "step")}


def weights_of(folder: Path) -> dict[str, bytes]:
    """Every file of the finished expert."""
    found = {p.name: p.read_bytes() for p in (folder / "final").glob("*.safetensors")}
    assert found
    return found


@dataclass
class Now:
    """Where a run with an injected fault is."""

    update: int | None = None
    """Number of the step, from 0; None before the first."""
    micro_batch: int = 0
    """Micro-batches of this step before this one."""
    learnt: int = 0
    """Micro-batches so far."""


Fault = Callable[[Tensor, Any, Now], Tensor]


def inject(monkeypatch: Any, fault: Fault) -> Now:
    """Apply `fault` to every loss before the backward pass."""
    now = Now()
    loss_sum = LoadedModel.loss_sum

    def seeded(number: int, step: int, rank: int = 0) -> None:
        now.update, now.micro_batch = step, 0
        seed_step(number, step, rank)

    def faulty(self: LoadedModel, batch: Any) -> Tensor:
        loss = fault(loss_sum(self, batch), batch, now)
        now.micro_batch += 1
        now.learnt += 1
        return loss

    monkeypatch.setattr(loop, "seed_step", seeded)
    monkeypatch.setattr(LoadedModel, "loss_sum", faulty)
    return now


def copied(folder: Path, to: Path, *, without: tuple[str, ...] = ("final",)) -> Path:
    """A copy of the run folder to resume; the events start over."""
    shutil.copytree(folder, to)
    for name in without:
        shutil.rmtree(to / name)
    (to / "events.jsonl").unlink()
    return to


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def plan_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
