"""`expert watch`: follow a run from its events."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expert.cli.show.display import Sheet, make_console, show, show_sheet, write_json
from expert.cli.show.options import RUN_HELP, json_option
from expert.cli.show.progress import RunProgress
from expert.core.text import duration, gib, loss
from expert.insight.event_text import three_digits

if TYPE_CHECKING:
    from expert.run.stored.status import RunStatus


def watch(
    run: Annotated[Path | None, typer.Argument(help=f"{RUN_HELP} Default: runs/.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the status and exit.")] = False,
    as_json: Annotated[bool, json_option("Print the status as JSON and exit.")] = False,
) -> None:
    """Follow a run until it ends; Ctrl-C leaves the run untouched."""
    from expert.run.stored.locate import find_trained
    from expert.run.stored.resume_command import resume_command_of
    from expert.run.stored.status import RESUMABLE, follow_run, run_status

    folder = find_trained(run)
    console = make_console()
    if as_json:
        write_json(run_status(folder))
        return
    if not once:
        with RunProgress(console) as view:
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
    if status.state in RESUMABLE:
        show(console, f"resume with: {resume_command_of(folder)}")


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
        "validation loss, last": _written(status.eval_loss, loss),
        "validation loss, best": f"{best} at step {at:,}" if best and at is not None else best,
        "test loss": _written(status.test_loss, loss),
        "learning rate": _written(status.rate, "{:.3g}".format),
        "tokens/s": _written(status.tokens_per_second, "{:,.0f}".format),
        "steps/s": _written(status.steps_per_second, three_digits),
        "GPU use": _written(status.gpu_utilization, "{:.0f} %".format),
        "peak memory": _written(status.gpu_peak_memory_bytes, lambda n: f"{gib(n)} of the GPU")
        or _written(status.cpu_peak_memory_bytes, lambda n: f"{gib(n)} RAM"),
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
