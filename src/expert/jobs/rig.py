"""The process that measures rungs, from outside: asked, listened to, and ended when it hangs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.child import Child, how_it_ended

if TYPE_CHECKING:
    from expert.insight.ladder import Measured
    from expert.jobs.rungs import Work

START_SECONDS = 180.0
"""For importing torch from a slow disk."""
COUNTS = ("training_rows", "held_out_rows", "held_out_tokens")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of a rung: what was measured, or why nothing was."""

    measured: Measured | None = None
    because: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows and tokens that are the same for all rungs."""


class Rig:
    """Starts the process when it is needed, and again when it had to be ended."""

    def __init__(self, *, log: Path, command: Sequence[str] = ()) -> None:
        self._log = log
        self._command = list(command) or [sys.executable, "-m", "expert.jobs.rung_server"]
        self._child: Child | None = None
        self.environment: dict[str, Any] = {}

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def measure(self, work: Work, tell: Callable[[str, int, int], None]) -> Seen:
        """Have one rung measured; whatever happens in there, this returns."""
        limit = float(work.pace["limit_seconds"])
        if self._child is not None and self._child.has_ended:
            self.stop()  # it ended between two rungs
        if self._child is None:
            tell("starting", 0, 0)
            words = self._start()
            if words:
                return Seen(because=f"its process did not start: {words}")
        child = self._child
        assert child is not None
        if not child.ask(asdict(work)):
            self.stop()
            return Seen(because=f"its process ended: {_words(child)}")
        found, ends_at = Seen(), time.monotonic() + limit
        while True:
            answer = child.next(ends_at)
            if answer is None:
                late = time.monotonic() >= ends_at
                self.stop()
                words = f"not done after {limit:.0f} s" if late else "its process ended"
                return found if found.measured else Seen(because=words)
            if "doing" in answer:
                tell(answer["doing"], answer["done"], answer["of"])
            elif "seen" in answer:
                found = _understood(answer["seen"])
            elif "failed" in answer:
                found = Seen(because=str(answer["failed"]))
            elif "ended" in answer:
                if found.measured is None and not found.because:
                    code = int(answer["ended"])
                    last = "" if code < 0 else f": {_words(child)}"
                    found = Seen(because=f"its process {how_it_ended(code)}{last}")
                return found

    def stop(self) -> None:
        """End the process with all that it started."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def _start(self) -> str:
        """Wait until it is ready; its last words where it never is."""
        # cuInit before a fork would spoil CUDA in it; this way torch asks NVML instead.
        env = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
        child = self._child = Child(self._command, log=self._log, env=env)
        ready = child.next(time.monotonic() + START_SECONDS)
        if ready is None or "ready" not in ready:
            self.stop()
            return _words(child)
        self.environment = ready["environment"]
        return ""


def _words(child: Child) -> str:
    return child.last_words() or "it said nothing"


def _understood(seen: dict[str, Any]) -> Seen:
    from expert.insight.ladder import Measured, spread_of

    counts = {key: int(seen.pop(key)) for key in COUNTS}
    if seen["loss"] is not None and not math.isfinite(seen["loss"]):
        seen["loss"] = None  # which JSON has no word for, and which agrees with nothing
    return Seen(measured=Measured(**seen, spread=spread_of(seen["windows"])), counts=counts)
