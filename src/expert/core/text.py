"""Numbers as people say them, and text of others made safe to show."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any


def gib(count: float) -> str:
    """Bytes as GiB, or MiB and KiB below."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def duration(seconds: float) -> str:
    """`4 ms`, `0.4 s`, `45 s`, `12 min`, `3 h 20 min`; `0.0 s` for nothing at all."""
    if 0 < seconds < 0.05:  # "0.0 s" would say that it takes no time
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 else "below 1 ms"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def duration_range(low: float, high: float) -> str:
    """`12 to 20 min`, `40 s to 2 min`, `about 5 min` where both are the same in words."""
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


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def loss(value: float) -> str:
    """`1.7100`, `0.1438`; below a tenth three digits, where four decimals say less: `2.10e-05`."""
    return f"{value:.4f}" if not abs(value) < 0.1 else f"{value:#.3g}"


# What None means for keys where it is a choice rather than a gap.
_NOTHING = {"watch.keep_checkpoints": "all", "length.max_steps": "no limit"}


def value_in_words(path: str, value: Any) -> str:
    """A settled value of the plan, by what its path says it is."""
    if value is None:
        return _NOTHING.get(path, "–")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if path.endswith("expected_seconds"):
        return duration_range(*value)
    if path.endswith("_bytes"):
        return gib(value)
    if ".seconds" in path or path.endswith("communication_seconds"):
        return duration(value)
    if path.endswith("tokens_per_second") and not isinstance(value, float):
        return "{:,.0f} to {:,.0f}".format(*value)
    if path.endswith(".efficiency"):
        low, high = map(percent, value)
        return low if low == high else f"{low.removesuffix(' %')} to {high}"
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
    """A value inside another: what it is made of stands in brackets."""
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_inside(entry)}' for key, entry in value.items())})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_inside, value))})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def span(seconds: float) -> str:
    """`3.2 ms`, `280 ms`, `4.1 s`, `95 s`, `12 min`: a part of a step or of a run."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def percent(share: float) -> str:
    """`82 %`; below one percent with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.0095 or share <= 0 else f"{100 * share:.1g} %"


def times(factor: float) -> str:
    """`3.5x`; below 1.5 with a digit more."""
    return f"{factor:.1f}x" if factor >= 1.5 else f"{factor:.2f}x"


# --- text of others ------------------------------------------------------------------------------

_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control, format (marks of direction, zero width), half a pair, private, line and paragraph."""
_JOINERS = "\u200c\u200d"
"""They shape letters and emoji, and reverse nothing."""
_SPECIAL = re.compile(r"([\\`*\[\]#~|$]|(?<![^\W_])_|_(?![^\W_]))")  # max_steps stays readable
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_ADDRESS = re.compile(
    r"(?i)(https?(?=:)|ftp(?=:)|javascript(?=:)|data(?=:)|mailto(?=:)|www(?=\.))(.)(?=\S)"
)


def visible(text: str, *, keep: str = "\n") -> str:
    """The text with every character that is not seen written out; those in `keep` stay.

    Control characters become their pictures (escape is ␛), others their number (<U+202E>).
    """
    if text.isascii() and text.isprintable():
        return text
    unseen = {c for c in set(text) if _is_unseen(c) and c not in keep}
    return text.translate({ord(c): _written(ord(c)) for c in unseen})


def in_markdown(text: str) -> str:
    """Text on one line that cannot become a heading, a table, a link or HTML."""
    plain = " ".join(visible(text, keep="\n\t").split())
    escaped = _SPECIAL.sub(r"\\\1", "".join(_ENTITIES.get(sign, sign) for sign in plain))
    # Viewers turn bare addresses into links; a broken one stays text.
    escaped = _ADDRESS.sub(lambda found: f"{found[1]}&#{ord(found[2])};", escaped)
    return re.sub(r"^([-+]|\d+[.)])(?=\s|$)", lambda found: f"\\{found[0]}", escaped)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for people too: what is not seen is an escape (\\u202e) of the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
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
