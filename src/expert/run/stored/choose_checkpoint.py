"""Which state of a run is meant: the finished expert, the best checkpoint, or that of a step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import Damaged, ExpertError
from expert.core.events import read_events
from expert.core.publish import DONE, cached_damage, damage
from expert.core.rundir import checkpoint_name, checkpoints_in

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder

FINAL, BEST, BASE = "final", "best", "base"
_STEP = re.compile(r"(?:checkpoint-|step-)?(\d{1,9})")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A state of a run: its folder, and its step if known."""

    name: str
    path: Path
    step: int | None

    @property
    def is_final(self) -> bool:
        return self.step is None


def choose(folder: RunFolder, asked: str) -> Choice:
    """Find the finished expert (`final`), the best checkpoint (`best`), or that of a step."""
    number = _STEP.fullmatch(asked)
    if asked == FINAL and (folder.final / DONE).is_file():
        return _whole_final(folder, FINAL)
    if asked == FINAL:
        what = f"there is no finished expert: {damage(folder.final)}"
        fix = f"let the run finish with --resume; {_offer(folder)}"
        raise ExpertError(f"{folder.final}: {what}  ({fix})")
    if asked == BEST:
        return _best(folder)
    if number is None:
        what = "is neither final nor best nor a step number"
        raise ExpertError(f"--checkpoint {asked}: {what}  ({_offer(folder)})")
    step = int(number[1])
    path = folder.checkpoints / checkpoint_name(step)
    if not (path / DONE).is_file():
        raise ExpertError(f"{folder.path}: no checkpoint of step {step}  ({_offer(folder)})")
    return Choice(name=path.name, path=path, step=step)


def _whole_final(folder: RunFolder, name: str) -> Choice:
    """The finished expert, with every file verified: one flipped bit in an adapter silently changes
    its answers."""
    fault = damage(folder.final, contents=False) or cached_damage(folder.final)
    if fault:
        fix = f"take a checkpoint or train again; {_offer(folder, but=FINAL)}"
        raise Damaged(f"{folder.final}: it was changed after the run: {fault}  ({fix})")
    return Choice(name=name, path=folder.final, step=None)


def _best(folder: RunFolder) -> Choice:
    """The checkpoint of the best evaluation, or the finished expert if made from it."""
    best: list[int] = []
    taken = last = None
    for event in read_events(folder.events):
        kind, step = event["event"], event.get("step")
        if kind == "eval" and event.get("best") is True and isinstance(step, int):
            best.append(step)
        elif kind in ("rolled_back", "resumed"):
            best = [known for known in best if known <= (step or 0)]
        elif kind == "took_best":
            taken = step
        elif kind == "finished":
            last = step
    if not best:
        what = "no evaluation recorded a best checkpoint"
        raise ExpertError(f"{folder.path}: {what}  ({_offer(folder)})")
    path = folder.checkpoints / checkpoint_name(best[-1])
    if (path / DONE).is_file():
        return Choice(name=f"best ({path.name})", path=path, step=best[-1])
    if best[-1] in (taken, last) and (folder.final / DONE).is_file():
        return _whole_final(folder, f"best ({FINAL})")
    what = f"the best checkpoint, {path.name}, is not kept"
    raise ExpertError(f"{folder.path}: {what}  ({_offer(folder)})")


def states(folder: RunFolder) -> list[str]:
    """All saved states by name: checkpoints in order, then the final state."""
    steps = checkpoints_in(folder.checkpoints)
    there = [str(step) for step, path in steps if (path / DONE).is_file()]
    return [*there, *([FINAL] if (folder.final / DONE).is_file() else [])]


def _offer(folder: RunFolder, *, but: str = "") -> str:
    """The saved states as advice, without the state `but`."""
    there = [name for name in states(folder) if name != but]
    names = there[-1:] + there[:-1] if there[-1:] == [FINAL] else there
    nothing = f"it has saved nothing {'else' if but else 'yet'}"
    return f"there is --checkpoint {', '.join(names)}" if names else nothing
