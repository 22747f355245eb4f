"""Ctrl-C, SIGTERM and SIGHUP: an end that is asked for, told as an exception so that all is tidied
up; and SIGUSR1, with which Slurm warns a run that its time is nearly over."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h"
HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""The terminal was closed. Shell, kernel and systemd may all say so: never a second request."""
WARNING: int | None = getattr(signal, "SIGUSR1", None)
HEARD = tuple(each for each in (signal.SIGINT, signal.SIGTERM, HANGUP, WARNING) if each is not None)


def asked_by(exit_code: int) -> str:
    """Who asked for an end, in words, by the exit code that it led to."""
    number = signal.Signals(exit_code - 128)
    return "Ctrl-C" if number == signal.SIGINT else number.name


class Interrupted(SystemExit):
    """Somebody asked for an end; the exit code is 128 and the number of the signal."""

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
    SIGUSR1 is for a run that trains; before that it does nothing.
    """
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if number == WARNING or (asked and number == HANGUP):
            return
        if asked:
            show_cursor()
            os._exit(128 + number)
        asked.append(number)
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        return
    for number in HEARD:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


def leave_at_once(code: object) -> None:
    """All is said and done: a signal from here on meets Python while it tidies up, and ends the
    process with the code that it would have ended with."""
    if threading.current_thread() is not threading.main_thread():
        return
    number = code if isinstance(code, int) else int(code is not None)
    for each in HEARD:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda *_: os._exit(number))


@contextlib.contextmanager
def passing_on(pass_on: Callable[[int], None], end: Callable[[], None]) -> Iterator[None]:
    """While it is entered, the first signal is passed on to processes that this one has started
    and waits for; a second one ends them and this process at once. SIGUSR1 is always passed on."""
    asked: list[int] = []

    def answer(number: int, _frame: FrameType | None) -> None:
        if number == WARNING:
            pass_on(number)
            return
        if asked and number == HANGUP:
            return
        if asked:
            end()
            show_cursor()
            os._exit(128 + number)
        asked.append(number)
        pass_on(number)

    before = {number: signal.getsignal(number) for number in HEARD}
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
