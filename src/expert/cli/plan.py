"""`expert plan`, and how a plan is shown: decisions, memory, time, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.show import options
from expert.cli.show.display import Sheet, make_console, show, show_bars, show_sheet, write_json
from expert.core.errors import EXIT_DOES_NOT_FIT, ExpertError
from expert.core.text import counted, duration_range, epochs_in_words, gib, value_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from expert.manifest.reader import ReadManifest
    from expert.manifest.text.item import Notice
    from expert.planning.decisions import Decision, Remark
    from expert.planning.run_plan import RunPlan

# Shown elsewhere (memory as bars) or too large for a cell.
_SHOWN_ELSEWHERE = {"memory.parts", "memory.workload", "decoding", "data.dataset"}
_DECISIVE = (
    *("model.quantization", "parallel.engine", "kernels.checkpointing", "batch.micro_batch"),
    *("kernels.precision", "kernels.attention", "data.max_seq_length"),
)
"""Decisions that decide on memory and time, the most important first."""
_REMARKED = {"superseded": "overruled key", "advice": "hint"}
_COUNTED = {
    "read as": "{} read under another name",
    "not used here": "{} not used",
    "note": "{} noted",
}
WIDTH = 80
LINES = 15
"""Of a plan on one screen."""
_REMARKS = {"warning": "bold yellow", "advice": "cyan", "superseded": "dim"}
_NOTICES = {"warning": "bold yellow", "not used here": "cyan", "read as": "", "note": "dim"}
_SAME_FOR_EVERY_CARD = (
    *("training.dataset.", "base_models[", "training.config.max_seq_length", "parallel.ranks"),
)
_MULTI_GPU_KEYS = ("parallel.engine", "parallel.shard_ranks", "parallel.offload")
_COMPARED_KEYS = (
    *("model.quantization", "kernels.precision", "kernels.attention", "kernels.compile"),
    *("kernels.checkpointing", "kernels.recomputed_blocks", "optim.optimizer"),
    *("batch.examples_per_update", "batch.sequences_per_update", "batch.micro_batch"),
    *("batch.accumulation", "batch.eval_batch", "memory.peak_bytes", "memory.budget_bytes"),
    *("memory.fits", "length.total_steps", "length.expected_seconds"),
)


def plan(
    file: options.ManifestFile = None,
    manifest: Annotated[Path | None, options.manifest_option("The manifest to plan")] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="Plan for this card; repeat it to compare cards side by side."),
    ] = None,
    vram: Annotated[str | None, typer.Option(help='GPU memory, such as "16GB".')] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="N|all", help="Plan for this many GPUs per machine.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines, each with --gpus.")] = None,
    model: options.BaseModelName = None,
    overrides: options.Overrides = None,
    strict: options.Strict = False,
    full: Annotated[
        bool, typer.Option("--full", "--all", help="Show every setting and its reason and memory.")
    ] = False,
    as_json: Annotated[bool, options.json_option("Print the plan as JSON.")] = False,
) -> None:
    """Show what a run would do: settings, memory, time, and why."""
    from expert.manifest.reader import read_manifest
    from expert.planning.machine.machine import describe_machine
    from expert.run.open import plan as plan_job

    chosen = options.one_manifest(file, manifest)
    if chosen is None:
        raise typer.BadParameter("give a manifest: expert plan FILE")
    read = read_manifest(chosen, overrides=overrides or (), strict=strict)
    here = describe_machine(read.folder)
    ranks, machines = ranks_and_machines(gpus, nodes, cards_here=len(here.gpus))
    cards: list[str | None] = [*gpu] if gpu else [None]
    how: dict[str, Any] = {"vram": vram, "model": model, "ranks": ranks, "nodes": machines}
    plans = [plan_job(read, gpu=card, machine=here, **how) for card in cards]
    console = make_console()
    if as_json:
        found = [one.model_dump(mode="json") for one in plans]
        write_json(found[0] if len(found) == 1 else found)
    elif len(plans) == 1:
        show_plan(plans[0], console, full=full)
        if full:
            show_every_notice(read.notices, console)
        else:
            show_notices(read, console, shown_by="--full")
    else:
        _show_side_by_side(plans, console)
    if not all(one.fits for one in plans):
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def ranks_and_machines(gpus: str | None, nodes: int | None, *, cards_here: int) -> tuple[int, int]:
    """Number of ranks on all machines, and of machines."""
    count, machines = 1, 1 if nodes is None else nodes
    if gpus == "all" and not cards_here:
        raise ExpertError("--gpus all: no GPU here  (give a number, and a card with --gpu)")
    if gpus == "all":
        count = cards_here
    elif gpus is not None:
        if not gpus.strip().isdecimal() or not int(gpus):
            raise ExpertError(f"--gpus {gpus}: expected all or a number of GPUs")
        count = int(gpus)
    if gpus is None and nodes is not None:
        raise ExpertError(f"--nodes {nodes}: how many GPUs has each machine?  (add --gpus)")
    if machines < 1:
        raise ExpertError(f"--nodes {nodes}: a run needs at least one machine")
    return count * machines, machines


def show_every_notice(notices: Iterable[Notice], console: Console) -> None:
    for notice in notices:
        show(console, f"  {notice}", _NOTICES[notice.kind])


def show_notices(read: ReadManifest, console: Console, *, shown_by: str) -> None:
    """The manifest's warnings, and how many other notices there are; warnings of the plan are
    events of the run."""
    show_warnings(read, console)
    kinds = Counter(notice.kind for notice in read.notices if notice.kind != "warning")
    if kinds:
        counts = ", ".join(_COUNTED[kind].format(counted(n, "key")) for kind, n in kinds.items())
        show(console, f"{counts}: {shown_by} shows them", "dim")


def show_warnings(read: ReadManifest, console: Console) -> None:
    """The manifest's warnings, its file once; warnings of the plan are events of the run."""
    source = f"{read.source}: "
    for notice in read.notices:
        if notice.kind == "warning":
            show(console, f"warning: {source}{notice.where}: {notice.text}", "yellow")
            source = ""


def show_plan(plan: RunPlan, console: Console, *, full: bool) -> None:
    """Whether it fits, the warnings, the time and what was chosen; `full`: every decision too.

    Otherwise it takes LINES: the room that warnings leave is that of decisions, and warnings
    without room are counted. A run prints every one of them.
    """
    facts = [line for text in _run_in_words(plan) for line in wrap(text, WIDTH)]
    facts[:0] = wrap(time_in_words(plan), WIDTH)
    room = LINES - len(facts) - 3  # the verdict, the line about --full, and one for the manifest's
    # What would fit comes first: it is the answer to the verdict.
    texts = sorted(plan.warnings, key=lambda text: not text.startswith("memory.fits"))
    warnings = [f"warning: {text}" for text in texts]
    if not full:
        while sum(len(wrap(text, WIDTH)) for text in warnings) > room and len(warnings) > 1:
            warnings.pop()
        room -= sum(len(wrap(text, WIDTH)) for text in warnings)
    _show_verdict(plan, console)
    for text in warnings:
        show(console, text, _REMARKS["warning"])
    show(console, facts[0], "bold")
    for line in facts[1:]:
        show(console, line)
    if full:
        _show_decisions(plan, console)
        return
    decided = {each.path: each for each in plan.decisions}
    found = [decided[path] for path in _DECISIVE if path in decided]
    chosen = [each for each in found if each.value not in (None, "none", "single", False)]
    for decision in chosen[: max(0, min(3, room))]:
        text = f"  {decision.path}: {_value(decision)}: {decision.because}"
        show(console, shorten(text.strip(), WIDTH, placeholder=" …"))
    rest = Counter[str](remark.kind for remark in plan.remarks if not _is_warning(remark))
    more = [counted(rest[kind], what) for kind, what in _REMARKED.items() if rest[kind]]
    hidden = len(plan.warnings) - len(warnings)
    more[:0] = [f"{hidden} more {'warning' if hidden == 1 else 'warnings'}"] if hidden else []
    show(console, f"{', '.join(['every setting and its reason', *more])}: --full", "dim")


def _run_in_words(plan: RunPlan) -> list[str]:
    """What is trained and for how long, and how the card computes it."""
    length, batch, kernels, adapter = plan.length, plan.batch, plan.kernels, plan.adapter
    rank = f" of rank {adapter.rank}" if adapter.rank else ""
    base = "" if plan.model.quantization == "none" else f", base in {plan.model.quantization}"
    trained = f"{plan.expert}: {plan.model.name}, {adapter.type}{rank}{base}"
    steps = "steps unknown" if length.total_steps is None else counted(length.total_steps, "step")
    size = counted(batch.examples_per_update, "row")
    rows = "" if length.rows is None else f" ({counted(length.rows, 'row')} an epoch)"
    passes = f"{batch.micro_batch} × {batch.accumulation or '?'}"
    used = [kernels.precision, f"{kernels.attention} attention", f"micro-batch {passes}"]
    used += [f"{kernels.checkpointing} checkpointing"] if kernels.checkpointing != "none" else []
    watch = plan.watch
    every = watch.eval_every_epochs
    often = "every epoch" if every == 1 else f"every {every} epochs"
    if watch.evaluation_strategy == "steps":
        often = f"every {counted(watch.eval_steps, 'step')}" if watch.eval_steps else "at the end"
    limit = f", at most {counted(watch.eval_rows, 'row')}" if watch.eval_rows else ""
    evaluated = [f"evaluated {often}{limit}"] if watch.evaluation_strategy != "no" else []
    parallel = plan.parallel
    how = f"{parallel.engine}, offloaded" if parallel.offload else parallel.engine
    shared = [f"{how} on {cards_in_words(plan)}"] if parallel.engine != "single" else []
    return [
        f"{trained}, length {plan.data.max_seq_length:,}",
        f"{steps} of {size}, {epochs_in_words(length.epochs, length.epochs_reached)}{rows}",
        *evaluated,
        f"chosen: {', '.join(used)}",
        *shared,
    ]


def _show_decisions(plan: RunPlan, console: Console) -> None:
    rows = [d for d in plan.decisions if d.path not in _SHOWN_ELSEWHERE]
    order = {name: place for place, name in enumerate(type(plan).model_fields)}
    rows.sort(key=lambda decision: order[decision.path.split(".")[0]])
    sections: dict[str, list[Sequence[str]]] = {}
    for one in rows:
        row = (one.path, _value(one), one.because.removeprefix("unknown: "), one.source)
        sections.setdefault(one.path.split(".")[0], []).append(row)
    columns = ("key", "value", "because", "source")
    title = f"{plan.expert} on {cards_in_words(plan)}"
    show_sheet(Sheet(columns, list(sections.values()), title, dim=("source",)), console)
    parts, budget = plan.memory.parts, plan.memory.budget_bytes
    if parts is not None:
        bars = [(name.replace("_", " "), size, gib(size)) for name, size in parts.items() if size]
        bars.append(("total", plan.memory.peak_bytes or 0, gib(plan.memory.peak_bytes or 0)))
        each = " on each card" if plan.parallel.ranks > 1 else ""
        show(console, f"\npeak memory of a step{each}, of {gib(budget)}", "bold")
        show_bars(bars, budget, console)
    for remark in plan.remarks:
        if not _is_warning(remark):
            show(console, f"{remark.kind}: {remark.path}: {remark.text}", _REMARKS[remark.kind])


def cards_in_words(plan: RunPlan) -> str:
    """`GeForce RTX 4090`, `4 × GeForce RTX 4090`, `2 machines with 4 × GeForce RTX 4090 each`."""
    parallel, name = plan.parallel, plan.target
    if parallel.ranks == 1:
        return name
    many = f"{parallel.ranks // parallel.nodes} × {name}"
    return many if parallel.nodes == 1 else f"{parallel.nodes} machines with {many} each"


def _value(decision: Decision) -> str:
    if decision.value is None and decision.because.startswith("unknown"):
        return "unknown"
    return value_in_words(decision.path, decision.value)


def _because(plan: RunPlan, path: str) -> str:
    return next((each.because for each in plan.decisions if each.path == path), "")


def time_in_words(plan: RunPlan) -> str:
    """`expected time: 12 to 20 min on RTX 4090, estimated`, or why it is unknown."""
    because = _because(plan, "length.expected_seconds")
    if plan.length.expected_seconds is None:
        return f"expected time: {because or 'unknown'}"
    expected = duration_range(*plan.length.expected_seconds)
    return f"expected time: {expected} on {cards_in_words(plan)}, {because}"


def _is_warning(remark: Remark) -> bool:
    """Whether it is shown at the start of every run."""
    return remark.kind == "warning" or remark.path == "length.max_steps"


def _show_verdict(plan: RunPlan, console: Console) -> None:
    needed, budget = gib(plan.memory.peak_bytes or 0), gib(plan.memory.budget_bytes)
    ranks = plan.parallel.ranks
    where = f"each of {ranks} × {plan.target}" if ranks > 1 else plan.target
    if plan.memory.fits is None:
        show(console, f"whether it fits is {_because(plan, 'memory.fits')}", "bold yellow")
    elif plan.memory.fits:
        show(console, f"✓ fits: {needed} of {budget} on {where}", "bold green")
    else:
        show(console, f"✗ does not fit: needs {needed} of {budget} on {where}", "bold red")


def _show_side_by_side(plans: Sequence[RunPlan], console: Console) -> None:
    """Several cards next to each other: only what differs between them."""
    decided = [{d.path: _value(d) for d in plan.decisions} for plan in plans]
    paths = (*_COMPARED_KEYS, *(() if plans[0].parallel.ranks == 1 else _MULTI_GPU_KEYS))
    rows = [[path, *(values[path] for values in decided)] for path in paths]
    ranks = plans[0].parallel.ranks
    columns = ("key", *(f"{ranks} × {p.target}" if ranks > 1 else p.target for p in plans))
    show_sheet(Sheet(columns, [rows], plans[0].expert), console)
    for plan in plans:
        if not plan.fits:
            _show_verdict(plan, console)
            for text in plan.warnings:
                show(console, f"warning: {text}", _REMARKS["warning"])
    if all(plan.fits for plan in plans):
        for remark in plans[0].remarks:
            if remark.kind == "warning" and remark.path.startswith(_SAME_FOR_EVERY_CARD):
                show(console, f"warning: {remark.path}: {remark.text}", _REMARKS["warning"])
