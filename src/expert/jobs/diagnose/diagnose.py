"""What limits a run's speed, from its folder alone: during the run, afterwards, on any machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert.core.rundir import RunFolder
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.findings.table import find, finding_from
from expert.insight.findings.verdict import Verdict, judge, judge_step
from expert.insight.outcome import Outcome, judge_learning
from expert.insight.record import RunRecord, read_run
from expert.insight.step.anatomy import Anatomy, dissect
from expert.run.stored.locate import find_trained
from expert.run.stored.resume_command import resume_command_of
from expert.run.stored.status import RESUMABLE, State, status_by


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict on a run, where its time went, and all findings."""

    run: RunRecord
    state: State
    because: str
    """How the run ended, in words; empty while it runs."""
    expert: str | None
    step_number: int | None
    """The last known step."""
    verdict: Verdict
    step_verdict: Verdict
    """The verdict on a step alone; the same, unless most of the time was not training."""
    learning: Outcome
    """Whether it learned, as far as its losses show."""
    anatomy: Anatomy
    findings: tuple[Finding, ...]
    resume_command: str
    """The command that resumes it as it was started, if it ended early."""

    @property
    def folder(self) -> Path:
        return self.run.folder

    def as_dict(self) -> dict[str, Any]:
        step = self.anatomy.step
        return {
            "run": str(self.folder),
            "state": self.state,
            "expert": self.expert,
            "step": self.step_number,
            "verdict": self.verdict.as_dict(),
            "step_verdict": self.step_verdict.as_dict(),
            "learning": asdict(self.learning),
            "seconds": self.anatomy.run.as_dict(),
            "update": step.as_dict() if step is not None else None,
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose_run(place: Path | None) -> Diagnosis:
    """The diagnosis of a run folder, or of the newest run in a folder of runs or of an expert.

    A folder with events counts as a run however damaged it is.
    """
    folder = RunFolder(place) if place is not None else None
    if folder is None or not folder.events.is_file():
        folder = find_trained(place)
    return diagnose_record(read_run(folder.path))


def diagnose_record(run: RunRecord) -> Diagnosis:
    folder = RunFolder(run.folder)
    status = status_by(run.events, folder, damaged_lines=run.damaged_lines)
    resume_command = ""
    if status.state in RESUMABLE:
        resume_command = resume_command_of(folder, next(reversed(run.of("started")), {}))
    found = Evidence(run=run, anatomy=dissect(run), resume_command=resume_command)
    findings = find(found)
    if status.state == "gone":
        findings = worst_first([_killed(run, status.step, resume_command), *findings])
    return Diagnosis(
        run=run,
        state=status.state,
        because=status.because,
        expert=status.expert,
        step_number=status.step,
        verdict=judge(found),
        step_verdict=judge_step(found),
        learning=judge_learning(found),
        anatomy=found.anatomy,
        findings=tuple(findings),
        resume_command=resume_command,
    )


def _killed(run: RunRecord, step: int | None, resume_command: str) -> Finding:
    """The finding for a run whose trainer is gone without a final event."""
    saved, last = run.of("saved"), run.events[-1].get("event") if run.events else None
    kept = f"the last checkpoint is that of step {saved[-1].get('step')}" if saved else ""
    return finding_from(
        "no-ending",
        f"the last event is {last} at step {step}" if run.events else "there is no event at all",
        consequence=kept or "there is no checkpoint to resume from",
        fix=f"{resume_command}; dmesg names a process that the kernel killed for its memory",
    )
