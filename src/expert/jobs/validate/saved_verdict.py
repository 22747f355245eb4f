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
    count: int | None = None
    """The cases; for plain text, which has none, the rows."""
    words: str = ""
    """`accuracy 95.0% of 20 cases (95 % interval 76.4% to 99.1%), a part of 36`."""
    accuracy: float | None = None
    learnt: Mapping[str, Any] = field(default_factory=dict)
    demands: tuple[str, ...] = ()
    """All requirements, in words."""
    baseline: str = ""
    """The baseline and its accuracy, in words."""
    outdated: str = ""
    """Why it does not apply to the present weights; "" if it does."""


def read_verdict(folder: RunFolder) -> SavedVerdict | None:
    """The saved validation of a run; None if there is none. An unreadable one did not pass."""
    if not folder.validation.is_file():
        return None
    if file_integrity(folder.validation) == "damaged":
        return SavedVerdict(passed=False, reasons="the file changed after it was written")
    try:
        found = read_object(folder.validation)
        gate, part = found["gate"], found.get("partial") or {}
        cases = found["cases"] if isinstance(found.get("cases"), list) else None
        rows = found.get("new_rows") or found.get("rows") or {}  # what the gate counted
        reasons = "; ".join(map(str, gate.get("reasons") or ()))
        is_open = gate["passed"] is None and (bool(reasons) or cases == [])
        other = found.get("baseline") or {}
        theirs = other.get("accuracy")
        asked = (found.get("settings") or {}).get("min_accuracy")
        asked = None if asked is None else float(asked)
        return SavedVerdict(
            passed=None if is_open else gate["passed"] is True,
            reasons=reasons or "no reason is given",
            undecided=is_open and bool(reasons),
            checkpoint=str(found.get("checkpoint") or ""),
            test_set=str(part.get("test_set") or found.get("test_set") or ""),
            count=rows.get("examples") if not cases else len(cases),
            words="" if cases is None else _in_words(found, rows, len(cases), asked),
            accuracy=found.get("accuracy"),
            learnt=found.get("learnt") or {},
            demands=tuple(map(str, (found.get("asked") or {}).get("for") or ())),
            baseline="" if theirs is None else f"{theirs:.1%} ({other.get('checkpoint')})",
            outdated=outdated(found, folder),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return SavedVerdict(passed=False, reasons="the file cannot be read")


def _in_words(
    found: Mapping[str, Any], rows: Mapping[str, Any], count: int, asked: float | None
) -> str:
    """The result of a validation on this many cases, of which this accuracy was required."""
    known = f"loss {loss(rows['loss'])}" if rows.get("loss") is not None else "no loss"
    if not count:
        return f"{known}; no answer was judged: the rows have no answers"
    cases = counted(count, "case")
    part = f", a part of {int(found['partial']['of'])}" if found.get("partial") else ""
    accuracy, base = found.get("accuracy"), (found.get("base") or {}).get("loss")
    if found.get("mean_score") is not None:
        return f"mean score {found['mean_score']:.3g} of {cases}{part}"
    if accuracy is None and base is not None:
        right = f", token accuracy {rows['token_accuracy']:.1%}" if rows["token_accuracy"] else ""
        return f"open text: {known}, the base's {loss(base)}{right} ({cases}{part})"
    text = cases if accuracy is None else f"accuracy {accuracy:.1%} of {cases}"
    if ends := found.get("interval"):
        text += f" (95 % interval {ends[0]:.1%} to {ends[1]:.1%})"
    if asked is not None and found["gate"]["passed"] and asked < MIN_ACCURACY:
        part += f", asked for at least {asked * 100:g}%"
    return text + part


def validation_file(folder: RunFolder, choice: Choice, test: TestSet) -> tuple[Path, str]:
    """The file to write a validation to, and a note about it: a part of the cases does not replace
    a verdict on more of the same cases for the same checkpoint."""
    before, whole = read_verdict(folder), test.part_of
    if whole is None or before is None or before.count is None or before.outdated:
        return folder.validation, ""
    same = (before.checkpoint, before.test_set) == (choice.name, whole.name)
    if not same or before.count <= test.count:
        return folder.validation, ""
    note = f"{folder.validation.name}, which judged {before.count} of these cases, is kept"
    return folder.path / PARTIAL, note
