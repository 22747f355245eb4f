"""A process that trains experts in processes of its own, each begun in a moment.

Everything is imported once; every line read is a run, trained in a fork with signals of its own.
What is written back is its pid, and how it ended. A run can be held at the beginning of a step
until it is let continue, so that what a test does meanwhile comes in time on any machine.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# Files beside the manifest.
HELD = "held"
GO_ON = "go-on"
ACKNOWLEDGED = "acknowledged"


def main() -> None:
    # Imported here so that the forks need not.
    for name in ("expert.run", "expert.data", "expert.training", "expert.telemetry", "expert.cli"):
        for module in pkgutil.walk_packages(import_module(name).__path__, f"{name}."):
            import_module(module.name)
    for name in ("peft", "pandas", "transformers.models.qwen3.modeling_qwen3"):
        import_module(name)
    _say({"ready": os.getpid()})
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            work = json.loads(line)
            os._exit(_command(**work) if "words" in work else _train(work))
        _say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _say({"ended": os.waitstatus_to_exitcode(status)})


PHASES = {
    "start": "expert.cli.main._run_command",
    "preparing": "expert.data.tokens.prepare.make_pieces",
    "loading": "expert.model.load.load_model",
    "step": "expert.training.loop.seed_step",
    "evaluation": "expert.model.load.LoadedModel.evaluate",
    "saving": "expert.training.checkpoint.save_checkpoint",
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
        acknowledge = (manifest.parent / ACKNOWLEDGED).touch
        return train(manifest, **work, acknowledge=acknowledge).exit_code
    except ExpertError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _holding(
    seed_step: Callable[[int, int, int], None], folder: Path, update: int
) -> Callable[[int, int, int], None]:
    """What begins a step, and waits in the one after so many."""

    def held(seed: int, number: int, rank: int) -> None:
        if number == update:
            (folder / HELD).touch()
            while not (folder / GO_ON).exists():
                time.sleep(0.005)
        seed_step(seed, number, rank)

    return held


def _say(fact: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
