"""Runs in processes of their own, each begun in a moment, with signals of its own.

A run can be held at the beginning of a step until it is let continue, so that what a test does
meanwhile comes in time on any machine.
"""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import forked

# Files next to the manifest.
HELD = "held"
GO_ON = "go-on"
ACKNOWLEDGED = "acknowledged"


def begun(**work: Any) -> Any:
    return forked(_act, work)


def ended(process: Any) -> int:
    """The exit code of a run, or minus the signal that killed it."""
    process.join()
    return int(process.exitcode)


def _act(work: dict[str, Any]) -> None:
    sys.exit(_command(**work) if "words" in work else _train(work))


PHASES = {
    "start": "expert.cli.main._run_command",
    "preparing": "expert.data.tokens.prepare._build",
    "loading": "expert.model.load.load_model",
    "step": "expert.training.loop.seed_step",
    "evaluation": "expert.model.load.LoadedModel.evaluate",
    "saving": "expert.run.session.checkpoints.save_checkpoint",
    "final": "expert.run.session.finish.publish_final",
}
"""What is called when each phase of a run begins."""


def _command(words: list[str], signals: dict[str, Any], output: str) -> int:
    """`expert train ...`, with all it writes in a file; signals come some time after the `call`-th
    beginning of a phase, from a thread as they would from outside."""
    from expert.__main__ import main as command_line

    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signals:
        _signal_in(**signals)
    sys.argv = ["expert", *words]
    try:
        command_line()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _signal_in(phase: str, call: int, number: int, delays: list[float]) -> None:
    path, name = PHASES[phase].rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    original, calls = getattr(owner, name), []

    def send() -> None:
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), number)

    def with_a_signal(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            threading.Thread(target=send, daemon=True).start()
        return original(*args, **more)

    setattr(owner, name, with_a_signal)


def _train(work: dict[str, Any]) -> int:
    from expert.core.errors import ExpertError
    from expert.jobs.train import train
    from expert.model.load import LoadedModel
    from expert.training import loop
    from expert.training.step import seed_step

    signal.signal(signal.SIGINT, signal.default_int_handler)
    loss_sum, pause = LoadedModel.loss_sum, work.pop("pause", 0.0)

    def slow(self: LoadedModel, batch: Any) -> Any:
        time.sleep(pause)
        return loss_sum(self, batch)

    LoadedModel.loss_sum = slow  # type: ignore[method-assign]
    manifest = Path(work.pop("manifest"))
    if "hold_at" in work:
        held = _holding(seed_step, manifest.parent, work.pop("hold_at"))
        loop.seed_step = held  # type: ignore[attr-defined, assignment]
    try:
        acknowledged = manifest.parent / ACKNOWLEDGED
        return train(manifest, **work, acknowledge=lambda again: acknowledged.touch()).exit_code
    except ExpertError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _holding(
    seed_step: Callable[[int, int, int], None], folder: Path, update: int
) -> Callable[[int, int, int], None]:
    """A hook at the start of each step, which waits after a given number of steps."""

    def held(seed: int, number: int, rank: int) -> None:
        if number == update:
            (folder / HELD).touch()
            while not (folder / GO_ON).exists():
                time.sleep(0.005)
        seed_step(seed, number, rank)

    return held
