"""Accuracy, its confidence interval, and whether two models differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Right and wrong answers; those without an oracle are neither."""

    passed: int = 0
    failed: int = 0
    without_oracle: int = 0
    rows: int | None = None
    """Distinct rows behind the judged answers; None: one row each."""

    @property
    def judged(self) -> int:
        return self.passed + self.failed

    @property
    def cases(self) -> int:
        return self.judged + self.without_oracle

    @property
    def accuracy(self) -> float | None:
        """Of the judged answers; None if none was judged."""
        return self.passed / self.judged if self.judged else None

    @property
    def sample(self) -> int:
        """The sample size: rows, as answers of one row are correlated, at worst fully."""
        return self.judged if self.rows is None else self.rows

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the accuracy."""
        if self.accuracy is None:
            return None
        return wilson(self.accuracy * self.sample, self.sample)

    @property
    def share_without_oracle(self) -> float:
        return self.without_oracle / self.cases if self.cases else 0.0


def score_of(verdicts: Sequence[bool | None], rows: Sequence[str] | None = None) -> Score:
    """The score of many verdicts; `rows`: the row of each."""
    judged = None
    if rows is not None:
        pairs = zip(verdicts, rows, strict=True)
        judged = len({row for verdict, row in pairs if verdict is not None})
    return Score(
        rows=judged,
        passed=sum(verdict is True for verdict in verdicts),
        failed=sum(verdict is False for verdict in verdicts),
        without_oracle=sum(verdict is None for verdict in verdicts),
    )


def wilson(passed: float, judged: int) -> tuple[float, float]:
    """Wilson's interval for the true share; it stays within 0 and 1."""
    share, z = passed / judged, Z_95
    centre = (share + z * z / (2 * judged)) / (1 + z * z / judged)
    spread = share * (1 - share) / judged + z * z / (4 * judged * judged)
    half = z * math.sqrt(spread) / (1 + z * z / judged)
    low = 0.0 if passed == 0 else max(0.0, centre - half)
    high = 1.0 if passed == judged else min(1.0, centre + half)
    return low, high


def rows_needed(share: float) -> int:
    """Rows whose interval lies above `share` if every answer is right. No number of rows shows
    100 %, so from 99 % on it is that of 99 %."""
    share = min(share, 0.99)
    return math.floor(Z_95 * Z_95 * share / (1 - share)) + 1 if share > 0 else 0


def loss_reduction(
    now: Sequence[float], base: Sequence[float]
) -> tuple[float, tuple[float, float]] | None:
    """By which share of the base's loss the loss is lower, from the losses of the same rows, and
    its 95 % interval; None if that cannot be computed."""
    total, count = sum(base), len(base)
    if count < 2 or len(now) != count or not 0 < total < math.inf:
        return None
    share = 1 - sum(now) / total
    rest = sum((b - n - share * b) ** 2 for n, b in zip(now, base, strict=True))
    half = Z_95 * math.sqrt(rest * count / (count - 1)) / total
    return share, (share - half, share + half)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models on the cases that both could be judged on."""

    cases: int
    rows: int
    """Rows behind these cases."""
    wins: tuple[str, ...]
    """Right now and wrong before, by id."""
    losses: tuple[str, ...]
    """Wrong now and right before."""
    difference: float | None
    """Accuracy now minus accuracy before; None without a common case."""
    p_value: float | None
    """McNemar's exact test: the probability of wins and losses this unequal by chance. A row with
    more answers won than lost is one win."""


def compare(
    now: Mapping[str, bool | None],
    before: Mapping[str, bool | None],
    rows: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two sets of verdicts by case id; `rows`: the row of each case."""
    both = [case for case in now if now[case] is not None and before.get(case) is not None]
    wins = tuple(case for case in both if now[case] and not before[case])
    losses = tuple(case for case in both if before[case] and not now[case])
    net: dict[str, int] = {}
    for case in both:
        row = (rows or {}).get(case, case)
        net[row] = net.get(row, 0) + bool(now[case]) - bool(before[case])
    up, down = (sum(sign * each > 0 for each in net.values()) for sign in (1, -1))
    return Comparison(
        cases=len(both),
        rows=len(net),
        wins=wins,
        losses=losses,
        difference=(len(wins) - len(losses)) / len(both) if both else None,
        p_value=mcnemar(up, down) if both else None,
    )


def mcnemar(wins: int, losses: int) -> float:
    """The exact two-sided p-value: a fair coin tossed once for each case that changed."""
    count = wins + losses
    tail = sum(math.comb(count, fewer) for fewer in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**count))
