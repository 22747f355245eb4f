"""How a diagnosis is shown: verdict first, then a picture of an update, findings, what is next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert.cli.display import Sheet, show_bars, show_sheet
from expert.cli.run_view import say
from expert.insight.wording import percent, span, times

if TYPE_CHECKING:
    from rich.console import Console

    from expert.insight.findings.finding import Finding
    from expert.insight.step.anatomy import RunTimes, StepAnatomy
    from expert.insight.step.bound import Verdict
    from expert.jobs.diagnose.diagnose import Diagnosis

MARKS = {"error": "✗ error", "warning": "! warning", "note": "· note", "good": "✓ good"}
PHASE_NAMES = {
    "data_wait": "waiting for data",
    "copy": "copying",
    "compute": "computing",
    "update": "not told apart",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "other": "between and other",
}
GOOD = "compute-bound"


def show_diagnosis(found: Diagnosis, console: Console) -> None:
    """The verdict first; then what it rests on; then what to do."""
    show_verdict(found.verdict, console)
    if found.learning.kind != "unknown":
        style = "bold green" if found.learning.is_good else "bold yellow"
        say(console, f"{found.learning.kind}: {found.learning.sentence}", style)
        if found.learning.fix:
            say(console, f"fix: {found.learning.fix}")
    if found.step_verdict != found.verdict:
        say(console, f"an update by itself: {found.step_verdict.sentence}")
    if found.anatomy.step is not None:
        show_step(found.anatomy.step, console)
    show_run(found.anatomy.run, console)
    show_findings(found.findings, console)
    say(console, "")
    say(console, next_command(found))


def show_verdict(verdict: Verdict, console: Console) -> None:
    """One sentence, the fix, and the gain with its arithmetic."""
    style = "bold green" if verdict.kind == GOOD and not verdict.fix else "bold yellow"
    say(console, verdict.sentence, style)
    if verdict.fix:
        say(console, f"fix: {verdict.fix}")
    for gain in verdict.gains:
        say(console, f"gain to expect: {gain}")


def show_step(step: StepAnatomy, console: Console) -> None:
    """Where every millisecond of an average update went."""
    first = "" if step.settled else ", the first ones: the run was too short to settle"
    say(console, "")
    title = f"an update: {span(step.wall)} (median of {step.updates}{first})"
    say(console, title, "bold")
    parts = []
    for name, seconds in step.phases.items():
        beside = " beside the rest" if name == "copy" and step.copies_beside else ""
        share = percent(seconds / step.wall) if step.wall > 0 else "–"
        parts.append((PHASE_NAMES.get(name, name), seconds, f"{span(seconds)}  {share}{beside}"))
    show_bars(parts, step.wall, console)
    facts = _facts(step)
    if facts:
        say(console, "  " + ", ".join(facts))


def _facts(step: StepAnatomy) -> list[str]:
    shares = {
        "MFU": step.mfu,
        "idle": step.idle_share,
        "GPU use": step.gpu_utilization,
        "updates that ran dry": step.ran_dry,
        "padding": step.padding,
    }
    rates = {"tokens/s": step.tokens_per_second, "samples/s": step.samples_per_second}
    told = [f"{_rate(rate)} {unit}" for unit, rate in rates.items() if rate is not None]
    return told + [f"{name} {percent(s)}" for name, s in shares.items() if s is not None]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def show_run(spent: RunTimes, console: Console) -> None:
    """Where the time of the whole run went."""
    if spent.total <= 0:
        return
    say(console, "")
    say(console, f"the run so far: {span(spent.total)}", "bold")
    told = (
        ("loading", spent.loading),
        ("compiling", spent.compiling),
        ("training", spent.training),
        ("evaluating", spent.evaluating),
        ("saving", spent.saving),
        ("the rest", spent.rest),
    )
    show_bars(
        [(name, s, f"{span(s)}  {percent(s / spent.total)}") for name, s in told if s > 0],
        spent.total,
        console,
    )


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """A table of everything found, the worst first."""
    say(console, "")
    if not findings:
        say(console, "nothing else was found", "green")
        return
    rows = []
    for each in findings:
        gain = times(each.gain) if each.gain else ""
        what = f"{each.title}\n{each.evidence}"
        rows.append((MARKS[each.severity], each.name, what, each.fix, gain))
    columns = ("severity", "name", "what was found", "fix", "up to")
    show_sheet(Sheet(columns, [rows], dim=("name",)), console)


def next_command(found: Diagnosis) -> str:
    """The one command that comes next."""
    from expert.core.rundir import named_manifest

    manifest = named_manifest(next(reversed(found.run.of("started")), {}))
    keys = found.verdict.overrides or next(
        (each.overrides for each in found.findings if each.overrides and each.severity != "note"),
        (),
    )
    if keys:
        sets = " ".join(f"--set {key}" for key in keys)
        return f"next: expert train --manifest {manifest} {sets}"
    if found.verdict.fix and found.verdict.kind != "unknown":
        return f"next: {found.verdict.fix}"
    if found.state == "running":
        return f"next: expert watch {found.folder}"
    if found.go_on:
        return f"next: {found.go_on}"
    return f'next: expert sample {found.folder} --prompt "…"'
