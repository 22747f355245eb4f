"""`expert diagnose`: what limits a run's speed, before or after it, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_bars, show_sheet, write_json
from expert.core.errors import EXIT_OK
from expert.core.text import counted, percent, shell_quoted, span, times

if TYPE_CHECKING:
    from rich.console import Console

    from expert.insight.findings.finding import Finding
    from expert.insight.page.facts import RunFacts
    from expert.insight.step.anatomy import StepAnatomy
    from expert.jobs.diagnose.check import Check
    from expert.jobs.diagnose.short_runs import Profile
    from expert.manifest.reader import ReadManifest

DIAGNOSE_EPILOG = (
    "Exit code 2 if a finding before a run is an error, so that the run would not start."
)
MARKS = {"error": "✗ error", "warning": "! warning", "note": "· note", "good": "✓ good"}
SHOWN_KERNELS = 15


def diagnose(
    run: Annotated[
        Path | None,
        typer.Argument(help=f"{options.RUN_HELP} A file: a manifest. Without: this machine."),
    ] = None,
    manifest: Annotated[
        Path | None, options.manifest_option("Check a run of this before it starts")
    ] = None,
    dataset: options.Rows = None,
    model: options.BaseModelName = None,
    gpu: Annotated[str | None, typer.Option(help="Check for this card; no step is timed.")] = None,
    vram: Annotated[
        str | None, typer.Option(help='GPU memory to check for, such as "16GB".')
    ] = None,
    overrides: options.Overrides = None,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", help="Do not train a few steps to estimate the time.")
    ] = False,
    profile: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Trace N steps of a short run.")
    ] = None,
    remote_code: Annotated[
        bool, options.remote_code_option("Run Python code that ships with the model.")
    ] = False,
    as_json: Annotated[bool, options.json_option("Print everything found as JSON.")] = False,
) -> None:
    """Show where the time of a run went and how to fix it; or, before a run, what would stop it.

    With a run, only its folder is read: it may still be running, or come from another machine. The
    exit code is then always 0. Without a run the machine is checked, and with --manifest, --dataset
    or a config.yaml of the character GPT also the data, the configuration, and how long the run
    would take.
    """
    from expert.jobs.diagnose.check import check
    from expert.jobs.diagnose.diagnose import diagnose_run
    from expert.jobs.diagnose.short_runs import profile as profile_job
    from expert.jobs.diagnose.short_runs import read_run_manifest
    from expert.run.stored.locate import find_trained

    if run is not None and run.is_file():  # a run is a folder: this can only be a manifest
        run, manifest = None, options.one_manifest(run, manifest)
    if run is None and manifest is None and dataset is None:
        manifest = options.settings_file()
    described = manifest is not None or dataset is not None
    if run is not None and described:
        raise typer.BadParameter("give a run or a manifest, not both")
    if profile is not None and run is None and not described:
        raise typer.BadParameter("--profile needs --manifest FILE, or a run")
    if profile is not None and gpu is not None:
        raise typer.BadParameter("--profile runs on this machine: leave out --gpu")
    if gpu is not None and run is not None:
        raise typer.BadParameter("--gpu is for --manifest; a run has its own card")
    short: dict[str, Any] = {"model": model, "vram": vram, "allow_remote_code": remote_code}

    flags = options.flag_overrides(dataset=dataset, output=None, epochs=None, device=None)

    def read() -> ReadManifest:
        keys = (*flags, *(overrides or ()))
        if described:
            return options.read_requested_manifest(manifest, dataset, keys)
        return read_run_manifest(find_trained(run).path, keys)

    found: Any
    display: Callable[[Any, Console], None]
    if profile is not None:
        _progress(f"a short run, {counted(profile, 'step')} traced")
        folder = find_trained(run).path / "profile" if run is not None else None
        found, display = profile_job(read(), updates=profile, folder=folder, **short), show_profile
    elif run is not None:
        found, display = diagnose_run(run), show_diagnosis
    else:
        given = read() if described else None
        found = check(given, tell=_progress, timed=not no_timing, gpu=gpu, **short)
        display = show_check
    if as_json:
        write_json(found.as_dict())
    else:
        display(found, make_console())
    if code := getattr(found, "exit_code", EXIT_OK):
        raise typer.Exit(code)


def _progress(text: str) -> None:
    """A line in a terminal for each slow task."""
    notes = make_console(error=True)
    if notes.is_terminal:
        show(notes, f"{text} …", "dim")


# --- a run ---------------------------------------------------------------------------------------


def show_diagnosis(found: RunFacts, console: Console) -> None:
    """The verdict, then its evidence, then what to do."""
    verdict, learning = found.verdict, found.learning
    good = verdict.kind == "compute-bound" and not verdict.fix
    show(console, verdict.sentence, "bold green" if good else "bold yellow")
    if verdict.fix:
        show(console, f"fix: {verdict.fix}")
    if verdict.gain is not None:
        show(console, f"expected gain: up to {times(verdict.gain)}")
    if learning.kind != "unknown":
        style = "bold green" if learning.is_good else "bold yellow"
        show(console, f"{learning.kind}: {learning.sentence}", style)
        if learning.fix:
            show(console, f"fix: {learning.fix}")
    if found.anatomy.step is not None:
        _show_step(found.anatomy.step, console)
    spent = found.anatomy.run
    if spent.total > 0:
        show(console, f"\nthe run so far: {span(spent.total)}", "bold")
        names = ("loading", "compiling", "training", "evaluating", "saving", "rest")
        parts = [(name, float(getattr(spent, name))) for name in names]
        bars = [(name, s, f"{span(s)}  {percent(s / spent.total)}") for name, s in parts if s > 0]
        show_bars(bars, spent.total, console)
    show(console, "")
    if found.findings:
        _show_findings(found.findings, console)
    else:
        show(console, "No issues found.", "green")
    show(console, "")
    show(console, _next_command(found))


def _show_step(step: StepAnatomy, console: Console) -> None:
    from expert.insight.step.anatomy import PHASE_NAMES

    first = "" if step.settled else ", the first ones: the run was too short to settle"
    show(console, f"\none step: {span(step.wall)} (median of {step.updates}{first})", "bold")
    parts = []
    for name, seconds in step.phases.items():
        beside = " overlapped" if name == "copy" and step.copies_beside else ""
        share = percent(seconds / step.wall) if step.wall > 0 else "–"
        parts.append((PHASE_NAMES.get(name, name), seconds, f"{span(seconds)}  {share}{beside}"))
    show_bars(parts, step.wall, console)
    rates = {"tokens/s": step.tokens_per_second, "samples/s": step.samples_per_second}
    shares = {
        "MFU": step.mfu,
        "idle": step.idle_share,
        "GPU use": step.gpu_utilization,
        "steps where the device ran dry": step.ran_dry,
        "padding": step.padding,
    }
    facts = [f"{rate:,.3g} {unit}" if rate < 10 else f"{rate:,.0f} {unit}"
             for unit, rate in rates.items() if rate is not None]  # fmt: skip
    facts += [f"{name} {percent(share)}" for name, share in shares.items() if share is not None]
    if facts:
        show(console, "  " + ", ".join(facts))


def _next_command(found: RunFacts) -> str:
    from expert.core.rundir import named_manifest

    keys = found.verdict.overrides or next(
        (each.overrides for each in found.findings if each.overrides and each.severity != "note"),
        (),
    )
    if keys:
        manifest = named_manifest(next(reversed(found.record.of("started")), {}))
        sets = " ".join(f"--set {key}" for key in keys)
        return f"next: expert train --manifest {shell_quoted(manifest)} {sets}"
    if found.verdict.fix and found.verdict.kind != "unknown":
        return f"next: {found.verdict.fix}"
    if found.state == "running":
        return f"next: expert watch {shell_quoted(found.record.folder)}"
    sample = f'expert sample {shell_quoted(found.record.folder)} --prompt "…"'
    return f"next: {found.resume_command or sample}"


def _show_findings(findings: Sequence[Finding], console: Console) -> None:
    rows = []
    for each in findings:
        what = "\n".join(part for part in (each.title, each.evidence) if part)
        gain = f" (up to {each.gain:.2g}×)" if each.gain and each.fix else ""
        rows.append((MARKS[each.severity], each.name, what, each.consequence, each.fix + gain))
    columns = ("", "name", "finding", "consequence", "fix")
    show_sheet(Sheet(columns, [rows], dim=("name",)), console)


# --- before a run --------------------------------------------------------------------------------


def show_check(found: Check, console: Console) -> None:
    """Findings, worst first, then a summary."""
    show(console, "")
    _show_findings(found.findings, console)
    show(console, "")
    severities = [each.severity for each in found.findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    if errors:
        text = f"✗ {counted(errors, 'error')}: a run would not start on {found.target}"
        show(console, text, "bold red")
    elif warnings:
        text = f"! {counted(warnings, 'warning')}; a run would start on {found.target}"
        show(console, text, "bold yellow")
    else:
        show(console, f"✓ nothing prevents a run on {found.target}", "bold green")


def show_profile(found: Profile, console: Console) -> None:
    """The kernels that took longest, and where the trace is."""
    steps, ran = max(1, found.updates), sum(seconds for _, seconds, _ in found.kernels)
    rows = []
    for name, seconds, calls in found.kernels[:SHOWN_KERNELS]:
        share = f"{seconds / ran:.1%}" if ran else ""
        rows.append((name[:70], f"{1000 * seconds / steps:.2f} ms", share, f"{calls / steps:.0f}"))
    title = f"{counted(found.updates, 'step')} on {found.device}"
    columns = ("kernel or operator", "per step", "share", "calls per step")
    show_sheet(Sheet(columns, [rows], title), console)
    show(console, f"full trace: {found.trace}  (open it at https://ui.perfetto.dev)")
