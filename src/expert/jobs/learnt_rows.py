"""Which rows a run has learnt from, by what it left in its folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder

SAYS_OTHER_ROWS = ("data.tokens", "data.index")
"""Beginnings of the differences that --allow-changed let pass and that concern the rows."""


@dataclass(frozen=True)
class LearntRows:
    """Everything the run has trained on, from its first start to its last."""

    tokens: frozenset[str]
    """Keys of the prepared rows; each follows from their content and from how they are written."""
    indexes: frozenset[str]
    """Names of the indexes: each follows from the keys and from the rows that were drawn."""
    mixed: bool
    """It went on with other rows than it began with."""

    def unlike(self, tokens: Collection[str]) -> str:
        """Why rows with these keys are not those of the run, in words; "" where they are."""
        if not self.tokens or not self.indexes:
            return "the run folder does not tell which rows were learnt"
        if self.mixed or len(self.indexes) > 1:
            return "the run went on with other rows than it began with"
        return "" if self.tokens == frozenset(tokens) else "the data changed since the run"


def learnt_rows(folder: RunFolder) -> LearntRows:
    """What the events and the checkpoints of a run say; checkpoints may have been removed, and
    events of earlier versions name no keys."""
    from expert.core.events import read_events
    from expert.training.checkpoint import CheckpointError, read_state

    tokens: set[str] = set()
    indexes: set[str] = set()
    mixed = False
    for event in read_events(folder.events) if folder.events.is_file() else ():
        if event["event"] == "data" and event.get("split") == "train" and event.get("key"):
            tokens.add(str(event["key"]))
            indexes.add(str(event["index"]))
        elif event["event"] == "resumed":
            lines = event.get("changed") or ()
            mixed = mixed or any(str(line).startswith(SAYS_OTHER_ROWS) for line in lines)
    for checkpoint in folder.checkpoints.glob("step-*") if folder.checkpoints.is_dir() else ():
        try:
            data = read_state(checkpoint)["identity"]["data"]
            tokens.update(data["tokens"])
            indexes.add(data["index"])
        except (CheckpointError, KeyError, TypeError):
            continue
    return LearntRows(frozenset(tokens), frozenset(indexes), mixed)
