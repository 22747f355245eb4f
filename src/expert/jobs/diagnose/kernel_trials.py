"""Every kernel tried on this machine, in a process that may die of it without harm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from expert.core.process import Child, how_it_ended

State = Literal["works", "wrong", "failed", "crashed", "too slow", "absent", "not tried"]

SECONDS_A_TRIAL = 120.0
"""One trial may take this long: compiling for the first time takes 20 s, on a busy machine more."""
SECONDS_TO_START = 180.0
"""Importing torch from a cold network disk has been seen to take minutes."""
KEPT_ERROR_LINES = 3


@dataclass(frozen=True, kw_only=True)
class Tried:
    """How a kernel did."""

    name: str
    state: State
    because: str = ""
    off_by: float | None = None
    """Largest relative difference of outputs and gradients from float32."""
    tolerance: float | None = None
    first_seconds: float | None = None
    """The first time, with whatever had to be loaded or compiled."""
    seconds: float | None = None
    """Once more, forward, backward and the comparison."""

    @property
    def bad(self) -> bool:
        return self.state in ("wrong", "failed", "crashed", "too slow")


@dataclass(frozen=True, kw_only=True)
class Trials:
    """All trials, and what torch said about itself."""

    device: str
    tried: tuple[Tried, ...]
    torch: dict[str, Any] = field(default_factory=dict)
    """version, cuda (that torch was built for), available, architectures, capability."""
    note: str = ""
    """Why nothing was tried; empty where something was."""

    def of(self, name: str) -> Tried | None:
        return next((each for each in self.tried if each.name == name), None)


def not_tried(device: str, because: str) -> Trials:
    """No trials, and why not."""
    return Trials(device=device, tried=(), note=because)


def try_kernels(
    device: Literal["cuda", "cpu"],
    names: Sequence[str] | None = None,
    *,
    command: Sequence[str] = (sys.executable, "-m", "expert.jobs.diagnose.kernel_runs"),
    seconds: float = SECONDS_A_TRIAL,
    tell: Callable[[str], None] = lambda name: None,
) -> Trials:
    """Run the trials named, or all; after one that ends its process the rest go on in a new one."""
    from expert.jobs.diagnose.kernel_arithmetic import TRIALS

    left = list(TRIALS if names is None else names)
    done: list[Tried] = []
    facts: dict[str, Any] = {}
    note = ""
    while left:
        run = _Run([*command, device, *left], seconds)
        reached, found = run.watch(tell)
        facts = run.facts or facts
        done += reached
        if found is not None:
            done.append(found)
        if not reached and found is None:
            note = run.trouble or "the trials did not start"
            break
        left = [name for name in left if name not in {each.name for each in done}]
    done += [Tried(name=name, state="not tried", because=note) for name in left]
    return Trials(device=device, tried=tuple(done), torch=facts, note=note if not facts else "")


class _Run:
    """One process of trials, until it has tried all of them or one has ended it."""

    def __init__(self, command: list[str], seconds: float) -> None:
        self.facts: dict[str, Any] = {}
        self.trouble = ""
        self._seconds = seconds
        # A kernel that fails without a synchronous launch is blamed on a later one.
        env = {"CUDA_LAUNCH_BLOCKING": "1", "PYTHONFAULTHANDLER": "1"}
        self._child = Child(command, env=env)

    def watch(self, tell: Callable[[str], None]) -> tuple[list[Tried], Tried | None]:
        """The finished trials, and the one that ended the process, if one did."""
        reached: list[Tried] = []
        begun: str | None = None
        limit = time.monotonic() + SECONDS_TO_START
        try:
            while True:
                said = self._child.next(limit)
                if said is None:
                    return reached, self._without(begun, late=time.monotonic() >= limit)
                if "facts" in said:
                    self.facts = said["facts"]
                elif "begin" in said:
                    begun = str(said["begin"])
                    tell(begun)
                    limit = time.monotonic() + self._seconds
                elif "result" in said:
                    reached.append(Tried(**said["result"]))
                    begun = None
        finally:
            self._child.stop()

    def _without(self, begun: str | None, *, late: bool) -> Tried | None:
        """The process says no more: because of the trial that has begun, or before any has."""
        if late:
            because = f"not done after {self._seconds:.0f} s"
            self.trouble = f"no answer for {SECONDS_TO_START:.0f} s"
            return Tried(name=begun, state="too slow", because=because) if begun else None
        code = self._child.wait()
        self.trouble = self._child.last_words(KEPT_ERROR_LINES)
        if begun is None:
            return None
        last = f": {self._child.last_words()}" if code >= 0 and self.trouble else ""
        because = f"the process {how_it_ended(code)}{last}"
        return Tried(name=begun, state="crashed", because=because)
