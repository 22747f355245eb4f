"""Ctrl-C, SIGTERM and SIGHUP raise an exception, so that everything is cleaned up; SIGUSR1 is how
Slurm warns a run that its time is nearly over."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SHOW_CURSOR = b"\x1b[?25h"
HANGUP = signal.SIGHUP
"""The terminal was closed. Shell, kernel and systemd may each send it: never a second request."""
WARNING = signal.SIGUSR1
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, HANGUP, WARNING)
_raised: list[int] = []
"""The signal that Interrupted is raised for."""
_waits = False


def signal_label(exit_code: int) -> str:
    """The signal behind an exit code, as shown to a user."""
    number = signal.Signals(exit_code - 128)
    return "Ctrl-C" if number == signal.SIGINT else number.name


class Interrupted(SystemExit):
    """The process was asked to stop; the exit code is 128 plus the signal number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.by = signal_label(128 + number)
        self.left = ""
        """What the interrupted work leaves behind, where its code knows more than the command."""
        self.shown = False
        """Whether `left` was already shown to the user."""


def raise_on_signals() -> None:
    """Raise Interrupted in the main thread at the first signal, and end the process immediately at
    the second: the exception may have been swallowed, or cleaning up may take long.

    Signals ignored at start-up, as by `nohup` or in the background, stay ignored. SIGUSR1 has no
    effect until a run trains.
    """

    def leave(number: int) -> None:
        if number != WARNING:
            _raised.append(number)
            if not _waits:
                raise Interrupted(number)

    def report(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Interrupted):  # that is raised again, see below
            sys.__unraisablehook__(lost)

    _raised.clear()
    sys.unraisablehook = report
    if threading.current_thread() is threading.main_thread():
        _listen(leave)


def raise_again() -> None:
    """Raise Interrupted if a signal came before: Python swallows what is raised in its own hooks,
    such as those around a fork."""
    if _raised:
        raise Interrupted(_raised[0])


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """While active, Interrupted waits: for steps of others that it would leave half done, such as
    starting processes."""
    global _waits
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits = True
    try:
        yield
    finally:
        _waits = False
        raise_again()


def exit_on_signals(code: object) -> None:
    """From here on a signal ends the process with its final exit code: all work is done, and only
    Python's own shutdown is left."""
    if threading.current_thread() is not threading.main_thread():
        return
    number = code if isinstance(code, int) else int(code is not None)
    for heard in HANDLED_SIGNALS:
        if signal.getsignal(heard) is not signal.SIG_IGN:
            signal.signal(heard, lambda *_: os._exit(number))


@contextlib.contextmanager
def forwarding_signals(pass_on: Callable[[int], None], end: Callable[[], None]) -> Iterator[None]:
    """While active, forward the first signal to child processes this one waits for; a second one
    ends them and this process immediately. SIGUSR1 is always forwarded."""
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    _listen(pass_on, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(answer: Callable[[int], None], end: Callable[[], None] = lambda: None) -> None:
    """Call `answer` for the first signal and every SIGUSR1; at a second signal call `end` and exit
    immediately."""
    asked: list[int] = []

    def heard(number: int, _frame: FrameType | None) -> None:
        if asked and number == HANGUP:
            return
        if asked and number != WARNING:
            end()
            show_cursor()
            os._exit(128 + number)
        if number != WARNING:
            asked.append(number)
        answer(number)

    for number in HANDLED_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, heard)


def show_cursor() -> None:
    """Show the cursor again after a progress bar has hidden it."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(stream):
                os.write(stream, SHOW_CURSOR)
