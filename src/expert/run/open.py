"""Opens a manifest once: one look at the machine, one search for its rows, one count, one plan.
Everything that plans, prepares, trains or measures calls `open_run` and passes on its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError
from expert.manifest.reader import ReadManifest, read_manifest
from expert.planning.decisions import Remark
from expert.planning.machine.target import Target, choose_target
from expert.planning.memory.calibration import with_new_estimate
from expert.planning.models.resolve import resolve_model
from expert.planning.plan import choose_model, make_plan
from expert.planning.settle import with_counted_rows, with_endless_schedule, with_stream_rows
from expert.run.missing import find_missing
from expert.run.session.memory_watch import known_calibrations
from expert.run.stored.changes import kept_of
from expert.run.stored.locate import run_to_resume, runs_folder

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.data.count import Counts
    from expert.data.feed.run_data import RunData
    from expert.data.feed.streaming import Stream
    from expert.data.named_sources import NamedSources
    from expert.data.pipeline import DataPipeline, Tell
    from expert.data.prepared import PreparedData, PreparedSplit
    from expert.planning.draft import ResumedChoices
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import RunPlan
    from expert.planning.survey import Survey

DataState = Literal["prepared", "counted", "unread"]


class GpuNotFound(ExpertError):
    """`device: cuda` without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    folder: RunFolder
    checkpoint: Path
    """The checkpoint to start from, or the folder of checkpoints for the newest good one."""
    kept: ResumedChoices
    """Choices of its first machine that it keeps on another."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A manifest on a machine: the plan and everything it needs."""

    read: ReadManifest
    machine: Machine
    target: Target
    plan: RunPlan
    """Both shown and executed."""
    plan_with: Callable[[ReadManifest, Survey | None], RunPlan]
    """Plans another reading of the manifest for the same machine, model and rows."""
    sources: NamedSources | ExpertError | OSError
    """The row sources, or the error from finding them."""
    resumed: Resumed | None
    vram: str | None = None
    """The requested memory limit of the card, as written."""
    counts: Counts | None = None
    line: DataPipeline | None = None
    """Only if opened to run."""
    run_data: RunData | None = None
    began: float = 0.0
    """When the user started waiting, on the monotonic clock."""

    @property
    def named(self) -> NamedSources:
        """The row sources; raises if they could not be found."""
        if isinstance(self.sources, Exception):
            raise self.sources
        return self.sources

    @property
    def data(self) -> RunData:
        assert self.run_data is not None, "opened to plan, not to run"
        return self.run_data

    @property
    def warnings(self) -> tuple[str, ...]:
        """Everything the user should know before the run starts."""
        about_rows = self.run_data.doubts if self.run_data is not None else ()
        return tuple(dict.fromkeys((*self.plan.warnings, *about_rows)))

    def replanned(self, read: ReadManifest) -> RunPlan:
        """The plan for another reading of the same manifest, without counting rows again."""
        counts = self.counts
        plan = self.plan_with(read, counts.survey if counts else None)
        return as_packed(plan, counts.packed if counts else None)

    def restream(self, plan: RunPlan) -> Stream:
        """Reopen the stream with the workers of another plan."""
        from expert.data.splits import stream_of

        assert self.line is not None
        return stream_of(replace(self.line, plan=plan))


def open_run(
    manifest: str | Path | ReadManifest,
    *,
    data: DataState = "prepared",
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    use_measurements: bool = True,
    resume: str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    tell: Tell = lambda name, rows, tokens: None,
) -> Opened:
    """Open a manifest to run it (`prepared`: rows are tokenised and packed if needed), to plan it
    (`counted`: prepared rows are counted, others sampled; nothing is written), or to plan it by the
    size of its files (`unread`).

    The plan is made once, and again when the rows are counted: they decide whether compiling pays
    and how much is recomputed, while the first plan decides how rows are prepared.
    `resume`: "auto", a checkpoint or a folder that identifies a run. `gpu`, `vram`: the card to
    plan for; `ranks`, `nodes`: processes and machines.
    """
    from expert.planning.machine.machine import describe_machine

    began, read, runs = time.monotonic(), as_read(manifest, overrides), data == "prepared"
    if runs and resume in (None, "auto"):
        runs_folder(read)  # refuses a link before hours of preparing
    resumed = _resumed(read, resume) if resume is not None else None
    here = machine or describe_machine(read.folder)
    device = read.manifest.training.config.device
    cards = ranks // nodes if nodes > 0 else ranks
    target = choose_target(here, gpu=gpu, vram=vram, device=device, cards=cards)
    sources = _sources(read, fetch=data != "counted")
    plain_text = _are_plain_text(read, sources, fetch=data != "counted")

    asked: dict[str, Any] = {"model": model, "use_measurements": use_measurements}
    asked |= {"ranks": ranks, "nodes": nodes}
    plan_with = _planner(target, plain_text, resumed.kept if resumed else None, asked)
    opened = Opened(
        read=read,
        machine=here,
        target=target,
        plan=plan_with(read, None),
        plan_with=plan_with,
        sources=sources,
        resumed=resumed,
        vram=vram,
        began=began,
    )
    if runs:
        refuse_missing_gpu(opened)
        return _with_data(opened, tell, again=True)
    return _counted(opened, model) if data == "counted" else opened


def _planner(
    target: Target, plain_text: bool | None, kept: ResumedChoices | None, asked: dict[str, Any]
) -> Callable[[ReadManifest, Survey | None], RunPlan]:
    """A function that plans a reading of the manifest for this target; `asked`: for make_plan."""

    def plan_with(read: ReadManifest, survey: Survey | None) -> RunPlan:
        asks = read.manifest.training.config.overlong == "auto"
        return make_plan(
            read.manifest,
            target,
            folder=read.folder,
            survey=survey,
            plain_text=plain_text if asks else None,
            kept=kept,
            **asked,
        )

    return plan_with


def open_planned(plan: RunPlan, read: ReadManifest, machine: Machine) -> Opened:
    """Open the data of an existing plan; only its counts change."""
    opened = Opened(
        read=read,
        machine=machine,
        target=choose_target(machine, device=plan.kernels.device),
        plan=plan,
        plan_with=lambda other, survey: plan,
        sources=_sources(read, fetch=True),
        resumed=None,
        began=time.monotonic(),
    )
    return _with_data(opened, lambda name, rows, tokens: None, again=False)


def plan(
    manifest: str | Path | ReadManifest,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    ranks: int = 1,
    nodes: int = 1,
) -> RunPlan:
    """Plan a manifest for a card: the named one, one with that much memory, or this machine's;
    or for several (`ranks` on `nodes` machines).

    Prepared rows are counted, others sampled; nothing is written.
    """
    opened = open_run(
        manifest,
        data="counted",
        gpu=gpu,
        vram=vram,
        model=model,
        overrides=overrides,
        machine=machine,
        ranks=ranks,
        nodes=nodes,
    )
    return opened.plan


def prepare(
    manifest: str | Path | ReadManifest,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    tell: Tell = lambda name, rows, tokens: None,
) -> PreparedData:
    """Tokenise and pack the rows of a manifest; a second call finds them done."""
    from expert.data import splits
    from expert.data.pipeline import open_pipeline

    read = as_read(manifest, overrides)
    splits.refuse_streaming(read.manifest.training.dataset)
    opened = open_run(read, data="unread", model=model)
    line = open_pipeline(opened.plan, read, opened.named, tell=tell)
    with splits.disk_space_for(line):
        prepared = splits.prepare_splits(line)
    assert prepared is not None
    about_manifest = (Remark.warning("manifest", text) for text in read.warnings)
    return replace(prepared, doubts=(*about_manifest, *prepared.doubts))


def as_read(manifest: str | Path | ReadManifest, overrides: tuple[str, ...]) -> ReadManifest:
    """The manifest, read first if it is a file."""
    if not isinstance(manifest, ReadManifest):
        return read_manifest(manifest, overrides=overrides)
    if overrides:
        raise ValueError("overrides belong to read_manifest when a manifest has been read already")
    return manifest


def check_base(read: ReadManifest, model: str | None, *, allow_remote_code: bool) -> None:
    """Raise if a local base model cannot be built, before torch is imported and rows are
    prepared."""
    base = resolve_model(choose_model(read.manifest, model), read.folder)
    if base.place not in ("built-in", "hub"):
        from expert.model.base_folder import refuse_unknown_model_type

        refuse_unknown_model_type(Path(base.location), allow_remote_code=allow_remote_code)


def refuse_missing_gpu(opened: Opened) -> None:
    """Raise if a GPU was requested and the plan is for the CPU."""
    asked = opened.read.manifest.training.config.device
    if asked == "cuda" and opened.plan.kernels.device == "cpu":
        raise GpuNotFound(
            "device is cuda, but no GPU was found  (use --device cpu or auto; expert machine "
            "shows why)"
        )


# --- resuming ------------------------------------------------------------------------------------


def _resumed(read: ReadManifest, resume: str) -> Resumed:
    runs = read.manifest.training.config.runs_beside(read.folder)
    folder, checkpoint = run_to_resume(resume, runs=runs, expert=read.manifest.name)
    folder.refuse_damaged()
    return Resumed(
        folder=folder,
        checkpoint=checkpoint,
        kept=kept_of(folder, read),
    )


# --- the rows ------------------------------------------------------------------------------------


def _sources(read: ReadManifest, *, fetch: bool) -> NamedSources | ExpertError | OSError:
    from expert.data.named_sources import named_sources

    try:
        return named_sources(read, fetch=fetch)
    except (ExpertError, OSError) as error:
        return error


def _are_plain_text(
    read: ReadManifest, sources: NamedSources | ExpertError | OSError, *, fetch: bool
) -> bool | None:
    """Whether the rows are texts without answers; None if irrelevant or the rows are missing."""
    from expert.data.plain_text import are_plain_text

    asks = read.manifest.training.config.overlong == "auto"
    if not asks or isinstance(sources, Exception):
        return None
    return are_plain_text(read.manifest.training.dataset, sources, fetch=fetch)


def _counted(opened: Opened, model: str | None) -> Opened:
    """Opened to plan: add what is known about the rows without preparing them."""
    from expert.data.count import count_rows

    plan, counts = opened.plan, None
    if not isinstance(opened.sources, Exception):
        counts = count_rows(opened.read, plan, opened.sources)
    if counts is not None:
        plan = as_packed(opened.plan_with(opened.read, counts.survey), counts.packed)
    absent = find_missing(opened.read, model=model)
    about_rows = counts.remarks if counts is not None else ()
    remarks: tuple[Remark, ...] = (*plan.remarks, *absent.remarks, *about_rows)
    plan = plan.model_copy(update={"remarks": remarks})
    return replace(opened, plan=plan, counts=counts)


def as_packed(plan: RunPlan, train: PreparedSplit | None) -> RunPlan:
    """The plan with the step counts of the packed rows, as in the run itself."""
    from expert.data.splits import packed_counts

    if train is None:
        return plan
    return with_counted_rows(plan, packed_counts(plan, train), known_calibrations(plan.target))


def _with_data(opened: Opened, tell: Tell, *, again: bool) -> Opened:
    """Opened to run: prepare the rows if needed and settle the plan by them; `again`: plan once
    more with their counts."""
    from expert.data.count import counts_of
    from expert.data.feed.run_data import run_data
    from expert.data.pipeline import open_pipeline
    from expert.data.splits import disk_space_for, prepare_splits

    plan, read = opened.plan, opened.read
    line = open_pipeline(plan, read, opened.named, tell=tell)
    known = known_calibrations(plan.target)
    counts, prepared = None, None
    if not line.spec.streaming:
        with disk_space_for(line):
            prepared = prepare_splits(line)
        assert prepared is not None
        counts = counts_of(line, prepared.train)
        if again:
            plan = opened.plan_with(read, counts.survey)
        plan = as_packed(plan, prepared.train)
        line = replace(line, plan=plan)
    data = run_data(line, prepared)
    if data.stream is not None:
        plan = with_stream_rows(plan, data.stream.shape.bins_per_step)
    plan = with_endless_schedule(with_new_estimate(plan, known))
    return replace(opened, plan=plan, counts=counts, line=line, run_data=data)
