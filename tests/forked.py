"""Processes that start instantly: forks of one that has made all imports of a run.

That process is Python's forkserver, one per test worker, itself a fork of that of `tests/warm.py`.
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
    """Start the forkserver, which runs until the end of the tests."""
    forkserver.set_forkserver_preload([PRELOADED])
    resource_tracker.ensure_running()
    before = spawn.get_executable()
    spawn.set_executable(python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(before)


def forked(does: Callable[..., Any], *given: Any) -> Any:
    """Start a process that calls `does(*given)` with the current environment; it has `pid`, `join`
    and `exitcode`: that of `sys.exit`, or negative for a signal."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_begin, args=(dict(os.environ), does, given))
    process.start()
    return process


def _begin(environment: dict[str, str], does: Callable[..., Any], given: tuple[Any, ...]) -> None:
    assert PRELOADED in sys.modules, "the forkserver has not imported anything"
    os.environ.clear()
    os.environ.update(environment)
    does(*given)
