"""Ctrl-C and SIGTERM: an end that is asked for, told as an exception so that all is tidied up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h"
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def asked_by(exit_code: int) -> str:
    """Who asked for an end, in words, by the exit code that it led to."""
    number = signal.Signals(exit_code - 128)
    return _NAMES.get(number, number.name)


class Interrupted(SystemExit):
    """Somebody asked for an end; the exit code is 130 for Ctrl-C and 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.by = asked_by(128 + number)
        self.left = ""
        """What is left of what was interrupted, where somebody knows more than the command."""
        self.told = False
        """Whether somebody who knew more has said what is left."""


def leave_when_asked() -> None:
    """Let the first signal raise Interrupted in the main thread, and a second one end the process
    at once: what was raised may have been swallowed, or tidying up may take long.

    A signal that was ignored when the process began, as by `nohup` or in the background, stays so.
    """
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if asked:
            show_cursor()
            os._exit(128 + number)
        asked.append(number)
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        return
    for number in _NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


@contextlib.contextmanager
def passing_on(pass_on: Callable[[int], None], end: Callable[[], None]) -> Iterator[None]:
    """While it is entered, the first signal is passed on to processes that this one has started
    and waits for; a second one ends them and this process at once."""
    asked: list[int] = []

    def answer(number: int, _frame: FrameType | None) -> None:
        if asked:
            end()
            show_cursor()
            os._exit(128 + number)
        asked.append(number)
        pass_on(number)

    before = {number: signal.getsignal(number) for number in _NAMES}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, answer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_cursor() -> None:
    """Show the cursor that a progress bar has hidden, on whatever terminal there is."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                os.write(stream, SHOW_CURSOR)
