"""Axes and series: positions, labels, thinning and smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from expert.core.text import duration
from expert.insight.page.blocks import Point, Unit

LEVELS = (1, 2, 2.5, 5, 10)
CLOCK_STEPS = [10, 15, 30, 60, 120, 300, 600, 900, 1800]
CLOCK_STEPS += [3600 * hours for hours in (1, 2, 4, 12, 24, 48, 168)]
LOG_FROM = 30.0
"""Values that span more than this factor are drawn on a logarithmic axis."""
SIZE = 1000
"""A drawing is 1000 × 1000; the page stretches it to its space."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values from `low` to `high` onto 0 to 1, optionally on a log scale."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        if self.log:
            span = math.log(self.high) - math.log(self.low)
            return (math.log(max(value, self.low)) - math.log(self.low)) / span
        return (value - self.low) / (self.high - self.low)


def scale_of(
    values: Sequence[float],
    *,
    from_zero: bool = False,
    log: bool = False,
    whole: bool = False,
    binary: bool = False,
    clock: bool = False,
    tight: bool = False,
    share: bool = False,
    wanted: int = 4,
) -> Scale:
    """A scale that holds all values. `tight` ends at the values, else at round numbers: powers of
    two for bytes, half minutes and quarter hours for a clock. Shares end at 100 %."""
    if log and min(values) > 0:
        return _log_scale(min(values), max(values))
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if low == high:
        around = 0.5 if whole else abs(low) / 10 or 1.0
        low, high = (low, high + 2 * around) if from_zero else (low - around, high + around)
    if share and max(values) <= 1:
        high = min(high, 1.0)
    step = _step((high - low) / wanted, binary=binary, clock=clock)
    if whole:
        step = 5.0 if step == 2.5 else max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    if tight:
        return Scale(low=low, high=high, ticks=tuple(t for t in ticks if low <= t <= high))
    return Scale(low=ticks[0], high=ticks[-1], ticks=tuple(ticks))


def _step(rough: float, *, binary: bool, clock: bool) -> float:
    """The round number at or above `rough`."""
    if binary:
        return float(2.0 ** math.ceil(math.log2(rough)))
    if clock and rough > 5:
        found = next((step for step in CLOCK_STEPS if step >= rough), None)
        if found is not None:
            return float(found)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(level * power for level in LEVELS if level * power >= rough * 0.999)


def _log_scale(low: float, high: float) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 5))
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Scale(low=10.0**first, high=10.0**last, log=True, ticks=ticks)


def labels(ticks: Sequence[float], unit: Unit) -> list[str]:
    """The labels of the ticks, all with as many digits as their distance needs."""
    if unit == "seconds":
        return [clock_words(tick) for tick in ticks]
    if unit in ("count", "si"):
        return [si(tick) for tick in ticks]
    size, sign = _sizes(unit, max(map(abs, ticks), default=0.0))
    if unit == "number" and ticks and 0 < max(map(abs, ticks)) < 0.001:  # learning rates
        return [f"{tick:.2g}".replace("e-0", "e-") for tick in ticks]
    steps = [abs(b - a) / size for a, b in pairwise(ticks) if b != a]
    smallest = min(steps, default=abs(ticks[0]) / size if ticks else 0.0)
    if smallest and smallest < 1e-4:
        return [f"{tick / size:.2g}{sign}" for tick in ticks]
    digits = 0 if not smallest else max(0, -math.floor(math.log10(smallest) + 1e-9))
    if smallest and round(smallest, digits) != round(smallest, digits + 1):
        digits += 1  # 0.25 needs one digit more than 0.2
    if steps and max(steps) > 1.5 * smallest:  # a logarithmic axis
        return [f"{tick / size:g}{sign}" for tick in ticks]
    return [f"{tick / size:,.{digits}f}{sign}" for tick in ticks]


def _sizes(unit: Unit, largest: float) -> tuple[float, str]:
    if unit == "percent":
        return 0.01, " %"
    if unit == "bytes":
        return (2.0**30, " GiB") if largest >= 2**30 else (2.0**20, " MiB")
    if unit == "ms":
        return 0.001, " ms"
    return 1.0, " W" if unit == "watts" else ""


def clock_words(seconds: float) -> str:
    """`0`, `40 s`, `2:30 min`, `1:15 h`: short enough for an axis."""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds else "0"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def si(value: float) -> str:
    """`850`, `12k`, `1.5M`."""
    for size, sign in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if sign == "k" else size
            return f"{value / size:.4g}{sign}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def format_value(value: float, unit: Unit) -> str:
    """One value in words, for tooltips."""
    if unit == "seconds":
        return duration(value)
    if unit in ("count", "si"):
        return f"{value:,.0f}"
    size, sign = _sizes(unit, abs(value))
    shown = value / size
    if unit == "number":
        return f"{shown:.4g}"
    return f"{shown:,.1f}{sign}" if abs(shown) < 100 else f"{shown:,.0f}{sign}"


BUCKETS = 400
"""Buckets of a drawn line; each keeps its lowest and highest point, so that every spike shows."""
SMOOTH_SHARE = 1 / 25
"""Share of the run that the smoothed loss averages over."""


def thinned(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """At most about 2 × `buckets` points: the first and last, and each bucket's extremes."""
    if len(points) <= 2 * buckets:
        return list(points)
    kept: list[Point] = [points[0]]
    inner = points[1:-1]
    for number in range(buckets):
        start = number * len(inner) // buckets
        part = inner[start : (number + 1) * len(inner) // buckets]
        known = [point for point in part if point[1] is not None]
        if not known:
            kept.extend(part[:1])  # a gap stays a gap
            continue
        low = min(known, key=lambda point: point[1] or 0.0)
        high = max(known, key=lambda point: point[1] or 0.0)
        kept.extend(sorted({low, high}, key=lambda point: point[0]))
    kept.append(points[-1])
    return kept


def spans_magnitudes(points: Sequence[Point]) -> bool:
    """Whether a linear axis would flatten most of the values."""
    values = [value for _, value in points if value is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


def smoothed(points: Sequence[Point], weights: Sequence[float]) -> list[Point]:
    """The weighted mean around every point. The window is centred, so that the curve has no lag,
    and cut at the ends."""
    half = max(1, round(len(points) * SMOOTH_SHARE / 2))
    total, weight = [0.0], [0.0]
    for (_, value), size in zip(points, weights, strict=True):
        counts = size if value is not None and math.isfinite(value) else 0.0
        total.append(total[-1] + (value or 0.0) * counts)
        weight.append(weight[-1] + counts)
    result: list[Point] = []
    for place, (x, _) in enumerate(points):
        first, last = max(0, place - half), min(len(points), place + half + 1)
        share = weight[last] - weight[first]
        result.append((x, (total[last] - total[first]) / share if share > 0 else None))
    return result
