"""The table of faults: each rule looks at one run and says what it found, or nothing.

Thresholds are constants beside their rules, each with its reason. They were fixed before the runs
they were tried on, but for three that false alarms in small runs on a CPU taught:
THREAD_SWITCH_SECONDS, PAUSES_MATTER_SECONDS, and that a single evaluation or save is never too
many. A healthy run draws no warning and no error.
"""

from __future__ import annotations

from collections.abc import Callable

from expert.insight.findings import card as card_faults
from expert.insight.findings import course as course_faults
from expert.insight.findings import feeding as feeding_faults
from expert.insight.findings import kernels as kernel_faults
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, worst_first

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    *feeding_faults.RULES,
    *kernel_faults.RULES,
    *card_faults.RULES,
    *course_faults.RULES,
)


def find_faults(found: Evidence) -> list[Finding]:
    """Everything the rules find in a run, the worst first."""
    return worst_first([finding for rule in RULES if (finding := rule(found)) is not None])
