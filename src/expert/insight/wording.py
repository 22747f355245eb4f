"""Numbers in the sentences of a diagnosis."""

from __future__ import annotations


def span(seconds: float) -> str:
    """`3.2 ms`, `280 ms`, `4.1 s`, `95 s`, `12 min`."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def percent(share: float) -> str:
    """`82 %`; below one percent with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.0095 or share <= 0 else f"{100 * share:.1g} %"


def times(factor: float) -> str:
    """`3.5x`; below 1.5 with a digit more."""
    return f"{factor:.1f}x" if factor >= 1.5 else f"{factor:.2f}x"
