"""The table of findings: every rule looks at one run, before it or after it.

Before a run the evidence is the plan and the machine, after it the plan and the events; a rule that
needs events finds nothing before. What counts is what will really happen: a key that the plan
overrules is at most a note. Thresholds are constants beside their rules, each with its reason. They
were fixed before the runs they were tried on, but for three that false alarms in small runs on a
CPU taught: THREAD_SWITCH_SECONDS, PAUSES_MATTER_SECONDS, and that a single evaluation or save is
never too many. A healthy run draws no warning and no error.
"""

from __future__ import annotations

from expert.insight.findings import course, feeding, kernels, memory
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, Rule, worst_first

RULES: tuple[Rule, ...] = (*feeding.RULES, *kernels.RULES, *memory.RULES, *course.RULES)
BY_NAME = {rule.name: rule for rule in RULES}


def find(found: Evidence) -> list[Finding]:
    """Everything the rules find, the worst first."""
    return worst_first([finding for rule in RULES if (finding := rule.find(found)) is not None])
