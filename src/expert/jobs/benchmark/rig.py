"""The processes that measure rungs, from outside: asked, listened to, and ended when one hangs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.process import Child, how_it_ended
from expert.jobs.benchmark.rung_windows import Order, Window

if TYPE_CHECKING:
    from expert.insight.ladder.ladder import Measured
    from expert.jobs.benchmark.rungs import Work

START_SECONDS = 180.0
"""For importing torch from a slow disk."""
LEAST_WAIT_SECONDS = 60.0
"""For a window, however short it should be: a neighbour may hold everything up."""
COUNTS = ("training_rows", "held_out_rows", "held_out_tokens")

Tell = Callable[[str, int, int], None]


class RungLost(Exception):
    """A rung that cannot be measured any more; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A rung that stands ready."""

    seconds_per_update: float
    updates_learnt: int
    threads: int | None = None
    """Of a CPU; None on a card."""
    cores: int | None = None
    lowered: bool | None = None
    """Fewer threads than cores, because others use them."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was measured of a rung."""

    measured: Measured
    counts: dict[str, int] = field(default_factory=dict)
    """Rows and tokens that are the same for all rungs."""


class Seat:
    """A process in which one rung at a time is measured; started when it is needed, and again when
    it had to be ended."""

    def __init__(self, *, log: Path, command: Sequence[str] = ()) -> None:
        self._log = log
        self._command = list(command) or [sys.executable, "-m", "expert.jobs.benchmark.rung_server"]
        self._child: Child | None = None
        self._limit = 0.0
        self._begun: Begun | None = None
        self.environment: dict[str, Any] = {}

    @property
    def taken(self) -> bool:
        """Whether a rung stands ready in it."""
        return self._begun is not None

    @property
    def begun(self) -> Begun:
        assert self._begun is not None, "nobody sits here"
        return self._begun

    def begin(self, work: Work, tell: Tell) -> Begun:
        """Have a rung loaded, taught and judged until it stands ready for windows."""
        assert not self.taken, "somebody sits here"
        self._limit = float(work.pace["limit_seconds"])
        if self._child is not None and self._child.has_ended:
            self.stop()  # it ended between two rungs
        if self._child is None:
            tell("starting", 0, 0)
            self._start()
        self._ask(asdict(work))
        answer = self._wait_for("begun", self._limit, tell)
        self._begun = Begun(**answer)
        return self._begun

    def window(self, updates: int, skip: int, tell: Tell) -> Window:
        """Have so many updates timed, after some that are not."""
        expected = (updates + skip) * self.begun.seconds_per_update
        self._ask(asdict(Order(do="window", updates=updates, skip=skip)))
        return Window(**self._wait_for("window", LEAST_WAIT_SECONDS + 10 * expected, tell))

    def seen(self, tell: Tell, *, stays: bool) -> Seen:
        """What was seen so far; a rung that does not stay is judged only now, and leaves."""
        self._ask(asdict(Order(do="tell")))
        seen = self._wait_for("seen", self._limit, tell)
        if not stays:
            self._ended()
        begun, self._begun = self._begun, self._begun if stays else None
        assert begun is not None
        return _understood(seen, begun)

    def leave(self) -> None:
        """End the rung and keep the process for the next one."""
        if self._begun is None:
            return
        self._begun = None
        try:
            self._ask(asdict(Order(do="leave")))
            self._ended()
        except RungLost:
            self.stop()

    def stop(self) -> None:
        """End the process with all that it started."""
        child, self._child, self._begun = self._child, None, None
        if child is not None:
            child.stop()

    # --- inside --------------------------------------------------------------------------------

    def _start(self) -> None:
        # cuInit before a fork would spoil CUDA in it; this way torch asks NVML instead.
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = self._child = Child(self._command, log=self._log, env=env)
        ready = child.next(time.monotonic() + START_SECONDS)
        if ready is None or "ready" not in ready:
            self.stop()
            raise RungLost(f"its process did not start: {_words(child)}")
        self.environment = ready["environment"]

    def _ask(self, request: dict[str, Any]) -> None:
        child = self._child
        assert child is not None
        if not child.ask(request):
            self.stop()
            raise RungLost(f"its process ended: {_words(child)}")

    def _wait_for(self, wanted: str, limit: float, tell: Tell) -> dict[str, Any]:
        """The answer of this name; RungLost where there will be none. The limit is one of silence:
        a rung whose updates are slow says something after each of them."""
        child, because = self._child, ""
        assert child is not None
        while True:
            ends_at = time.monotonic() + limit
            answer = child.next(ends_at)
            if answer is None:
                late = time.monotonic() >= ends_at
                self.stop()
                raise RungLost(f"silent for {limit:.0f} s" if late else "its process ended")
            if wanted in answer:
                return dict(answer[wanted])
            if "doing" in answer:
                tell(answer["doing"], answer["done"], answer["of"])
            elif "failed" in answer:
                because = str(answer["failed"])
            elif "ended" in answer:
                code = int(answer["ended"])
                last = "" if code < 0 else f": {_words(child)}"
                if self._begun is not None:
                    self.stop()  # it died standing still: an order for it may lie unread
                raise RungLost(because or f"its process {how_it_ended(code)}{last}")

    def _ended(self) -> None:
        """Wait until the process of the rung has gone, and its memory with it."""
        child, ends_at = self._child, time.monotonic() + LEAST_WAIT_SECONDS
        assert child is not None
        while True:
            answer = child.next(ends_at)
            if answer is None:
                self.stop()
                return
            if "ended" in answer:
                if answer["ended"] != 0:  # not because it was told to leave
                    self.stop()
                return


class Rig:
    """Two seats: the rung that is measured, and the one that it is held against."""

    def __init__(self, *, log: Path, command: Sequence[str] = ()) -> None:
        other = log.with_stem(f"{log.stem}-2")  # last words are those of one process
        self.seats = (Seat(log=log, command=command), Seat(log=other, command=command))

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, Any]:
        """Of the first seat that was started."""
        return next((seat.environment for seat in self.seats if seat.environment), {})

    def free_seat(self) -> Seat:
        """One in which nobody sits: of those one that was started already, if any was."""
        free = [seat for seat in self.seats if not seat.taken]
        assert free, "both seats are taken"
        return next((seat for seat in free if seat.environment), free[0])

    def stop(self) -> None:
        """End both."""
        for seat in self.seats:
            seat.stop()


def _words(child: Child) -> str:
    return child.last_words() or "it said nothing"


def _understood(seen: dict[str, Any], begun: Begun) -> Seen:
    from expert.insight.ladder.ladder import Measured
    from expert.insight.ladder.pairs import spread_of

    counts = {key: int(seen.pop(key)) for key in COUNTS if key in seen}
    if seen.setdefault("loss", None) is not None and not math.isfinite(seen["loss"]):
        seen["loss"] = None  # which JSON has no word for, and which agrees with nothing
    machine = {key: getattr(begun, key) for key in ("threads", "cores", "lowered")}
    return Seen(
        measured=Measured(**seen, **machine, spread=spread_of(seen["windows"])), counts=counts
    )
