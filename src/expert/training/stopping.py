"""When a run ends before its last step: it no longer improves, or somebody asks."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

from expert.core.interrupts import HANGUP, HEARD, WARNING, show_cursor


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an evaluation means for the run."""

    improved: bool
    """The best so far: its checkpoint is the one to keep."""
    stop: bool
    """Patience is at its end."""


class BestSoFar:
    """Follows one metric; what it remembers goes into a checkpoint as JSON."""

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
        """What counting on from here has to know."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "reference": self._reference,
        }

    def observe(self, step: int, value: float) -> Observation:
        """Whether this is the best value so far, and whether enough evaluations brought nothing.

        Any gain makes a checkpoint the best. Patience asks for more: a gain of at least the
        threshold over the last value that renewed it, so that many small gains count together.
        """
        improved = self._gain(value, self.best) > 0
        if improved:
            self.best, self.best_step = value, step
        gain = self._gain(value, self._reference)
        if gain > 0 and gain >= self._threshold:
            self._reference, self.waited = value, 0
        else:
            self.waited += 1
        stop = self._patience is not None and self.waited >= self._patience
        return Observation(improved=improved, stop=stop)

    def _gain(self, value: float, over: float | None) -> float:
        """How much better a value is; a value that is not finite is never better than any."""
        if not math.isfinite(value):
            return -math.inf
        return math.inf if over is None else self._sign * (value - over)


class Signals:
    """While it is entered, SIGINT, SIGTERM and SIGHUP are requests that the loop sees between
    steps, and SIGUSR1 one to save, or to save and stop.

    The first is acknowledged at once: until the step is over and saved, seconds may pass. The
    second signal ends the process at once, unless it is SIGHUP. Handlers can only be set in the
    main thread; anywhere else nothing is ever requested. A signal that was ignored when the process
    began, as by `nohup` or in the background, stays ignored. Workers that are forked
    meanwhile inherit the handlers and leave the answer to the run.
    """

    def __init__(
        self,
        *,
        acknowledge: Callable[[], None] = lambda: None,
        restore_terminal: Callable[[], None] = show_cursor,
        alone: bool = True,
        on_sigusr1: Literal["save", "stop"] = "save",
    ) -> None:
        """`alone`: False for one of many ranks, to whom a scheduler and whoever started it may both
        pass one signal on: a second one is then no second request."""
        self._alone, self._on_sigusr1 = alone, on_sigusr1
        self.requested: int | None = None
        """The exit code to end with, 130 for SIGINT and 143 for SIGTERM, once one has come."""
        self._asked_to_save = False
        self._acknowledge = acknowledge
        self._restore_terminal = restore_terminal
        self._before: dict[int, Any] = {}
        self._listener = os.getpid()

    def __enter__(self) -> Signals:
        self._listener = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in HEARD:
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            # None: the handler was set outside Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._listener:
            self._in_a_worker(number)
            return
        if number == WARNING and self._on_sigusr1 == "save":
            self._asked_to_save = True
            return
        if self.requested is None:
            self.requested = 128 + number
            self._acknowledge()
            return
        if not self._alone or number in (HANGUP, WARNING):
            return
        self._restore_terminal()
        os._exit(128 + number)

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last time."""
        asked, self._asked_to_save = self._asked_to_save, False
        return asked

    @staticmethod
    def _in_a_worker(number: int) -> None:
        """In a process that was forked meanwhile. Ctrl-C reaches every process of a terminal, and
        it is the run that answers; SIGTERM is how a run ends its workers."""
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
