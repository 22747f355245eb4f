"""A run's validation.json: what it says, and when it may be replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.hashed import file_integrity
from expert.core.rundir import RunFolder, outdated
from expert.core.stored_json import read_object
from expert.core.text import counted, loss
from expert.jobs.validate.test_sets import TestSet
from expert.judging.gate import MIN_ACCURACY
from expert.run.stored.choose_checkpoint import Choice

PARTIAL = "validation-partial.json"


@dataclass(frozen=True, kw_only=True)
class SavedVerdict:
    """The gate in a validation.json; unknown values are None or empty."""

    passed: bool | None
    """None: there were too few rows to tell, or nothing to judge: neither answers nor a
    baseline."""
    reasons: str
    undecided: bool = False
    """There were too few rows to tell."""
    checkpoint: str = ""
    test_set: str = ""
    """Of the whole set, if only a part was judged."""
    cases: int | None = None
    of: int | None = None
    """Cases of the whole set, if only a part was judged."""
    accuracy: float | None = None
    interval: tuple[float, float] | None = None
    learnt: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None = None
    """On the rows."""
    examples: int | None = None
    """Rows that the loss is of."""
    asked: float | None = None
    """The accuracy that the gate required."""
    demands: tuple[str, ...] = ()
    """All requirements, in words."""
    base_loss: float | None = None
    """Of the base on the same rows, if open text was compared with it."""
    baseline: str = ""
    """The baseline and its accuracy, in words."""
    token_accuracy: float | None = None
    mean_score: float | None = None
    """Of a judge command."""
    outdated: str = ""
    """Why it does not apply to the present weights; "" if it does."""

    @property
    def count(self) -> int | None:
        """The cases; for plain text, which has none, the rows."""
        return self.examples if self.cases == 0 else self.cases

    def in_words(self) -> str:
        """`accuracy 95.0% of 20 cases (95 % interval 76.4% to 99.1%), a part of 36`."""
        if self.cases is None:
            return ""
        known = f"loss {loss(self.loss)}" if self.loss is not None else "no loss"
        if not self.cases:
            return f"{known}; no answer was judged: the rows have no answers"
        cases = counted(self.cases, "case")
        part = f", a part of {self.of}" if self.of is not None else ""
        if self.mean_score is not None:
            return f"mean score {self.mean_score:.3g} of {cases}{part}"
        if self.accuracy is None and self.base_loss is not None:
            right = f", token accuracy {self.token_accuracy:.1%}" if self.token_accuracy else ""
            return f"open text: {known}, the base's {loss(self.base_loss)}{right} ({cases}{part})"
        text = cases if self.accuracy is None else f"accuracy {self.accuracy:.1%} of {cases}"
        if self.interval is not None:
            text += f" (95 % interval {self.interval[0]:.1%} to {self.interval[1]:.1%})"
        if self.asked is not None and self.passed and self.asked < MIN_ACCURACY:
            part += f", asked for at least {self.asked * 100:g}%"
        return text + part


def read_verdict(folder: RunFolder) -> SavedVerdict | None:
    """The saved validation of a run; None if there is none. An unreadable one did not pass."""
    if not folder.validation.is_file():
        return None
    if file_integrity(folder.validation) == "damaged":
        return SavedVerdict(passed=False, reasons="the file changed after it was written")
    try:
        found = read_object(folder.validation)
        gate, part = found["gate"], found.get("partial") or {}
        rows, settings = found.get("rows") or {}, found.get("settings") or {}
        rows = found.get("new_rows") or rows  # what the gate counted
        ends, asked = found.get("interval"), settings.get("min_accuracy")
        cases = found["cases"] if isinstance(found.get("cases"), list) else None
        reasons = "; ".join(map(str, gate.get("reasons") or ()))
        is_open = gate["passed"] is None and (bool(reasons) or cases == [])
        other = found.get("baseline") or {}
        theirs = other.get("accuracy")
        return SavedVerdict(
            passed=None if is_open else gate["passed"] is True,
            reasons=reasons or "no reason is given",
            undecided=is_open and bool(reasons),
            checkpoint=str(found.get("checkpoint") or ""),
            test_set=str(part.get("test_set") or found.get("test_set") or ""),
            cases=None if cases is None else len(cases),
            of=int(part["of"]) if part else None,
            accuracy=found.get("accuracy"),
            interval=(float(ends[0]), float(ends[1])) if ends else None,
            learnt=found.get("learnt") or {},
            loss=rows.get("loss"),
            examples=rows.get("examples"),
            asked=None if asked is None else float(asked),
            demands=tuple(map(str, (found.get("asked") or {}).get("for") or ())),
            base_loss=(found.get("base") or {}).get("loss"),
            baseline="" if theirs is None else f"{theirs:.1%} ({other.get('checkpoint')})",
            token_accuracy=rows.get("token_accuracy"),
            mean_score=found.get("mean_score"),
            outdated=outdated(found, folder),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return SavedVerdict(passed=False, reasons="the file cannot be read")


def validation_file(folder: RunFolder, choice: Choice, test: TestSet) -> tuple[Path, str]:
    """The file to write a validation to, and a note about it: a part of the cases does not replace
    a verdict on more of the same cases for the same checkpoint."""
    before = read_verdict(folder)
    whole = test.part_of
    if whole is None or before is None or before.count is None or before.outdated:
        return folder.validation, ""
    other = before.checkpoint != choice.name or before.test_set != whole.name
    if other or before.count <= test.count:
        return folder.validation, ""
    what = "judged {} of these cases" if before.cases else "looked at {} of these rows"
    note = f"{folder.validation.name}, which {what.format(before.count)}, is kept"
    return folder.path / PARTIAL, note
