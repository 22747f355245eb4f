"""Careful reading of model answers, which may be text of any length and kind."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence

MAX_CHARACTERS = 100_000
"""Longer answers are not parsed."""
MAX_DEPTH = 200
"""Nested brackets: far more than people write, far less than breaks a parser."""

MAX_SHARE_UNUSABLE = 0.05
"""Share of the answers that may be empty, or repeat themselves."""
REPEATED = 4.0
"""How far zlib compresses a text that repeats itself; prose of 4,000 characters reaches 2.5."""

_FENCE = re.compile(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def unfenced(answer: str) -> str:
    """The content of a Markdown fence around the whole answer, else the answer itself."""
    found = _FENCE.fullmatch(answer)
    return found[1] if found and "```" not in found[1] else answer


def short(text: str, most: int = 60) -> str:
    """The start of a text, for use in a reason."""
    return text if len(text) <= most else text[: most - 1] + "…"


def normalised(text: str) -> str:
    """The text with every run of whitespace as one space."""
    return " ".join(text.split())


def unusable_answers(texts: Sequence[tuple[str, str, str]]) -> str:
    """Why answers of open text are unusable whatever their loss, or ""; each comes with its prompt
    and the expected answer."""
    if not texts:
        return ""
    prompts, expected, answers = zip(*(map(normalised, each) for each in texts), strict=True)
    most, same = MAX_SHARE_UNUSABLE * len(texts), Counter(answers).most_common(1)[0][1]
    alike = max(Counter(one).most_common(1)[0][1] for one in (prompts, expected))
    faults = []
    if (empty := answers.count("")) > most:
        faults.append(f"{empty} of {len(texts)} answers are empty")
    looped = sum(
        _compression(one) > max(REPEATED, 2 * _compression(other))
        for one, other in zip(answers, expected, strict=True)
    )
    if looped > most:
        faults.append(f"{looped} of {len(texts)} answers repeat themselves")
    if same - empty > 0 and same > max(len(texts) / 2, 2 * alike):
        faults.append(f"{same} of {len(texts)} answers are identical")
    return "; ".join(faults)


def _compression(text: str) -> float:
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data))


class DoesNotParse(Exception):
    """Text that is not valid in its language, and why."""


def check_parseable(text: str, what: str = "the answer") -> None:
    """Raise DoesNotParse for a text that must not reach a parser."""
    if not text.strip():
        raise DoesNotParse(f"{what} is empty")
    if len(text) > MAX_CHARACTERS:
        raise DoesNotParse(f"{what} has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
    if "\x00" in text:
        raise DoesNotParse(f"{what} has a null character")
    if depth(text) > MAX_DEPTH:
        raise DoesNotParse(f"{what} nests brackets more than {MAX_DEPTH} deep")


def depth(text: str) -> int:
    """Bracket depth, counting brackets in strings too: never less than a parser will see."""
    now = deepest = 0
    for character in text:
        if character in _OPENING:
            now += 1
            deepest = max(deepest, now)
        elif character in _CLOSING:
            now = max(0, now - 1)
    return deepest
