"""Decides whether a word is a misspelling of another: so close that nothing else can be meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHORTEST = 4
"""Shorter known words are too close to words that mean something else."""
MIN_LENGTH_REPLACED_LETTER = 6
"""A replaced letter makes a shorter word another one: `date` is not `data`, `test` not `text`."""
MIN_LENGTH_TWO_TYPOS = 6
MIN_LENGTH_OTHER_SECTION = 6
"""For a key of another section: `speed` is not `seed`."""
MIN_LENGTH_WRONG_FIRST_LETTER = 9
"""The first letter is rarely wrong: `ranking` is not `packing`."""
MIN_LENGTH_TWO_REPLACED = 9
"""`tracking` is not `training`."""
LEAST_STEM = 5
"""Two wrong letters after this many right ones are another ending: `generator`, `generation`."""
ENDINGS = ("s", "es", "d", "ed", "r", "er", "ing")
"""Endings that make another word: `paths`, `tokenizer`."""

# Words one or two letters away from a key, but common in metadata.
METADATA_WORDS = frozenset(
    (
        *("adapted", "beats", "compiled", "compiler", "complete", "completed", "datasets", "date"),
        *("devices", "methods", "models", "optimised", "optimized", "pacing", "packaging"),
        *("parking", "patch", "patients", "speed", "task", "tokenized", "tokenizer", "tracker"),
        *("tracking", "versions"),
    )
)


def correct_spelling(word: str, known: Iterable[str], *, elsewhere: bool = False) -> str | None:
    """The known word that `word` is a misspelling of; None if there is none.

    If the known words belong to another section (`elsewhere`), the user is less likely to mean
    them: only one letter of a long word may be wrong.
    """
    wrong = _plain(word)
    if wrong in METADATA_WORDS:
        return None
    matches = []
    for name in known:
        right = _plain(name)
        edits = _typo_count(wrong, right)
        if edits is None:
            continue
        is_short = len(right) < MIN_LENGTH_OTHER_SECTION
        if not elsewhere or not (edits > 1 or is_short or _is_a_form(right, wrong)):
            matches.append((edits, name))
    return min(matches)[1] if matches else None


def closest(word: str, choices: Iterable[str], likeness: float = 0.75) -> str | None:
    """The choice that is most like `word`, in any case of its letters: a hint for a word that is
    refused anyway; None if none is as similar."""
    lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lower, 1, likeness)
    return lower[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _typo_count(wrong: str, right: str) -> int | None:
    """Number of wrong letters; None if too many for a misspelling of a word of this length."""
    if not _may_match(wrong, right) or _digits(wrong) != _digits(right):
        return None
    parts, known_parts = wrong.split("_"), right.split("_")
    if len(parts) != len(known_parts):  # a missing _; else a missing or extra word
        return 1 if wrong.replace("_", "") == right.replace("_", "") else None
    # `max_bad_row` is a misspelling, but `task` is as good a word as `tasks`.
    if _is_a_form(wrong, right) or (len(parts) == 1 and _is_a_form(right, wrong)):
        return None
    total = 0
    for part, known_part in zip(parts, known_parts, strict=True):
        edits = _typos_in_word(part, known_part)
        if edits is None:
            return None
        total += edits
    return total if total <= _allowed(right) else None


def _allowed(right: str) -> int:
    return 2 if len(right) >= MIN_LENGTH_TWO_TYPOS else 1


def _may_match(wrong: str, right: str) -> bool:
    """A cheap test that rules out most words: one edit changes at most two letters of the set."""
    size, allowed = len(right), _allowed(right)
    if size < SHORTEST or abs(size - len(wrong)) > allowed:
        return False
    return len(set(wrong) ^ set(right)) <= 2 * allowed


def _typos_in_word(wrong: str, right: str) -> int | None:
    """_slips for one word between underscores: `min_vram` and `max_vram` differ in a word."""
    if wrong == right:
        return 0
    size = len(right)
    if wrong[:1] != right[:1] and size < MIN_LENGTH_WRONG_FIRST_LETTER:
        return None
    replaced = size == len(wrong) and sorted(wrong) != sorted(right)
    if replaced and size < MIN_LENGTH_REPLACED_LETTER:
        return None
    edits = edit_distance(wrong, right)
    if edits > 1:
        if size < MIN_LENGTH_TWO_TYPOS or (replaced and size < MIN_LENGTH_TWO_REPLACED):
            return None
        stem = max(LEAST_STEM, size - 3)
        if wrong[:stem] == right[:stem]:
            return None
    return edits


def _is_a_form(word: str, stem: str) -> bool:
    """Whether a word is the stem with one of ENDINGS."""
    ending = word.removeprefix(stem)
    return word.startswith(stem) and ending in ENDINGS and not stem.endswith(ending)


def _digits(word: str) -> str:
    """Digits must match: `load_in_2bit` is not `load_in_4bit`."""
    return "".join(letter for letter in word if letter.isdigit())


def edit_distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with the next (Damerau-Levenshtein)."""
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
