"""The job behind `expert plan` and `expert.plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.manifest.reader import ReadManifest
    from expert.planning.draft import Kept
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import RunPlan
    from expert.run.count import Counts


def plan(
    manifest: str | Path | ReadManifest,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    use_measurements: bool = True,
    look: bool = True,
    kept: Kept | None = None,
) -> RunPlan:
    """Settle a manifest for a card: the one named, so much memory, or this machine's own.

    `look`: count tokens that are prepared, or a sample of the rows; who opens the data next need
    not. `kept`: what a run that is resumed has settled.
    """
    return counted_plan(
        manifest,
        gpu=gpu,
        vram=vram,
        model=model,
        overrides=overrides,
        machine=machine,
        use_measurements=use_measurements,
        look=look,
        kept=kept,
    )[0]


def counted_plan(
    manifest: str | Path | ReadManifest,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    use_measurements: bool = True,
    look: bool = True,
    counts: Counts | None = None,
    kept: Kept | None = None,
) -> tuple[RunPlan, Counts | None]:
    """The plan, and what was counted for it; counts of before spare looking again.

    Where rows have been packed, their updates are those of the run.
    """
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.planning.machine.machine import describe_machine
    from expert.planning.machine.target import choose_target
    from expert.planning.plan import make_plan
    from expert.run.row_kind import are_plain_text

    read = manifest
    if not isinstance(read, ReadManifest):
        read = read_manifest(read, overrides=overrides)
    elif overrides:
        raise ValueError("overrides belong to read_manifest when a manifest has been read already")
    here = machine or describe_machine(read.folder)
    device = read.manifest.training.config.device
    target = choose_target(here, gpu=gpu, vram=vram, device=device)
    # Who does not look opens the data next, and may fetch it already.
    plain = are_plain_text(read, fetch=not look or counts is not None)

    def made(known: Counts | None) -> RunPlan:
        return make_plan(
            read.manifest,
            target,
            folder=read.folder,
            model=model,
            use_measurements=use_measurements,
            survey=known.survey if known else None,
            plain_text=plain,
            kept=kept,
        )

    if counts is not None:
        return _as_packed(made(counts), counts), counts
    plan = made(None)
    if not look:
        return plan, None
    from expert.run.count import count_rows

    counts = count_rows(read, plan)
    if counts is not None:
        plan = _as_packed(made(counts), counts)
    return _with_doubts(plan, read, model, counts), counts


def _with_doubts(
    plan: RunPlan, read: ReadManifest, model: str | None, counts: Counts | None
) -> RunPlan:
    """The plan with a warning of everything it rests on that is not there, or tells too little."""
    from expert.planning.decisions import Remark
    from expert.run.places import doubts_about

    doubts = [*doubts_about(read, model=model), *(counts.doubts if counts else ())]
    told = [Remark(kind="warning", path=doubt.path, text=doubt.text) for doubt in doubts]
    return plan.model_copy(update={"remarks": (*plan.remarks, *told)})


def _as_packed(plan: RunPlan, counts: Counts) -> RunPlan:
    """The plan with the updates that the packed rows make; the same numbers as the run's own."""
    from expert.run.feed import data_order, settled_by_data

    if counts.packed is None:
        return plan
    return settled_by_data(plan, data_order(plan, counts.packed), counts.packed)
