"""Which rows a run was trained on, from its folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.events import read_events
from expert.core.rundir import RunFolder, checkpoints_in
from expert.core.stored_json import read_object

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
    folders: frozenset[Path] = frozenset()
    """The folders of the prepared rows."""

    def difference_to(self, recipes: Sequence[Recipe], cache: Path) -> str:
        """Why rows of these recipes differ from those of the run, in words; "" if they do not. The
        cache may still hold the recipes of the run."""
        from expert.data.tokens.prepare import short_key

        if not self.tokens:
            return "the run folder does not record which rows it was trained on"
        if self.mixed or len(self.indexes) > 1:
            return "the run was resumed with other rows than it started with"
        today = {short_key(recipe.key()): recipe for recipe in recipes}
        if self.tokens == today.keys():
            return ""
        new = [recipe for key, recipe in today.items() if key not in self.tokens]
        return _what_changed(new, self._recipes_gone(today.keys(), cache))

    def same_as(self, other: TrainedRows) -> bool:
        """Whether two runs surely drew the same rows from the same data."""
        known = bool(self.tokens and self.indexes) and not (self.mixed or other.mixed)
        return known and (self.tokens, self.indexes) == (other.tokens, other.indexes)

    def has_index(self, name: str) -> bool:
        """Whether the rows were drawn as in this index; if none is known the recipes decide."""
        return not self.indexes or self.indexes == {name}

    def _recipes_gone(self, today: Iterable[str], cache: Path) -> list[dict[str, Any]]:
        """Recipes of rows the run was trained on that today's manifest no longer produces."""
        from expert.data.tokens.prepare import tokens_folder

        gone = self.tokens.difference(today)
        recipes = {}
        for folder in (*self.folders, *(cache / tokens_folder(key) for key in gone)):
            entry = recipe_in(folder)
            if entry is not None:
                key, recipe = entry
                recipes[key] = recipe
        return [recipe for key, recipe in sorted(recipes.items()) if key in gone]


def recipe_in(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The short key and the recipe of a prepared folder; None if it has none."""
    from expert.data.tokens.prepare import RECIPE, Recipe, short_key

    try:
        recipe = Recipe(**read_object(folder / RECIPE))
    except (OSError, ValueError, TypeError):
        return None
    return short_key(recipe.key()), asdict(recipe)


def _what_changed(new: Sequence[Recipe], gone: Sequence[Mapping[str, Any]]) -> str:
    """How today's recipes differ from those of the run."""
    if not new or not gone:
        return "the data, or how its rows are read, changed since the run"
    # With several sources, those with the same bytes are the same source.
    pairs = [(recipe, old) for recipe in new for old in gone]
    recipe, old = next((pair for pair in pairs if pair[0].data == pair[1]["data"]), pairs[0])
    return f"{recipe.difference(dict(old))} since the run"


def trained_rows(folder: RunFolder) -> TrainedRows:
    """Collected from events and checkpoints, of which some may be gone."""
    from expert.data.tokens.prepare import short_key
    from expert.training.checkpoint import CheckpointError, read_state

    tokens: set[str] = set()
    indexes: set[str] = set()
    folders: set[Path] = set()
    mixed = False
    for event in read_events(folder.events):
        if event["event"] == "data" and event.get("split") == "train":
            place = Path(str(event.get("folder", "")))
            tokens.update([short_key(str(event["key"]))] if event.get("key") else ())
            indexes.update([str(event["index"])] if event.get("index") else ())
            folders.add(place)
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
    return TrainedRows(frozenset(tokens), frozenset(indexes), mixed, frozenset(folders))
