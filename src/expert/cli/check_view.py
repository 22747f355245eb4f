"""How the diagnosis before a run is shown, and the tables of --parity, --profile and --try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert.cli.display import Sheet, show_bars, show_sheet
from expert.cli.run_view import say
from expert.core.text import duration, gib, loss

if TYPE_CHECKING:
    from rich.console import Console

    from expert.insight.findings.finding import Finding
    from expert.jobs.diagnose.check import Check
    from expert.jobs.diagnose.kernel_trials import Tried as TriedKernel
    from expert.jobs.diagnose.one_step import Measured, Tried
    from expert.jobs.diagnose.parity import Parity
    from expert.jobs.diagnose.profile import Profile

MARKS = {"error": "✗ error", "warning": "! warning", "note": "· note", "good": "✓ good"}
STATES = {"equal": "✓ equal", "differs": "✗ differs", "left out": "· left out"}
SHOWN_KERNELS = 15
LONGEST_NAME = 70


def show_check(found: Check, console: Console, *, everything: bool = False) -> None:
    """Kernels, then findings, the worst first, and one sentence at the end."""
    if found.trials.tried:
        show_trials(found.trials.tried, found.trials.device, console)
    say(console, "")
    show_findings(found.findings, console)
    say(console, "")
    say(console, *_summary(found))


def show_trials(tried: Sequence[TriedKernel], device: str, console: Console) -> None:
    """One line for every kernel."""
    marks = {"works": "✓", "absent": "·", "not tried": "·"}
    rows = []
    for each in tried:
        off = ""
        if each.off_by is not None and each.tolerance is not None:
            off = f"{each.off_by:.1e} of {each.tolerance:.0e}"
        took = f"{each.seconds * 1000:.1f} ms" if each.seconds is not None else ""
        mark = marks.get(each.state, "✗")
        rows.append((f"{mark} {each.name}", each.state, off, took, each.because))
    columns = ("kernel", "state", "off by, of what is allowed", "once", "because")
    where = "the card" if device == "cuda" else "the CPU"
    title = f"kernels run on {where}, forward and backward, against float32"
    show_sheet(Sheet(columns, [rows], title, dim=("once",)), console)


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """What was found, what it means, and what mends it."""
    rows = []
    for each in findings:
        what = "\n".join(part for part in (each.title, each.evidence) if part)
        gain = f" (up to {each.gain:.2g}×)" if each.gain and each.fix else ""
        rows.append((MARKS[each.severity], each.name, what, each.consequence, each.fix + gain))
    columns = ("", "name", "what was found", "what it means", "what mends it")
    show_sheet(Sheet(columns, [rows], dim=("name",)), console)


def _summary(found: Check) -> tuple[str, str]:
    count = dict.fromkeys(MARKS, 0)
    for finding in found.findings:
        count[finding.severity] += 1
    if count["error"]:
        words = "1 error: a run" if count["error"] == 1 else f"{count['error']} errors: a run"
        return f"✗ {words} would not start on {found.target}", "bold red"
    if count["warning"]:
        words = "1 warning" if count["warning"] == 1 else f"{count['warning']} warnings"
        return f"! {words}; a run would start on {found.target}", "bold yellow"
    return f"✓ nothing is in the way of a run on {found.target}", "bold green"


def show_parity(found: Parity, console: Console) -> None:
    """Every claim with its differences and tolerances."""
    rows = []
    for each in found.compared:
        rows.append(
            (
                STATES[each.state],
                each.claim,
                _off(each.loss, each.loss_tolerance),
                _off(each.gradient, each.gradient_tolerance),
                each.because,
            )
        )
    title = (
        f"{found.model} on {found.device}: {found.sequences} sequences, {found.targets} targets, "
        "after one update"
    )
    columns = ("", "claim", "loss off by (allowed)", "gradient off by (allowed)", "tolerance")
    show_sheet(Sheet(columns, [rows], title, dim=("tolerance",)), console)
    wrong = [each.claim for each in found.compared if each.state == "differs"]
    if wrong:
        say(console, f"✗ does not hold: {'; '.join(wrong)}", "bold red")
    else:
        say(console, "✓ the fast paths compute what the plain ones do", "bold green")


def _off(value: float | None, allowed: float | None) -> str:
    if value is None or allowed is None:
        return ""
    return f"{value:.1e} ({allowed:.0e})"


def show_profile(found: Profile, console: Console) -> None:
    """Purposes as bars, then the kernels that took most."""
    each = found.seconds / max(1, found.updates)
    say(
        console, f"{found.updates} settled updates on {found.device}, {duration(each)} each", "bold"
    )
    ran = sum(found.purposes.values())
    bars = [
        (name, seconds, f"{seconds / max(1, found.updates) * 1000:.1f} ms  {seconds / ran:.0%}")
        for name, seconds in found.purposes.items()
    ]
    show_bars(bars, ran, console)
    what = "kernels" if found.on_gpu else "operators"
    say(
        console,
        f"  {what} ran {found.busy:.0%} of the time; {found.gaps} gaps of more than 20 µs, "
        f"{duration(found.gap_seconds)} in all, the longest {found.longest_gap_seconds * 1e3:.1f} "
        "ms",
    )
    rows = []
    for kernel in found.kernels[:SHOWN_KERNELS]:
        name = kernel.name if len(kernel.name) <= LONGEST_NAME else f"{kernel.name[:67]}..."
        time = f"{kernel.seconds / max(1, found.updates) * 1000:.2f} ms"
        share = f"{kernel.seconds / ran:.1%}" if ran else ""
        calls = f"{kernel.calls / max(1, found.updates):.0f}"
        rows.append((name, kernel.purpose, time, share, calls))
    columns = (what[:-1], "purpose", "an update", "share", "calls an update")
    show_sheet(Sheet(columns, [rows]), console)
    say(console, f"the whole trace: {found.trace}  (open it at https://ui.perfetto.dev)")


def show_tried(found: Tried, console: Console) -> None:
    """Before and after, side by side."""
    columns = (_MEASURED, _measured(found.before), _measured(found.after))
    rows = list(zip(*columns, strict=True))
    title = f"{found.title}: {' '.join(f'--set {each}' for each in found.overrides)}"
    show_sheet(Sheet(("", "before", "after"), [rows], title), console)
    if found.gain is None:
        return
    words = f"{found.gain:.2f}× as many tokens a second, measured on {found.device}"
    if not found.certain:
        say(console, f"{words}: no more than the updates differ among themselves", "bold yellow")
    else:
        say(console, words, "bold green" if found.gain > 1 else "bold yellow")


_MEASURED = (
    "tokens a second",
    "spread of the updates",
    "an update",
    "waiting for data",
    "GPU use",
    "memory",
    "updates measured",
    "rows in them",
    "mean loss",
    "fell back",
)


def _measured(run: Measured) -> tuple[str, ...]:
    return (
        _number(run.tokens_per_second),
        _share(run.spread),
        f"{(run.seconds_an_update or 0) * 1000:.1f} ms",
        _share(run.data_wait),
        "–" if run.gpu_utilization is None else f"{run.gpu_utilization:.0f} %",
        _memory(run),
        f"{run.updates}",
        f"{run.examples:,}",
        "–" if run.loss is None else loss(run.loss),
        "; ".join(run.fallbacks) or "no",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _memory(run: Measured) -> str:
    return "–" if run.peak_reserved_bytes is None else gib(run.peak_reserved_bytes)
