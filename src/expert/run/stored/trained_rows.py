"""Which rows a run was trained on, from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.core.events import read_events
from expert.core.rundir import RunFolder, checkpoints_in

if TYPE_CHECKING:
    from expert.data.tokens.prepare import Recipe

ROW_DIFFERENCES = ("data.tokens", "data.index")
"""Prefixes of differences about the rows, which --allow-changed accepted."""


@dataclass(frozen=True)
class TrainedRows:
    """All rows a run was trained on, over all its starts."""

    tokens: frozenset[str]
    """Short keys of the prepared rows, as in the names of their folders; a key depends on the
    content of the rows and on their formatting."""
    indexes: frozenset[str]
    """Names of the pack indexes, which depend on the keys and the rows drawn."""
    mixed: bool
    """It continued with other rows than it started with."""

    def difference_to(self, recipes: Sequence[Recipe]) -> str:
        """Why rows of these recipes differ from those of the run, in words; "" if they do not."""
        from expert.data.tokens.prepare import short_key

        if not self.tokens:
            return "the run folder does not record which rows it was trained on"
        if self.mixed or len(self.indexes) > 1:
            return "the run was resumed with other rows than it started with"
        if self.tokens != {short_key(recipe.key()) for recipe in recipes}:
            return "the data, or how its rows are read, changed since the run"
        return ""

    def same_as(self, other: TrainedRows) -> bool:
        """Whether two runs surely drew the same rows from the same data."""
        known = bool(self.tokens and self.indexes) and not (self.mixed or other.mixed)
        return known and (self.tokens, self.indexes) == (other.tokens, other.indexes)


def trained_rows(folder: RunFolder) -> TrainedRows:
    """Collected from events and checkpoints, of which some may be gone."""
    from expert.data.tokens.prepare import short_key
    from expert.training.checkpoint import CheckpointError, read_state

    tokens: set[str] = set()
    indexes: set[str] = set()
    mixed = False
    for event in read_events(folder.events):
        if event["event"] == "data" and event.get("split") == "train":
            tokens.update([short_key(str(event["key"]))] if event.get("key") else ())
            indexes.update([str(event["index"])] if event.get("index") else ())
        elif event["event"] == "resumed":
            lines = event.get("changed") or ()
            mixed = mixed or any(str(line).startswith(ROW_DIFFERENCES) for line in lines)
    for _, checkpoint in checkpoints_in(folder.checkpoints):
        try:
            data = read_state(checkpoint)["identity"]["data"]
            tokens.update(short_key(key) for key in data["tokens"])
            indexes.add(data["index"])
        except (CheckpointError, KeyError, TypeError):
            continue
    return TrainedRows(frozenset(tokens), frozenset(indexes), mixed)
