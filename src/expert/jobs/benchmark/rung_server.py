"""The process in which rungs of a benchmark are measured.

It imports everything once and forks for each rung that it reads a line about: nothing of a rung is
left for the next, and one that crashes takes nobody with it. Where there are no forks it measures
one rung and ends. While a fork lives the lines are for that: orders to time a window, to tell what
was seen, to leave.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError

if TYPE_CHECKING:
    from expert.jobs.benchmark.rung_windows import Order


def main() -> None:
    """Read rungs, one a line, and answer with what was seen of them."""
    # What libraries print goes where errors go: standard output is for answers alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    if sys.argv[1:2] == ["--alone"]:
        path, answers = Path(sys.argv[2]), int(sys.argv[3])
        os._exit(_answer(json.loads(path.read_text(encoding="utf-8")), answers))
    _import_everything()
    gc.freeze()  # or every fork looks through all that was imported whenever it collects garbage
    from expert.run.build import environment

    _write(answers, {"ready": os.getpid(), "environment": environment()})
    for line in sys.stdin:
        request = json.loads(line)
        if "do" in request:
            continue  # for a rung that died while it stood still: whoever gave it will be told
        if not hasattr(os, "fork"):
            _answer(request, answers)
            _write(answers, {"ended": 0})
            return
        pid = os.fork()
        if pid == 0:
            os._exit(_in_fork(request, answers))
        _, status = os.waitpid(pid, 0)
        _write(answers, {"ended": os.waitstatus_to_exitcode(status)})


def _import_everything() -> None:
    """All that takes seconds to import, before the first fork; nothing here may touch the card."""
    from importlib.util import find_spec

    import torch
    import transformers.modeling_utils  # noqa: F401

    if not (torch.cuda.is_available() and find_spec("bitsandbytes")):
        # Importing peft imports bitsandbytes, which asks the card what it is: CUDA has begun, and
        # no fork could use it any more. Then each fork imports it by itself, in two seconds.
        import peft  # noqa: F401

    import expert.data.feed.loader
    import expert.model.load
    import expert.run.session.execute
    import expert.telemetry.gpu
    import expert.training.loop  # noqa: F401


def _in_fork(request: dict[str, Any], answers: int) -> int:
    """Measure in this fork, or in a process that begins anew where CUDA was begun before it."""
    import torch

    if not getattr(torch.cuda, "_is_in_bad_fork", lambda: False)():
        return _answer(request, answers)
    import tempfile

    handle, path = tempfile.mkstemp(prefix="expert-rung-", suffix=".json")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        json.dump(request, stream)
    os.set_inheritable(answers, True)
    command = [
        sys.executable,
        "-m",
        "expert.jobs.benchmark.rung_server",
        "--alone",
        path,
        str(answers),
    ]
    os.execv(sys.executable, command)
    raise AssertionError("execv does not come back")


def _answer(request: dict[str, Any], answers: int) -> int:
    """Measure, and write what was seen or why nothing was."""
    import logging

    from expert.jobs.benchmark.rung_windows import Order
    from expert.jobs.benchmark.rungs import Work, measure

    limit = 0

    def hear() -> Order | None:
        """The next order; it may take as long as it likes, but the asker must be there."""
        _alarm(0)
        line = sys.stdin.readline()
        _alarm(limit)
        return Order(**json.loads(line)) if line else None

    def say(fact: dict[str, Any]) -> None:
        _alarm(limit)
        _write(answers, fact)

    logging.disable(logging.WARNING)
    try:
        work = Work(**request)
        limit = int(work.pace["limit_seconds"]) + 60
        _alarm(limit)
        measure(work, say, hear)
    except Exception as error:  # noqa: BLE001 - whatever it was, it ends this rung and no other
        import traceback

        traceback.print_exc()
        words = str(error).strip().splitlines()
        text = words[0] if words else ""
        known = isinstance(error, ExpertError)
        _write(answers, {"failed": text if known else f"{type(error).__name__}: {text}"})
        return 1
    return 0


def _alarm(seconds: int) -> None:
    """End this process after so long: the asker has gone, or it would have done so before."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _write(answers: int, fact: dict[str, Any]) -> None:
    os.write(answers, (json.dumps(fact) + "\n").encode())


if __name__ == "__main__":
    main()
