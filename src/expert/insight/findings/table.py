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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.core.files import read_text
from expert.insight.findings import course, feeding, kernels, memory
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import CONFIG, Answer, Finding, Noted, Severity, worst_first


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """A row of the table: a possible finding, its consequence and its fix."""

    title: str
    consequence: str = ""
    keys: tuple[str, ...] = ()
    """The fix as keys of training.config, such as "packing=true"."""
    fix: str = ""
    """The fix in words; the keys by default."""
    severity: Severity = "warning"
    bound: str = ""
    """The verdict on the run's speed if this is the first of its findings that names one."""
    repeats: tuple[str, ...] = ()
    """Plan warnings, by the start of their path, that this finding repeats with more evidence."""


def _row(fields: dict[str, Any]) -> FindingRow:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    return FindingRow(**values)


TABLE = {
    name: _row(fields)
    for name, fields in tomllib.loads(read_text(Path(__file__).with_name("findings.toml"))).items()
}
RULES: dict[str, Callable[[Evidence], Answer]] = {
    name: function
    for name in TABLE
    for file in (feeding, kernels, memory, course)
    if (function := vars(file).get(name.replace("-", "_"))) is not None
}
"""The function that looks for a finding has its name. Others are only made by jobs/diagnose, from
the machine or the rows."""


def find(found: Evidence) -> list[Finding]:
    """All findings, worst first."""
    findings = []
    for name, rule in RULES.items():
        answer = rule(found)
        if answer is not None:
            noted = answer if isinstance(answer, Noted) else Noted(answer)
            findings.append(finding_from(name, noted.evidence, **noted.changes))
    return worst_first(findings)


def finding_from(name: str, evidence: str, /, **changes: Any) -> Finding:
    """A row of the table with its evidence; `changes` are fields that differ from the row, with
    `keys` in place of `overrides`."""
    row = TABLE[name]
    keys: tuple[str, ...] = changes.pop("keys", row.keys)
    words = " and ".join(key.replace("=", ": ", 1) for key in keys)
    if words and "." not in keys[0].partition("=")[0]:
        words = f"{CONFIG}.{words}"
    fields = {
        "name": name,
        "severity": row.severity,
        "title": row.title,
        "consequence": row.consequence,
        "fix": row.fix if keys == row.keys and row.fix else words,
        "overrides": tuple(
            key if "." in key.partition("=")[0] else f"{CONFIG}.{key}" for key in keys
        ),
    }
    return Finding(evidence=evidence, **{**fields, **changes})
