"""A second process for work that holds the interpreter's lock: forked, with all the first has."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from types import TracebackType


class Helper:
    """While it is entered, a forked process does its work; leaving waits for it, or ends it where
    something was raised. What it did not do is left undone: whoever needs it looks for the result.

    Nothing of the first process is shut down in it, and it writes nothing to the terminal.
    """

    def __init__(self, work: Callable[[], None], *, wanted: bool) -> None:
        self._work = work
        self._wanted = wanted and hasattr(os, "fork")
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def is_there(self) -> bool:
        return self._pid is not None

    def __enter__(self) -> Helper:
        if not self._wanted:
            return self
        try:
            with warnings.catch_warnings():
                # A thread that draws progress may be there; the helper never draws.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._pid = os.fork()
        except OSError:  # no room for another process
            return self
        if self._pid == 0:
            self._be_the_helper()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pid is None:
            return
        if kind is not None:
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _be_the_helper(self) -> None:
        code = 1
        try:
            self._work()
            code = 0
        finally:
            os._exit(code)  # no handler, no buffer and no traceback of the first process
