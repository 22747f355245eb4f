"""How a plan is shown: the decisions, the memory as bars, and what to know before starting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expert.cli.display import Sheet, show_bars, show_sheet
from expert.cli.words import gib, value_in_words
from expert.core.text import duration_range
from expert.planning.run_plan import RunPlan

if TYPE_CHECKING:
    from rich.console import Console

    from expert.planning.decisions import Decision

# Shown elsewhere (memory as bars) or too large for a cell.
_NOT_IN_THE_TABLE = {
    "length.expected_parts",
    "memory.parts",
    "memory.workload",
    "decoding",
    "data.dataset",
}
_DEFAULT = "the default"
_STYLES = {"warning": "bold yellow", "superseded": "dim", "advice": "cyan"}
_NAMED_BY_THE_MANIFEST = ("training.dataset.", "base_models[", "training.config.max_seq_length")
_SIDE_BY_SIDE = (
    "model.quantization",
    "kernels.precision",
    "kernels.attention",
    "kernels.compile",
    "kernels.checkpointing",
    "kernels.recomputed_blocks",
    "optim.optimizer",
    "batch.examples_per_update",
    "batch.sequences_per_update",
    "batch.micro_batch",
    "batch.accumulation",
    "batch.eval_batch",
    "memory.peak_bytes",
    "memory.budget_bytes",
    "memory.fits",
    "length.total_steps",
    "length.expected_seconds",
)


def show_plan(plan: RunPlan, console: Console, *, everything: bool) -> None:
    """One plan in full."""
    shown, hidden = _shown(plan, everything)
    sections: dict[str, list[Sequence[str]]] = {}
    for decision in shown:
        row = (
            decision.path,
            _value(decision),
            decision.because,
            decision.source,
        )
        sections.setdefault(decision.path.split(".")[0], []).append(row)
    title = f"{plan.expert} on {plan.target}"
    columns = ("key", "value", "because", "source")
    show_sheet(Sheet(columns, list(sections.values()), title, dim=("source",)), console)
    if hidden:
        console.print(
            f"  {hidden} more at their defaults or without meaning here: --all shows them",
            style="dim",
        )
    _show_memory(plan, console)
    show_time(plan, console)
    show_remarks(plan, console)


def _value(decision: Decision) -> str:
    if decision.value is None and decision.because.startswith("unknown"):
        return "unknown"
    return value_in_words(decision.path, decision.value)


def _matters(decision: Decision) -> bool:
    """Not a default, and not a key that means nothing for this run."""
    if decision.because.startswith("unknown"):
        return True
    return decision.because != _DEFAULT and decision.value not in (None, [], {})


def _shown(plan: RunPlan, everything: bool) -> tuple[list[Decision], int]:
    rows = [d for d in plan.decisions if d.path not in _NOT_IN_THE_TABLE]
    order = {name: place for place, name in enumerate(RunPlan.model_fields)}
    rows.sort(key=lambda decision: order[decision.path.split(".")[0]])
    shown = [d for d in rows if everything or _matters(d)]
    return shown, len(rows) - len(shown)


def _show_memory(plan: RunPlan, console: Console) -> None:
    parts, budget = plan.memory.parts, plan.memory.budget_bytes
    if parts is None:
        return
    bars = [(name.replace("_", " "), size, gib(size)) for name, size in parts.items() if size]
    bars.append(("together", plan.memory.peak_bytes or 0, gib(plan.memory.peak_bytes or 0)))
    console.print(f"\nmemory at the peak of a step, of {gib(budget)}", style="bold")
    show_bars(bars, budget, console)


def show_time(plan: RunPlan, console: Console) -> None:
    """How long the run is expected to take, and of what parts."""
    from rich.text import Text

    console.print(Text(f"\n{time_in_words(plan)}", style="bold"))
    parts = plan.length.expected_parts or {}
    told = [f"{name} {duration_range(*part)}" for name, part in parts.items() if part[1] >= 1]
    if len(told) > 1:
        console.print(f"  {', '.join(told)}", style="dim")


def time_in_words(plan: RunPlan) -> str:
    """`expected time: 12 to 20 min on RTX 4090, estimated`, or why it is not known."""
    because = next(
        (each.because for each in plan.decisions if each.path == "length.expected_seconds"), ""
    )
    if plan.length.expected_seconds is None:
        return f"expected time: {because or 'unknown'}"
    kind = "estimated" if because.startswith("estimated") else "by a rate measured here before"
    return (
        f"expected time: {duration_range(*plan.length.expected_seconds)} on {plan.target}, {kind}"
    )


def show_remarks(plan: RunPlan, console: Console) -> None:
    """Warnings first, then advice, then keys that were overruled; the verdict last."""
    from rich.text import Text

    for kind in ("warning", "advice", "superseded"):
        for remark in plan.remarks:
            if remark.kind == kind:
                line = Text(f"{kind}: ", style=_STYLES[kind])
                console.print(line.append(f"{remark.path}: {remark.text}", style=""))
    fits = plan.memory.fits
    peak, budget = plan.memory.peak_bytes or 0, plan.memory.budget_bytes
    if fits is None:
        because = next(d.because for d in plan.decisions if d.path == "memory.fits")
        console.print(Text(f"whether it fits is {because}", style="bold yellow"))
    elif fits:
        words = f"✓ fits: {gib(peak)} of {gib(budget)} on {plan.target}"
        console.print(Text(words, style="bold green"))
    else:
        words = f"✗ does not fit: {gib(peak)} needed, {gib(budget)} on {plan.target}"
        console.print(Text(words, style="bold red"))


def show_doubts(plan: RunPlan, console: Console) -> None:
    """Warnings of what the manifest names and is not there: the same for every card."""
    from rich.text import Text

    for remark in plan.remarks:
        if remark.kind == "warning" and remark.path.startswith(_NAMED_BY_THE_MANIFEST):
            line = Text("warning: ", style=_STYLES["warning"])
            console.print(line.append(f"{remark.path}: {remark.text}", style=""))


def show_side_by_side(plans: Sequence[RunPlan], console: Console) -> None:
    """Several cards beside each other: only what differs between cards matters here."""
    settled = [{d.path: _value(d) for d in plan.decisions} for plan in plans]
    rows = [[path, *(values[path] for values in settled)] for path in _SIDE_BY_SIDE]
    columns = ("key", *(plan.target for plan in plans))
    show_sheet(Sheet(columns, [rows], plans[0].expert), console)
