"""Long series made short without losing what stands out, and noisy ones made readable."""

from __future__ import annotations

import math
from collections.abc import Sequence

from expert.insight.page.blocks import Point

BUCKETS = 400
"""Of a drawn line; each keeps its lowest and its highest point, so a spike of one step is seen."""
SMOOTH_SHARE = 1 / 25
"""Of the run that the smoothed loss averages over."""


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
            kept.extend(part[:1])  # a hole stays a hole
            continue
        low = min(known, key=lambda point: point[1] or 0.0)
        high = max(known, key=lambda point: point[1] or 0.0)
        kept.extend(sorted({low, high}, key=lambda point: point[0]))
    kept.append(points[-1])
    return kept


def smoothed(points: Sequence[Point], weights: Sequence[float]) -> list[Point]:
    """The mean around every point, weighed by what each stands for (the tokens it was taken over).

    The window is centred, so nothing is drawn later than it happened; it is cut at the ends.
    """
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


def running_total(amounts: Sequence[float]) -> list[float]:
    """The sum up to and with every place."""
    sums, total = [], 0.0
    for amount in amounts:
        total += amount
        sums.append(total)
    return sums
