"""Paths that a run recorded, found again from any folder, and after all of it was moved."""

from __future__ import annotations

import os
from pathlib import Path


def found_again(recorded: str, *, runs_then: str, runs_now: Path) -> Path:
    """Where a recorded path lies now; where nothing lies there any more, where it would.

    Data, tokens and runs of an expert are moved together: the way from the folder of its runs,
    as recorded, leads from where the run lies now to the same place. Earlier versions recorded
    both as seen from the folder the run was started in, which nobody knows any more.
    """
    then = Path(recorded)
    if then.is_absolute() != Path(runs_then).is_absolute():
        return then.absolute()
    try:
        way = os.path.relpath(recorded, runs_then)
    except ValueError:  # on another drive of a Windows machine, to which no way leads
        return then.absolute()
    beside = Path(os.path.normpath(runs_now.absolute() / way))
    if beside.exists():
        return beside
    # What never lay beside the runs was not moved with them.
    was_beside = Path(runs_then).parent in then.parents
    return then.absolute() if then.exists() or not was_beside else beside
