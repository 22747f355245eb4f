"""Every kernel run on this machine, in a process that may crash without harm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from expert.core.process import Child, how_it_ended
from expert.jobs.diagnose.kernels import TRIALS

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
    """All trials, and what torch was built for."""

    device: str
    tried: tuple[Tried, ...]
    torch: dict[str, Any] = field(default_factory=dict)
    """version, cuda (that torch was built for), available, architectures, capability."""
    note: str = ""
    """Why nothing was run; empty where something was."""

    def of(self, name: str) -> Tried | None:
        return next((each for each in self.tried if each.name == name), None)


def not_tried(device: str, because: str) -> Trials:
    """No trials, and why not."""
    return Trials(device=device, tried=(), note=because)


def try_kernels(
    device: Literal["cuda", "cpu"],
    names: Sequence[str] | None = None,
    *,
    command: Sequence[str] = (sys.executable, "-m", "expert.jobs.diagnose.kernels"),
    seconds: float = SECONDS_A_TRIAL,
    tell: Callable[[str], None] = lambda name: None,
) -> Trials:
    """Run the named trials, or all; after one that ends its process the rest run in a new one."""
    left = list(TRIALS if names is None else names)
    done: list[Tried] = []
    facts: dict[str, Any] = {}
    note = ""
    while left:
        before = len(done)
        note = _run([*command, device, *left], seconds, tell, done, facts)
        if len(done) == before:
            break
        left = [name for name in left if name not in {each.name for each in done}]
    done += [Tried(name=name, state="not tried", because=note) for name in left]
    return Trials(device=device, tried=tuple(done), torch=facts, note=note if not facts else "")


def _run(
    command: list[str],
    seconds: float,
    tell: Callable[[str], None],
    done: list[Tried],
    facts: dict[str, Any],
) -> str:
    """One process of trials, until it has run all of them or one has ended it; why it started
    none."""
    # A kernel that fails without a synchronous launch is blamed on a later one.
    child = Child(command, env={"CUDA_LAUNCH_BLOCKING": "1", "PYTHONFAULTHANDLER": "1"})
    begun: str | None = None
    limit = time.monotonic() + SECONDS_TO_START
    try:
        while (said := child.next(limit)) is not None:
            if "facts" in said:
                facts |= said["facts"]
            elif "begin" in said:
                begun = str(said["begin"])
                tell(begun)
                limit = time.monotonic() + seconds
            elif "result" in said:
                done.append(Tried(**said["result"]))
                begun = None
        if time.monotonic() >= limit:
            if begun is not None:
                because = f"not done after {seconds:.0f} s"
                done.append(Tried(name=begun, state="too slow", because=because))
            return f"no answer for {SECONDS_TO_START:.0f} s"
        code = child.wait()
        words = child.last_words(KEPT_ERROR_LINES)
        if begun is not None:
            last = f": {child.last_words()}" if code >= 0 and words else ""
            because = f"the process {how_it_ended(code)}{last}"
            done.append(Tried(name=begun, state="crashed", because=because))
        return words or "the trials did not start"
    finally:
        child.stop()
