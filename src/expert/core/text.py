"""Formats numbers for people, and makes untrusted text safe to show."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def gib(count: float) -> str:
    """Bytes as GiB, MiB or KiB."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """`4 ms`, `0.4 s`, `45 s`, `12 min`, `3 h 20 min`; `0.0 s` for zero."""
    if 0 < seconds < 0.05:  # would print as "0.0 s"
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "below 1 ms"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def duration_range(low: float, high: float) -> str:
    """`12 to 20 min`, `40 s to 2 min`, `about 5 min` if both ends print the same."""
    if high < 1:
        return "below 1 s"
    first, last = (_whole(seconds) for seconds in (max(low, 1.0), high))
    if first == last:
        return f"about {last}"
    number, _, unit = first.partition(" ")
    is_plain = unit in ("s", "min") and last.endswith(f" {unit}") and " h " not in last
    return f"{number if is_plain else first} to {last}"


def _whole(seconds: float) -> str:
    """Whole seconds, minutes, or hours and minutes."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def count(number: int) -> str:
    """`596 M`, `8.03 B`, `1,998`."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    return f"{number / 10**6:.1f} M" if number >= 10**6 else f"{number:,}"


def shell_quoted(path: Path | str) -> str:
    """A path as one word of a command to copy."""
    return shlex.quote(str(path))


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def epochs_in_words(epochs: float, reached: float | None = None) -> str:
    """`3 epochs`; `0.16 of 1 epoch (max_steps)` if max_steps ends a run earlier."""
    words = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
    if reached is None:
        return words
    digits = f"{reached:.2g}" if reached < 10 else f"{reached:.0f}"
    return f"{digits} of {words} (max_steps)"


def some_of(names: Sequence[str], most: int = 10) -> str:
    """`a, b, c`; of more than `most`, `a, b … and 1,200 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" … and {rest:,} more" if rest > 0 else "")


def loss(value: float) -> str:
    """`1.7100`, `0.1438`; three significant digits below 0.1, such as `2.10e-05`."""
    return f"{value:.4f}" if not abs(value) < 0.1 else f"{value:#.3g}"


# What None means for keys where it is a choice rather than a missing value.
_NOTHING = {"watch.keep_checkpoints": "all", "length.max_steps": "no limit"}


def value_in_words(path: str, value: Any) -> str:
    """A value of the plan, formatted by its path."""
    if value is None:
        return _NOTHING.get(path, "–")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if path.endswith("expected_seconds"):
        return duration_range(*value)
    if path.endswith("_bytes"):
        return gib(value)
    if ".seconds" in path:
        return duration(value)
    if path.endswith("parameters") or path.endswith("tokens_per_epoch"):
        return count(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], dict):
            return ", ".join(f"{entry['name']} ({entry['tokens']} tokens)" for entry in value)
        return ", ".join(str(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inside(entry)}" for key, entry in value.items()) or "none"
    return str(value)


def _inside(value: Any) -> str:
    """A nested value; containers are put in brackets."""
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_inside(entry)}' for key, entry in value.items())})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_inside, value))})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def span(seconds: float) -> str:
    """`3.2 ms`, `280 ms`, `4.1 s`, `95 s`, `12 min`, for parts of a step or run."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def percent(share: float) -> str:
    """`82 %`; one more digit below 1 %."""
    return f"{100 * share:.0f} %" if share >= 0.0095 or share <= 0 else f"{100 * share:.1g} %"


def times(factor: float) -> str:
    """`3.5x`; one more digit below 1.5."""
    return f"{factor:.1f}x" if factor >= 1.5 else f"{factor:.2f}x"


# --- untrusted text ------------------------------------------------------------------------------

_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control, format (direction marks, zero width), surrogate, private use, line, paragraph."""
_JOINERS = "\u200c\u200d"
"""Zero-width joiners shape letters and emoji, and cannot reverse text."""
_SPECIAL = re.compile(r"([\\`*\[\]#~|$]|(?<![^\W_])_|_(?![^\W_]))")  # max_steps stays readable
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ADDRESS = re.compile(
    r"(?i)(https?(?=:)|ftp(?=:)|javascript(?=:)|data(?=:)|mailto(?=:)|www(?=\.))(.)(?=\S)"
)


def visible(text: str, *, keep: str = "\n") -> str:
    """The text with invisible characters written out, except those in `keep`.

    Control characters become their pictures (escape is ␛), the rest their code (<U+202E>).
    """
    if text.isascii() and text.isprintable():
        return text
    unseen = {c for c in set(text) if _is_unseen(c) and c not in keep}
    return text.translate({ord(c): _written(ord(c)) for c in unseen})


def in_markdown(text: str) -> str:
    """The text on one line, escaped so that it cannot form a heading, table, link or HTML."""
    plain = " ".join(visible(text, keep="\n\t").split())
    escaped = _SPECIAL.sub(r"\\\1", "".join(_ENTITIES.get(sign, sign) for sign in plain))
    # Viewers turn bare addresses into links; an escaped colon or dot prevents that.
    escaped = _ADDRESS.sub(lambda found: f"{found[1]}&#{ord(found[2])};", escaped)
    return re.sub(r"^([-+]|\d+[.)])(?=\s|$)", lambda found: f"\\{found[0]}", escaped)


def json_text(value: Any) -> str:
    """Indented JSON with invisible characters escaped (\\u202e), so that people can read it too."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if text.isascii():
        return text.replace("\x7f", "\\u007f")
    unseen = {c for c in set(text) if c != "\n" and _is_unseen(c)}
    return text.translate({ord(c): json.dumps(c)[1:-1] for c in unseen})


def _is_unseen(character: str) -> bool:
    return unicodedata.category(character) in _UNSEEN and character not in _JOINERS


def _written(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
