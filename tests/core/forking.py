"""Runs a function in a forked process, which may be killed at a chosen moment."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

STAGES = ("mkdir", "chmod", "fsync", "rename", "replace", "unlink", "rmdir")


def fork() -> int:
    """os.fork without the warning of Python 3.12: the child uses no thread of its parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def in_child(action: Callable[[], object]) -> tuple[int, str]:
    """Exit code of a forked process, negative for a signal, and the result of the action."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        code = 1
        try:
            text = str(action())
            code = 0
        except BaseException:  # noqa: BLE001 - reported to the parent
            text = traceback.format_exc()
        os.write(writer, text.encode()[:60_000])
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


class Stages:
    """Counts the calls that change a folder, and kills the process at one of them."""

    def __init__(self, kill_before: int | None = None) -> None:
        self.count = 0
        self.kill_before = kill_before

    def reached(self) -> None:
        if self.count == self.kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def hook(self, owner: object, name: str) -> None:
        """Make a function of a module a stage. Only for a process that ends soon."""
        original: Callable[..., Any] = getattr(owner, name)

        def staged(*args: Any, **options: Any) -> Any:
            self.reached()
            return original(*args, **options)

        setattr(owner, name, staged)

    def hook_system(self) -> None:
        for name in STAGES:
            self.hook(os, name)
