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
from expert.insight.findings.finding import CONFIG, Finding, RuleResult, Severity, worst_first


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table: a possible finding, its consequence and its fix."""

    name: str
    title: str
    look: Callable[[Evidence], RuleResult | None] | None = None
    """Examines the plan before a run or the events after it. None for findings that only
    jobs/diagnose makes, from the machine or the rows."""
    consequence: str = ""
    keys: tuple[str, ...] = ()
    """The fix as keys of training.config, such as "packing=true"."""
    fix: str = ""
    """The fix in words; the keys by default."""
    severity: Severity = "warning"
    repeats: tuple[str, ...] = ()
    """Plan warnings, by the start of their path, that this finding repeats with more evidence."""


def _rule(name: str, row: dict[str, Any]) -> Rule:
    """A row, and the function of its name that looks for it, if there is one."""
    function = name.replace("-", "_")
    files = (feeding, kernels, memory, course)
    looks = [vars(file)[function] for file in files if function in vars(file)]
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Rule(name=name, look=looks[0] if looks else None, **{**row, **lists})


_TABLE = tomllib.loads(read_text(Path(__file__).with_name("findings.toml")))
BY_NAME = {name: _rule(name, row) for name, row in _TABLE.items()}


def find(found: Evidence) -> list[Finding]:
    """All findings, worst first."""
    answers = {name: rule.look(found) for name, rule in BY_NAME.items() if rule.look is not None}
    return worst_first(
        [finding_from(name, it.evidence, **it.changes) for name, it in answers.items() if it]
    )


def finding_from(row: str, evidence: str, /, **changes: Any) -> Finding:
    """A row of the table with its evidence; `changes` are fields that differ from the row, with
    `keys` in place of `overrides`."""
    rule = BY_NAME[row]
    keys: tuple[str, ...] = changes.pop("keys", rule.keys)
    words = " and ".join(key.replace("=", ": ", 1) for key in keys)
    if words and "." not in keys[0].partition("=")[0]:
        words = f"{CONFIG}.{words}"
    fields = {
        "name": rule.name,
        "severity": rule.severity,
        "title": rule.title,
        "consequence": rule.consequence,
        "fix": rule.fix if keys == rule.keys and rule.fix else words,
        "overrides": tuple(
            key if "." in key.partition("=")[0] else f"{CONFIG}.{key}" for key in keys
        ),
    }
    return Finding(evidence=evidence, **{**fields, **changes})
