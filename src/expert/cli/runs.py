"""`expert watch`, `expert report` and `expert verify`: what is in a run folder."""

from __future__ import annotations

import time
import webbrowser
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import (
    Line,
    Sheet,
    make_console,
    show,
    show_lines,
    show_sheet,
    write_json,
)
from expert.cli.show.options import RUN_HELP, json_option
from expert.cli.show.progress import RunView
from expert.core.errors import EXIT_DAMAGED
from expert.core.text import counted, duration, gib, loss
from expert.insight.event_text import bytes_in_words, three_digits, worded

if TYPE_CHECKING:
    from expert.jobs.report import Written
    from expert.jobs.verify import Verified
    from expert.run.stored.status import RunStatus


def watch(
    run: Annotated[Path | None, typer.Argument(help=f"{RUN_HELP} Default: runs/.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the status and exit.")] = False,
    as_json: Annotated[bool, json_option("Print the status as JSON and exit.")] = False,
) -> None:
    """Follow a run until it ends; Ctrl-C leaves the run untouched."""
    from expert.run.stored.locate import find_trained
    from expert.run.stored.resume_command import command_of_run
    from expert.run.stored.status import ENDED_BEFORE, follow_run, run_status

    folder = find_trained(run)
    console = make_console()
    if as_json:
        write_json(run_status(folder))
        return
    if not once:
        with RunView(console) as view:
            for event in follow_run(folder):
                view(event)
                if console.quiet:  # the reader of a pipe left
                    return
    status = run_status(folder)
    if once:
        show_sheet(status_sheet(status), console)
    elif status.state == "gone":
        last = f" after step {status.step}" if status.step else ""
        show(console, f"{status.because}{last}", "bold red")
    if status.state in ENDED_BEFORE:
        show(console, f"resume with: {command_of_run(folder)}")


def status_sheet(status: RunStatus) -> Sheet:
    """The status of a run, one fact per row; unknown facts have no row."""
    total = f" of {status.total_steps:,}" if status.total_steps else ""
    epochs = f" of {status.epochs:g}" if status.epochs else ""
    best, at = _written(status.best_eval_loss, loss), status.best_eval_step
    left = status.eta_seconds if status.state == "running" else None
    rows = {
        "state": status.state + (f": {status.because}" if status.because else ""),
        "model": status.model and f"{status.model} on {status.device}",
        "step": None if status.step is None else f"{status.step:,}{total}",
        "epoch": None if status.epoch is None else f"{status.epoch:.2f}{epochs}",
        "loss": _written(status.loss, loss),
        "mean loss": _written(status.mean_loss, loss),
        "validation loss, last": _written(status.eval_loss, loss),
        "validation loss, best": f"{best} at step {at:,}" if best and at is not None else best,
        "test loss": _written(status.test_loss, loss),
        "learning rate": _written(status.rate, "{:.3g}".format),
        "tokens/s": _written(status.tokens_per_second, "{:,.0f}".format),
        "steps/s": _written(status.steps_per_second, three_digits),
        "GPU use": _written(status.gpu_utilization, "{:.0f} %".format),
        "peak memory": worded(status.gpu_peak_memory_bytes, "{} of the GPU", bytes_in_words)
        or worded(status.cpu_peak_memory_bytes, "{} RAM", bytes_in_words),
        "time left": duration(left) if isinstance(left, int | float) else None,
        "last checkpoint": status.last_checkpoint or "none yet",
        "fallbacks": "\n".join(status.fallbacks) or "none",
        "last event": status.last_event
        and f"{duration(max(0.0, time.time() - status.last_event))} ago",
        "final weights": status.final,
        "damaged lines": str(status.damaged_lines) if status.damaged_lines else None,
    }
    known = [(name, value) for name, value in rows.items() if value]
    return Sheet(("fact", "value"), [known], title=f"{status.expert or 'run'}: {status.folder}")


def _written(value: object, write: Callable[[float], str]) -> str | None:
    """A number in words; event files store "nan" as text."""
    if value is None:
        return None
    return write(value) if isinstance(value, int | float) else str(value)


_STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]", help=f"{RUN_HELP} Default: runs/.", show_default=False),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Compare with this run on the same axes; repeatable."),
    ] = None,
    ladder: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A benchmark result; default: RUN/ladder.json."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER|FILE.html",
            help="Write into this folder, or to this file and its .md, instead of the run folder.",
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Annotated[bool, json_option("Print what was written as JSON.")] = False,
) -> None:
    """Write a page about a run, as HTML and Markdown: verdict, curves, settings, environment."""
    from expert.jobs.report import report as report_job

    named = runs or []
    if len(named) > 1 and not compare:
        raise typer.BadParameter("give one run; compare with others by --compare RUN")
    others = [*(compare or ()), *named[1:]]
    done = report_job(named[0] if named else None, compare=others, ladder=ladder, to=to)
    if as_json:
        write_json({**asdict(done), "verdict": done.verdict.as_dict()})
    else:
        show_lines(make_console(), _report_lines(done))
    if open_it:
        webbrowser.open(done.html.resolve().as_uri())


def _report_lines(done: Written) -> list[Line]:
    """The verdict, the number of findings, and where the page is."""
    from expert.insight.findings.finding import ORDER

    found = Counter(finding.severity for finding in done.findings)
    bad = [kind for kind in ORDER if found[kind] and kind != "good"]
    lines = [(done.verdict.sentence, "bold")]
    if done.learning is not None and done.learning.kind != "unknown":
        style = "bold" if done.learning.is_good else "bold yellow"
        lines.insert(0, (f"{done.learning.kind}: {done.learning.sentence}", style))
    if bad:
        counts = ", ".join(counted(found[kind], kind) for kind in bad)
        where = f"see the page, or expert diagnose {done.run}"
        lines.append((f"  {counts}: {where}", _STYLES[bad[0]]))
    size = f"{gib(done.html_bytes)}, {len(done.figures)} figures"
    return [*lines, (f"✓ wrote {done.html}  ({size})", ""), (f"  and {done.markdown}", "dim")]


VERIFY_EPILOG = (
    f"Exit codes: 0 everything is as it was written; {EXIT_DAMAGED} something is damaged, file by "
    "file; 2 there is nothing to check."
)


def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run, a checkpoint, final/, an exported folder, a prepared cache, or a folder "
            "above them."
        ),
    ],
    as_json: Annotated[bool, json_option("Print what was found as JSON.")] = False,
) -> None:
    """Hash every file that Expert wrote below a folder, and name those that have changed."""
    from expert.jobs.verify import verify as verify_job

    found = verify_job(folder)
    if as_json:
        write_json(found)
    else:
        show_lines(make_console(), _verified_lines(found))
    if found.of("damaged"):
        raise typer.Exit(EXIT_DAMAGED)


def _verified_lines(found: Verified) -> list[Line]:
    """What is intact, what has no hash, then what is damaged, file by file."""
    lines: list[Line] = [(f"✓ {each.path}", "") for each in found.of("whole")]
    lines += [
        (f"· {each.path}: written by an earlier version, without hashes", "dim")
        for each in found.of("no hash")
    ]
    damaged = found.of("damaged")
    for each in damaged:
        lines += [(f"✗ {each.path}: {fault}", "bold red") for fault in each.faults]
        lines.append((f"    {each.advice}", ""))
    whole = counted(len(found.of("whole")), "item")
    if damaged:
        return [*lines, (f"{len(damaged)} damaged, {whole} as written", "bold red")]
    return [*lines, (f"{whole} as written", "bold")]
