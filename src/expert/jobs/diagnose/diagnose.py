"""What limits a run's speed, from its folder alone: during the run, afterwards, on any machine."""

from __future__ import annotations

from pathlib import Path

from expert.core.rundir import RunFolder
from expert.insight.findings.evidence import Evidence
from expert.insight.findings.finding import worst_first
from expert.insight.findings.table import find, finding_from
from expert.insight.findings.verdict import judge
from expert.insight.outcome import judge_learning
from expert.insight.page.facts import RunFacts
from expert.insight.record import read_run
from expert.insight.step.anatomy import dissect
from expert.run.stored.locate import find_trained
from expert.run.stored.resume_command import resume_command_of
from expert.run.stored.status import RESUMABLE, status_by


def diagnose_run(place: Path | None) -> RunFacts:
    """The diagnosis of a run folder, or of the newest run in a folder of runs or of an expert.

    A folder with events counts as a run however damaged it is.
    """
    folder = RunFolder(place) if place is not None else None
    if folder is None or not folder.events.is_file():
        folder = find_trained(place)
    run = read_run(folder.path)
    folder = RunFolder(run.folder)
    status = status_by(run.events, folder, damaged_lines=run.damaged_lines)
    resume_command = ""
    if status.state in RESUMABLE:
        resume_command = resume_command_of(folder, next(reversed(run.of("started")), {}))
    found = Evidence(run=run, anatomy=dissect(run), resume_command=resume_command)
    findings = find(found)
    if status.state == "gone":  # the trainer is gone without a final event
        saved, last = run.of("saved"), run.events[-1].get("event") if run.events else None
        kept = f"the last checkpoint is that of step {saved[-1].get('step')}" if saved else ""
        killed = finding_from(
            "no-ending",
            f"the last event is {last} at step {status.step}" if last else "there is no event",
            consequence=kept or "there is no checkpoint to resume from",
            fix=f"{resume_command}; dmesg names a process that the kernel killed for its memory",
        )
        findings = worst_first([killed, *findings])
    return RunFacts(
        record=run,
        state=status.state,
        because=status.because,
        verdict=judge(found, findings),
        learning=judge_learning(found),
        anatomy=found.anatomy,
        findings=tuple(findings),
        resume_command=resume_command,
    )
