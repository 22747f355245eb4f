"""Decides whether a word is a misspelling of another: so close that nothing else can be meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LIKENESS = 0.83
_LIKENESS_ELSEWHERE = 0.9
_ENDINGS = ("s", "es", "d", "ed", "r", "er", "ing")
"""Endings that make another word: `paths`, `tokenizer`."""

# Words one or two letters away from a key, but common in metadata.
METADATA_WORDS = frozenset(
    (
        *("adapted", "beats", "compiled", "compiler", "complete", "completed", "datasets", "date"),
        *("devices", "methods", "models", "optimised", "optimized", "pacing", "packaging"),
        *("parking", "patch", "patients", "speed", "task", "tokenized", "tokenizer", "tracker"),
        *("tracking", "versions", "ranking", "service", "test", "text", "local_rank", "generator"),
        *("validator", "lora", "train_size", "test_size"),
    )
)


def correct_spelling(word: str, known: Iterable[str], *, elsewhere: bool = False) -> str | None:
    """The known word that `word` is a misspelling of; None if there is none.

    If the known words belong to another section (`elsewhere`), the user is less likely to mean
    them: they must be more alike.
    """
    wrong = _plain(word)
    if wrong in METADATA_WORDS:
        return None
    least = _LIKENESS_ELSEWHERE if elsewhere else _LIKENESS
    names = {_plain(name): name for name in known if _may_be_meant(wrong, _plain(name), elsewhere)}
    near = difflib.get_close_matches(wrong, names, 1, least)
    return names[near[0]] if near else None


def closest(word: str, choices: Iterable[str], likeness: float = 0.75) -> str | None:
    """The choice that is most like `word`, in any case of its letters: a hint for a word that is
    refused anyway; None if none is as similar."""
    lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), lower, 1, likeness)
    return lower[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")


def _may_be_meant(wrong: str, right: str, elsewhere: bool) -> bool:
    """Short words, other digits, and other forms of a word mean something else: `load_in_2bit`,
    `paths`. But `max_bad_row` is a misspelling."""
    digits = ["".join(filter(str.isdigit, text)) for text in (wrong, right)]
    if len(right) < 4 or len(wrong) < 3 or digits[0] != digits[1]:
        return False
    forms = [(wrong, right)]
    if elsewhere or "_" not in wrong:
        forms.append((right, wrong))
    return not any(
        longer.startswith(stem) and longer.removeprefix(stem) in _ENDINGS
        for longer, stem in forms
        if longer.removeprefix(stem) != stem[-1:]  # epochss is no form of epochs
    )
