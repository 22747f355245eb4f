"""Whether a validation.json speaks for the weights that its run has now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expert.core.publish import DONE, fingerprint
from expert.core.rundir import RunFolder, checkpoint_name

WEIGHTS = ".safetensors"


def weights_of(state: Path) -> str:
    """One sha256 for the weights of `final` or of a checkpoint; "" where there are none."""
    return fingerprint(state, WEIGHTS)


def outdated(found: Mapping[str, Any], folder: RunFolder) -> str:
    """Why a validation.json says nothing of the weights there are now; "" where it does."""
    step, told = found.get("step"), found.get("weights")
    state = folder.final
    if isinstance(step, int) and not isinstance(step, bool):
        state = folder.checkpoints / checkpoint_name(step)
    if isinstance(told, str):
        return (
            "" if told == weights_of(state) else "is about earlier weights: the run continued since"
        )
    # A file of an earlier version does not say what it judged, and times alone may come from
    # copying the run. A pass is doubted by them, a failure is not: nothing gets out by a copy.
    gate = found.get("gate")
    failed = isinstance(gate, Mapping) and gate.get("passed") is False
    if failed or _written(state / DONE) <= _written(folder.validation):
        return ""
    return "is older than the weights and does not say which it judged"


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
