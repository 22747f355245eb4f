"""Ends a run before its last step: no more improvement, or a signal."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal

from expert.core.interrupts import HANDLED_SIGNALS, HANGUP, WARNING, raise_again, show_cursor


class BestSoFar:
    """Tracks one metric; its state goes into a checkpoint as JSON."""

    def __init__(
        self,
        metric: str,
        *,
        greater_is_better: bool,
        threshold: float = 0.0,
        patience: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.metric = metric
        self._sign = 1.0 if greater_is_better else -1.0
        self._threshold, self._patience = threshold, patience
        state = state or {}
        self.best: float | None = state.get("best")
        self.best_step: int | None = state.get("best_step")
        self.waited: int = state.get("waited", 0)
        self._reference: float | None = state.get("reference")

    def state(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "reference": self._reference,
        }

    def observe(self, step: int, value: float) -> tuple[bool, bool]:
        """Whether this is the best value so far, and whether patience has run out.

        Any gain makes a checkpoint the best. Patience needs a gain of at least the threshold over
        the value that last reset it, so that many small gains add up.
        """
        improved = self._gain(value, self.best) > 0
        if improved:
            self.best, self.best_step = value, step
        gain = self._gain(value, self._reference)
        if gain > 0 and gain >= self._threshold:
            self._reference, self.waited = value, 0
        else:
            self.waited += 1
        return improved, self._patience is not None and self.waited >= self._patience

    def _gain(self, value: float, over: float | None) -> float:
        """By how much a value is better; a value that is not finite never is."""
        if not math.isfinite(value):
            return -math.inf
        return math.inf if over is None else self._sign * (value - over)


class Signals:
    """Turns SIGINT, SIGTERM and SIGHUP into stop requests that the loop checks between steps, and
    SIGUSR1 into a request to save, or to save and stop.

    The first signal is acknowledged immediately, because finishing and saving the step may take
    seconds. A second one ends the process immediately, unless it is SIGHUP. Handlers can only be
    set in the main thread; elsewhere nothing is ever requested. Signals that were ignored at
    process start, as under `nohup` or in the background, stay ignored. Forked workers inherit the
    handlers but leave stopping to the run.
    """

    def __init__(
        self,
        *,
        acknowledge: Callable[[bool], None] = lambda again: None,
        alone: bool = True,
        on_sigusr1: Literal["save", "stop"] = "save",
    ) -> None:
        """`alone`: False for one of several ranks, which may get the same signal from the scheduler
        and from the launcher: a second signal is then not a second request."""
        self._alone, self._on_sigusr1 = alone, on_sigusr1
        self.requested: int | None = None
        """The exit code once a signal has come: 130 for SIGINT, 143 for SIGTERM."""
        self._asked_to_save = False
        self._acknowledge = acknowledge
        self._before: dict[int, Any] = {}
        self._listener = os.getpid()

    def __enter__(self) -> Signals:
        raise_again()
        self._listener = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            # None: the handler was set outside Python and cannot be restored.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._listener:
            # A forked worker. Ctrl-C reaches every process of a terminal, and the run handles it;
            # SIGTERM is how a run ends its workers.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if number == WARNING and self._on_sigusr1 == "save":
            self._asked_to_save = True
            return
        if self.requested is None:
            self.requested = 128 + number
            self._acknowledge(False)
            return
        if not self._alone or number in (HANGUP, WARNING):
            return
        show_cursor()
        self._acknowledge(True)
        os._exit(128 + number)

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call."""
        asked, self._asked_to_save = self._asked_to_save, False
        return asked
