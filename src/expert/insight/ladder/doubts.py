"""Whether a ladder says something about the card, or about what else ran on the machine."""

from __future__ import annotations

import statistics

from expert.insight.findings.evidence import CROWDED_CORES
from expert.insight.ladder.ladder import Ladder, Measured

TOO_WIDE = 0.25
"""Distance of the quartiles as a share of the rate: beyond it the median is anybody's guess. A host
with noisy neighbours had 5 to 15 %, two cores with three processes on them 20 to 60 %."""
HOST_CORES = 2
"""What a run on a card needs of the host: one core launches, one makes batches."""


def crowded(seen: Measured) -> str:
    """How neighbours were in the way of a rung; empty where they were not, or where nobody knows.

    The rule is that of runs: threads and neighbours together had more to do than there are cores.
    """
    if seen.others is None or not seen.cores:
        return ""
    if seen.lowered:
        return (
            f"other processes use so much of the {seen.cores} cores that {seen.threads} "
            f"thread{'s' if seen.threads != 1 else ''} had to do"
        )
    needed = min(seen.threads or HOST_CORES, seen.cores)
    if needed + seen.others <= seen.cores + CROWDED_CORES:
        return ""
    return f"other processes used {seen.others:.1f} of {seen.cores} cores meanwhile"


def doubts_of(ladder: Ladder) -> list[str]:
    """Why what won must not settle later plans; none where it may."""
    seen = [rung.measured for rung in ladder.rungs if rung.measured is not None]
    won = ladder.winner
    found = []
    busy = [crowded(one) for one in seen]
    if sum(map(bool, busy)) * 2 >= max(1, len(busy)) and any(busy):
        found.append(_most_crowded(seen))
    if won is not None and won.measured is not None:
        width = won.measured.spread / won.measured.tokens_per_second
        if width > TOO_WIDE:
            found.append(f"windows of '{won.name}' are {width:.0%} apart")
    direct = ladder.against_baseline
    if direct is not None and direct.difference == "none":
        found.append(f"what won cannot be told from the baseline: {direct.words}")
    return found


def _most_crowded(seen: list[Measured]) -> str:
    """The words for all rungs: with the usual share of the neighbours."""
    used = [one.others for one in seen if one.others is not None and crowded(one)]
    usual = statistics.median(used)
    nearest = min(
        (one for one in seen if one.others is not None and crowded(one)),
        key=lambda one: abs((one.others or 0.0) - usual),
    )
    return crowded(nearest)
