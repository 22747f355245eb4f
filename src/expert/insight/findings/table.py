"""The table of findings, and the rules that examine one run, before or after it.

Before a run the evidence is the plan and the machine, after it the plan and the events; a rule that
needs events finds nothing before. The effective plan counts: a key that the plan overrules is at
most a note. Thresholds are constants next to their rules, each with its reason. They were fixed
before the runs they were tried on, except for three changed after false alarms in small CPU runs:
THREAD_SWITCH_SECONDS, MIN_PAUSE_SECONDS, and that a single evaluation or save is never too
many. A healthy run gets no warning and no error.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from expert.core.files import read_text
from expert.insight.findings import course, feeding, kernels, memory
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, Rule, RuleResult, worst_first

_FILES = (feeding, kernels, memory, course)


def _rule(name: str, row: dict[str, Any]) -> Rule:
    """A row, and the function of its name that looks for it, if there is one."""
    function = name.replace("-", "_")
    looks = [vars(file)[function] for file in _FILES if function in vars(file)]
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Rule(name=name, look=looks[0] if looks else None, **{**row, **lists})


_TABLE = tomllib.loads(read_text(Path(__file__).with_name("findings.toml")))
RULES = tuple(_rule(name, row) for name, row in _TABLE.items())
BY_NAME = {rule.name: rule for rule in RULES}


def find(found: Evidence) -> list[Finding]:
    """All findings, worst first."""
    return worst_first([finding for rule in RULES if (finding := rule.find(found)) is not None])


def finding_from(row: str, evidence: str, /, **changes: Any) -> Finding:
    """A row of the table with its evidence; `changes` are fields that differ from the row."""
    return BY_NAME[row].finding(RuleResult(evidence, **changes))
