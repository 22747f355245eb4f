"""What slows several GPUs down: one slow rank, or the link between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from expert.core.text import percent, span
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import RuleResult
from expert.insight.step.anatomy import COMMUNICATION, number

SLOWER = 1.15
"""A rank that computes this much longer than the median one on most log lines: shares of a step
differ by their rows, but not always for the same rank. Chosen, not measured."""
OFTEN = 0.6
"""Share of the lines; if the slowest rank keeps changing, the rows are uneven, not the machine."""
SLOW_COMMUNICATION_SHARE = 0.2
"""Share of a step. 168 MB of adapter gradients take 13 ms over PCIe 4, of a step of a second."""


def slow_rank(found: Evidence) -> RuleResult | None:
    slow: dict[int, list[float]] = {}
    for rank, slowest, middle in _rank_seconds(found):
        if rank is not None and middle:
            slow.setdefault(int(rank), []).append(slowest / middle)
    lines = sum(map(len, slow.values()))
    if lines < 2:
        return None
    rank, ratios = max(slow.items(), key=lambda item: len(item[1]))
    ratio = sorted(ratios)[len(ratios) // 2]
    if ratio < SLOWER:
        return None
    if len(ratios) < OFTEN * lines:
        return RuleResult(
            f"the slowest rank changes from step to step, {percent(ratio - 1)} behind the median",
            name="uneven-ranks",
            title="ranks have uneven shares of a step",
            fix="packing: true, or a larger batch_size",
        )
    return RuleResult(
        f"rank {rank} takes {percent(ratio - 1)} longer than the median rank, in {len(ratios)} of "
        f"{lines} lines",
        gain=ratio,
    )


def slow_link(found: Evidence) -> RuleResult | None:
    step = found.step
    if step is None or not step.timed or step.wall <= 0:
        return None
    communication = step.of(COMMUNICATION) - _wait_for_slowest_rank(found)
    share = communication / step.wall
    if share < SLOW_COMMUNICATION_SHARE:
        return None
    return RuleResult(
        f"{percent(share)} of a step ({span(communication)}) goes to summing gradients",
        gain=1 / (1 - share),
    )


def _wait_for_slowest_rank(found: Evidence) -> float:
    """About how many seconds of a step the fastest rank waits for the slowest, taking the median
    rank as halfway. Nothing is sent meanwhile."""
    waits = [2 * (slowest - middle) for _, slowest, middle in _rank_seconds(found)]
    return statistics.median(waits) if waits else 0.0


def _rank_seconds(found: Evidence) -> Iterator[tuple[float | None, float, float]]:
    """For each steady line: the slowest rank, its seconds, and the median rank's seconds."""
    keys = ("slowest_rank", "slowest_rank_seconds", "median_rank_seconds")
    for line in found.anatomy.steady:
        rank, slowest, middle = (number(line.event, key) for key in keys)
        if slowest is not None and middle is not None:
            yield rank, slowest, middle
