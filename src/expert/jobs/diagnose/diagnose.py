"""What limits a run's speed, from its folder alone: during the run, afterwards, on any machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from expert.core.rundir import RunFolder
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.findings.table import find, finding_from
from expert.insight.findings.verdict import judge
from expert.insight.outcome import judge_learning
from expert.insight.page.facts import RunFacts
from expert.insight.record import RunRecord, read_run
from expert.insight.step.anatomy import dissect
from expert.run.stored.locate import find_trained
from expert.run.stored.resume_command import resume_command_of
from expert.run.stored.status import RESUMABLE, status_by


@dataclass(frozen=True, kw_only=True)
class Diagnosis(RunFacts):
    """What a page shows of a run, and what only the command shows."""

    expert: str | None
    step_number: int | None
    """The last known step."""
    resume_command: str
    """The command that resumes it as it was started, if it ended early."""

    def as_dict(self) -> dict[str, Any]:
        step, spent = self.anatomy.step, self.anatomy.run
        update = None
        if step is not None:
            update = {**asdict(step), "wall": step.wall, "idle_share": step.idle_share}
        return {
            "run": str(self.record.folder),
            "state": self.state,
            "expert": self.expert,
            "step": self.step_number,
            "verdict": asdict(self.verdict),
            "learning": asdict(self.learning),
            "seconds": {**asdict(spent), "rest": spent.rest},
            "update": update,
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
        record=run,
        state=status.state,
        because=status.because,
        expert=status.expert,
        step_number=status.step,
        verdict=judge(found, findings),
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
