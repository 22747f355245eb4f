"""The command line with faults that cannot be made from outside: a file named after one asks for
it. `python -m tests.faults.soak_child FOLDER train ...`"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from expert.core.interrupts import raise_on_signals


def main() -> None:
    # Under nohup, and in the background, these are ignored from the start, and would stay so.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_on_signals()
    folder = Path(sys.argv.pop(1))
    clock = time.time

    def jumping() -> float:
        try:
            return clock() + float((folder / "clock").read_text())
        except (OSError, ValueError):
            return clock()

    time.time = jumping

    import torch

    from expert.model.load import LoadedModel
    from expert.training import loop
    from expert.training.step import seed_step

    loss_sum = LoadedModel.loss_sum
    nan_at, steps = os.environ["NAN_AT"], [""]

    def seeded(seed: int, step: int, rank: int) -> None:
        steps[0] = str(step)
        seed_step(seed, step, rank)

    def is_asked(what: str) -> bool:
        there = (folder / what).exists()
        (folder / what).unlink(missing_ok=True)
        return there

    def faulty(self: LoadedModel, batch: Any) -> Any:
        if is_asked("oom"):
            raise torch.OutOfMemoryError("CUDA out of memory: by the soak")
        loss = loss_sum(self, batch)
        return loss * float("nan") if steps[0] == nan_at else loss

    LoadedModel.loss_sum = faulty  # type: ignore[method-assign]
    setattr(loop, "seed_step", seeded)  # noqa: B010
    from expert.__main__ import main as command_line

    command_line()


if __name__ == "__main__":
    main()
