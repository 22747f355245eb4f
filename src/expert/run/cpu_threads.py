"""The threads of a run on a CPU: chosen when it begins, kept when the same machine resumes it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.planning.machine.threads import Threads
    from expert.run.session import Session

LOOK_SECONDS = 0.2
"""The kernel counts the time of a core in hundredths of a second: enough for a twentieth of one."""


def settle_threads(session: Session) -> None:
    """Take as many threads as there are free cores, say so, and give torch's number back later."""
    import torch

    from expert.planning.machine.threads import Threads

    before = torch.get_num_threads()
    given = session.given_threads
    chosen = Threads(given, "as given") if given else _as_before(session, before)
    chosen = chosen or look_for_threads(before, session.look_seconds or LOOK_SECONDS)
    if session.plan.kernels.deterministic:
        chosen = Threads(before, "deterministic: the same parts are added every time")
    if chosen.count != before:
        torch.set_num_threads(chosen.count)
        session.at_the_end(lambda: torch.set_num_threads(before))
    session.emit(
        "threads",
        step=session.state.done,
        threads=chosen.count,
        cores=_cores(),
        because=chosen.because,
        lowered=chosen.lowered,
        kept=chosen.kept,
        own=before,
    )


def look_for_threads(own: int, seconds: float = LOOK_SECONDS) -> Threads:
    """The number for this moment; where the user has said one, nothing is looked at."""
    from expert.planning.machine.threads import NAMES, choose_threads
    from expert.telemetry.cpu import busy_seconds

    busy = 0.0
    if own > 1 and not any(os.environ.get(name) for name in NAMES):
        began, worked = time.monotonic(), busy_seconds()
        time.sleep(seconds)
        busy = (busy_seconds() - worked) / (time.monotonic() - began)
    return choose_threads(
        own=own, granted=_granted(own), cores=_cores(), busy=max(0.0, busy), environ=os.environ
    )


def _cores() -> int:
    from expert.telemetry.cpu import cores_seen

    return len(cores_seen())


def _granted(own: int) -> int:
    from expert.planning.machine.host import cores_available

    return cores_available(Path("/")).value or own


def _as_before(session: Session, own: int) -> Threads | None:
    """The threads of the run that is resumed, where it ran on as many cores."""
    from expert.core.events import read_events
    from expert.planning.machine.threads import NAMES, threads_as_before

    if not session.state.done or any(os.environ.get(name) for name in NAMES):
        return None
    told = [e for e in read_events(session.folder.events) if e.get("event") == "threads"]
    if not told:
        return None
    return threads_as_before(told[-1], granted=_granted(own), cores=_cores())
