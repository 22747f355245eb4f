"""Processes that begin in a moment: forks of one that has imported all that a run needs.

That process is Python's forkserver, one for each worker of the tests, itself a fork of the one of
`tests/warm.py`. Whoever starts it first says what it imports: `expert benchmark` measures each
setting in a fork of the same one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from typing import Any

from tests.warm import python

PRELOADED = "tests.preloaded"


def start_server() -> None:
    """Have the process that others are forked from; it stays until the end of the tests."""
    forkserver.set_forkserver_preload([PRELOADED])
    resource_tracker.ensure_running()
    before = spawn.get_executable()
    spawn.set_executable(python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(before)


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
