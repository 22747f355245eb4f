"""Values of an event in words; what is missing has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from expert.cli.words import count, duration, gib

Event = Mapping[str, Any]


def number(event: Event, key: str) -> float | None:
    """The field as a number; None where it is missing. The event file holds "nan" as text."""
    value = event.get(key)
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def whole(event: Event, key: str) -> int | None:
    """The field as a whole number; None where it is not one."""
    value = event.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def worded(value: float | None, form: str, say: Callable[[float], Any] = lambda v: v) -> str:
    """The value in its form; nothing where there is none."""
    return "" if value is None else form.format(say(value))


def time_in_words(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else "?"


def bytes_in_words(value: float) -> str:
    return gib(value) if math.isfinite(value) else "?"


def three_digits(value: float) -> str:
    """`0.0123`, `2.31`, `12.3`, `1,234`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def percent(share: float) -> float:
    return 100 * share


def counted(value: float) -> str:
    return count(int(value)) if math.isfinite(value) else "?"


def loss_in_words(value: float) -> str:
    """Two decimals, and three digits below one: `12.34`, `1.71`, `0.0312`."""
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def joined(*words: str) -> str:
    return " ".join(filter(None, words))


def listed(value: Any) -> str:
    """Things by name, or how many of them where the list is long."""
    if not isinstance(value, list | tuple):
        return str(value)
    if len(value) > 8:
        return f"{len(value)} ({', '.join(map(str, value[:3]))}, …)"
    return ", ".join(map(str, value))
