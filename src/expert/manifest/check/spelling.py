"""Whether a word is another one misspelt: near enough that nobody can have meant it otherwise."""

from __future__ import annotations

from collections.abc import Iterable

SHORTEST = 4
"""A known word shorter than this has too many neighbours that mean something else."""
LONG_ENOUGH_TO_REPLACE = 6
"""Below, one letter for another is another word: `date` is not `data`, `test` not `text`."""
LONG_ENOUGH_FOR_TWO = 6
LONG_ENOUGH_ELSEWHERE = 6
"""Of a key that belongs elsewhere: `speed` is not `seed`."""
LONG_ENOUGH_TO_BEGIN_WRONG = 9
"""Slips seldom hit the first letter; `ranking` is not `packing`."""
LONG_ENOUGH_TO_REPLACE_TWO = 9
"""`tracking` is not `training`."""
LEAST_STEM = 5
"""Two letters wrong behind so many right ones are another ending: `generator`, `generation`."""
ENDINGS = ("s", "es", "d", "ed", "r", "er", "ing")
"""What makes another word of one: `paths`, `tokenizer`."""

# Words one or two letters away from a key that say something else in a description.
WORDS_OF_THEIR_OWN = frozenset(
    (
        *("adapted", "beats", "compiled", "compiler", "complete", "completed", "datasets", "date"),
        *("devices", "methods", "models", "optimised", "optimized", "pacing", "packaging"),
        *("parking", "patch", "patients", "speed", "task", "tokenized", "tokenizer", "tracker"),
        *("tracking", "versions"),
    )
)


def slip_of(word: str, known: Iterable[str], *, elsewhere: bool = False) -> str | None:
    """The known word of which this one is a slip of the pen; None where it is a word by itself.

    Where the known words belong `elsewhere`, the writer had little reason to mean one of them: a
    single letter of a long word may be wrong.
    """
    wrong = _plain(word)
    if wrong in WORDS_OF_THEIR_OWN:
        return None
    found = []
    for name in known:
        right = _plain(name)
        edits = _slips(wrong, right)
        if edits is None or (elsewhere and not _is_plain_slip(wrong, right, edits)):
            continue
        found.append((edits, name))
    return min(found)[1] if found else None


def neighbour_of(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest by its letters alone: for a hint, where the name is refused anyway."""
    near = [other for other in known if _may_be_near(name, other)]
    found = [(edit_distance(name, other), other) for other in near]
    return min(((e, other) for e, other in found if e <= _allowed(other)), default=(0, None))[1]


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _is_plain_slip(wrong: str, right: str, edits: int) -> bool:
    return edits <= 1 and len(right) >= LONG_ENOUGH_ELSEWHERE and not _is_a_form(right, wrong)


def _slips(wrong: str, right: str) -> int | None:
    """How many letters went wrong; None where they are more than a slip of a word so long."""
    if not _may_be_near(wrong, right) or _digits(wrong) != _digits(right):
        return None
    parts, known_parts = wrong.split("_"), right.split("_")
    if len(parts) != len(known_parts):  # a line forgotten; any more is a word left out or put in
        return 1 if wrong.replace("_", "") == right.replace("_", "") else None
    # Nobody keeps one `max_bad_row`, but `task` is as good a word as `tasks`.
    if _is_a_form(wrong, right) or (len(parts) == 1 and _is_a_form(right, wrong)):
        return None
    total = 0
    for part, known_part in zip(parts, known_parts, strict=True):
        edits = _slips_of_one(part, known_part)
        if edits is None:
            return None
        total += edits
    return total if total <= _allowed(right) else None


def _allowed(right: str) -> int:
    return 2 if len(right) >= LONG_ENOUGH_FOR_TWO else 1


def _may_be_near(wrong: str, right: str) -> bool:
    """Spares the table of edits for nearly every word: one changes two letters of the set."""
    size, allowed = len(right), _allowed(right)
    if size < SHORTEST or abs(size - len(wrong)) > allowed:
        return False
    return len(set(wrong) ^ set(right)) <= 2 * allowed


def _slips_of_one(wrong: str, right: str) -> int | None:
    """As _slips, of one word between underscores: `min_vram` and `max_vram` differ in a word."""
    if wrong == right:
        return 0
    size = len(right)
    if wrong[:1] != right[:1] and size < LONG_ENOUGH_TO_BEGIN_WRONG:
        return None
    replaced = size == len(wrong) and sorted(wrong) != sorted(right)
    if replaced and size < LONG_ENOUGH_TO_REPLACE:
        return None
    edits = edit_distance(wrong, right)
    if edits > 1:
        if size < LONG_ENOUGH_FOR_TWO or (replaced and size < LONG_ENOUGH_TO_REPLACE_TWO):
            return None
        stem = max(LEAST_STEM, size - 3)
        if wrong[:stem] == right[:stem]:
            return None
    return edits


def _is_a_form(word: str, stem: str) -> bool:
    """Whether a word is the stem with an ending: the plural of it, or who does it."""
    ending = word.removeprefix(stem)
    return word.startswith(stem) and ending in ENDINGS and not stem.endswith(ending)


def _digits(word: str) -> str:
    """Numbers are meant: `load_in_2bit` is not `load_in_4bit`."""
    return "".join(letter for letter in word if letter.isdigit())


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
