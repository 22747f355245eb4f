"""Processes that begin in a moment: forks of one that has imported all that a run needs.

That process is Python's forkserver, one for each worker of the tests. Whoever starts it first says
what it imports: `expert benchmark` measures each setting in a fork of the same one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRELOADED = "tests.preloaded"


def start_server() -> None:
    """Have the process that others are forked from; it stays until the end of the tests."""
    before = os.environ.get("PYTHONPATH")
    forkserver.set_forkserver_preload([PRELOADED])
    # It is told what to import but not from where, and leaves out in silence what it cannot find.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def forked(does: Callable[..., Any], *given: Any) -> Any:
    """A process that was started: `does(*given)` with the environment of now. It has `pid`, `join`
    and `exitcode`, which is what `does` leaves with: `sys.exit` or minus a signal."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_begin, args=(dict(os.environ), does, given))
    process.start()
    return process


def _begin(environment: dict[str, str], does: Callable[..., Any], given: tuple[Any, ...]) -> None:
    assert PRELOADED in sys.modules, "what is forked has imported nothing"
    os.environ.clear()
    os.environ.update(environment)
    does(*given)
