"""Whether a word is another one misspelt: near enough that nobody can have meant it otherwise."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST = 4
"""A known word shorter than this has too many neighbours that mean something else."""
LONG_ENOUGH_TO_REPLACE = 6
"""Below, one letter for another is another word: `date` is not `data`, `test` not `text`."""
LONG_ENOUGH_FOR_TWO = 6
LONG_ENOUGH_TO_BEGIN_WRONG = 9
"""Slips seldom hit the first letter; `ranking` is not `packing`."""

# Words one or two letters away from a key that say something else in a description.
WORDS_OF_THEIR_OWN = frozenset(
    (
        *("adapted", "complete", "completed", "compiled", "datasets", "date", "devices", "methods"),
        *("models", "optimised", "optimized", "patients", "task", "versions"),
    )
)


def slip_of(word: str, known: Iterable[str]) -> str | None:
    """The known word of which this one is a slip of the pen; None where it is a word by itself."""
    wrong = _plain(word)
    if wrong in WORDS_OF_THEIR_OWN:
        return None
    found = [(edits, name) for name in known if (edits := _slips(wrong, _plain(name))) is not None]
    return min(found)[1] if found else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _slips(wrong: str, right: str) -> int | None:
    """How many letters went wrong; None where they are more than a slip of a word so long."""
    size = len(right)
    allowed = 2 if size >= LONG_ENOUGH_FOR_TWO else 1
    if size < SHORTEST or abs(size - len(wrong)) > allowed:
        return None
    if wrong[:1] != right[:1] and size < LONG_ENOUGH_TO_BEGIN_WRONG:
        return None
    # An edit changes two letters of the set at most: spares the table for nearly every word.
    if len(set(wrong) ^ set(right)) > 2 * allowed:
        return None
    replaced = size == len(wrong) and sorted(wrong) != sorted(right)
    if replaced and size < LONG_ENOUGH_TO_REPLACE:
        return None
    edits = edit_distance(wrong, right)
    return edits if edits <= allowed else None


def edit_distance(one: str, other: str) -> int:
    """Letters to put in, take out, replace or swap with their neighbour to make one the other."""
    before: list[int] = []
    above = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        line = [row]
        for column, target in enumerate(other, start=1):
            best = min(above[column] + 1, line[-1] + 1, above[column - 1] + (letter != target))
            swapped = row > 1 and column > 1 and letter == other[column - 2]
            if swapped and one[row - 2] == target:
                best = min(best, before[column - 2] + 1)
            line.append(best)
        before, above = above, line
    return above[-1]
