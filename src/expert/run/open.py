"""What a run begins with: the plan as it is once the rows are counted, and the rows, prepared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from expert.core.errors import ManifestError, Problem

if TYPE_CHECKING:
    from expert.data.feed.streaming import Stream
    from expert.manifest.reader import ReadManifest
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import RunPlan
    from expert.planning.situation import Kept
    from expert.run.count import Counts
    from expert.run.feed import RunData
    from expert.run.prepare import Builder, Tell

OwnIndexes = Callable[["RunPlan"], frozenset[str]]
"""Names of the indexes of the run that a plan is to resume."""
NEEDS_AN_END = ("linear", "cosine", "cosine_with_restarts", "polynomial")


def planned_and_open(
    read: ReadManifest,
    tell: Tell,
    *,
    model: str | None = None,
    vram: str | None = None,
    machine: Machine | None = None,
    kept: Kept | None = None,
    own_indexes: OwnIndexes = lambda plan: frozenset(),
) -> tuple[RunPlan, RunData, Builder]:
    """The plan that a run of this manifest begins with, and its data, prepared; packed as it was
    for a run that resumes, whose indexes `own_indexes` names. `kept`: what such a run has
    settled."""
    from expert.planning.machine.machine import describe_machine
    from expert.run.plan import counted_plan

    here = machine or describe_machine(read.folder)
    plan_with = partial(counted_plan, read, model=model, vram=vram, machine=here, kept=kept)
    first = plan_with(look=False)[0]
    plan, data, builder = open_data(
        first,
        read,
        tell,
        again=lambda counts: plan_with(counts=counts)[0],
        own_indexes=own_indexes(first),
    )
    return with_an_end(plan), data, builder


def open_data(
    plan: RunPlan,
    read: ReadManifest,
    tell: Tell,
    *,
    again: Callable[[Counts], RunPlan] | None = None,
    own_indexes: frozenset[str] = frozenset(),
) -> tuple[RunPlan, RunData, Builder]:
    """Prepare the data where that is still to do, and settle the plan's counts by it.

    `again` makes the plan once more when the rows are counted: whether compiling pays and how much
    must be recomputed depends on them, and before that their tokens are guessed from bytes and
    every sequence may be as long as the longest allowed. Without it only counts change.
    """
    from expert.planning.memory.calibration import estimated_again
    from expert.run.count import counts_of
    from expert.run.feed import (
        RunData,
        data_order,
        late_rows,
        settled_by_data,
        settled_by_stream,
    )
    from expert.run.left_out import doubts_of_stream
    from expert.run.prepare import Builder
    from expert.run.session.memory_watch import known_calibrations
    from expert.run.token_folders import named_sources

    spec = read.manifest.training.dataset
    builder = Builder(plan, read, named_sources(read), tell, own_indexes=own_indexes)
    soft = bool(plan.adapter.soft_prompts)
    if spec.streaming:
        validation, test = builder.held_out()
        stream = builder.stream()
        data = RunData(
            train=None,
            order=None,
            stream=stream,
            validation=validation,
            test=test,
            encoder=builder.encoder,
            soft=soft,
            columns=builder.columns_read(),
            doubts=(
                *(doubt.text for doubt in builder.doubts_about_columns()),
                *doubts_of_stream(plan, stream, validation, test),
            ),
        )
        return settled_by_stream(plan, stream.shape.bins_per_update), data, builder
    made = builder.build()
    if again is not None:
        plan = builder.plan = again(counts_of(builder, made.train))
    order = data_order(plan, made.train)
    data = RunData(
        train=made.train,
        order=order,
        stream=None,
        validation=made.validation,
        test=made.test,
        encoder=made.encoder,
        soft=soft,
        late=late_rows(builder, made.train) if plan.data.tokenize == "late" else None,
        columns=made.columns,
        doubts=tuple(doubt.text for doubt in made.doubts),
    )
    plan = settled_by_data(plan, order, made.train)
    return estimated_again(plan, known_calibrations(plan.target)), data, builder


def stream_of(builder: Builder, plan: RunPlan) -> Stream:
    """The stream once more, with the workers of another plan."""
    builder.plan = plan
    return builder.stream()


def with_an_end(plan: RunPlan) -> RunPlan:
    """The plan with a schedule that can be followed where nobody knows the last update.

    A constant rate takes the place of one that nobody asked for; one that was asked for is not
    changed, and needs max_steps.
    """
    optim, sources = plan.optim, {d.path: d.source for d in plan.decisions}
    if plan.length.total_steps is not None:
        return plan
    asked = [
        f"training.config.{name}"
        for name, path, needs in (
            ("lr_scheduler", "optim.scheduler", optim.scheduler in NEEDS_AN_END),
            ("warmup_ratio", "optim.warmup_ratio", optim.warmup_ratio is not None),
        )
        if needs and sources.get(path) == "manifest"
    ]
    if asked:
        raise ManifestError(
            plan.expert,
            [
                Problem(path, "needs to know the last update, and a stream has none", fix)
                for path in asked
                for fix in ["set training.config.max_steps"]
            ],
        )
    values: dict[str, Any] = {}
    if optim.scheduler in NEEDS_AN_END:
        values |= {"optim.scheduler": "constant", "optim.scheduler_options": {}}
    if optim.warmup_ratio is not None:
        values |= {"optim.warmup_ratio": None}
    because = "the number of updates is not known; max_steps would tell it"
    return plan.with_values(values, because, "machine") if values else plan
