"""Opens a manifest once: one look at the machine, one search for its rows, one count, one plan.
Everything that plans, prepares, trains or measures calls `open_run` and passes on its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.errors import ExpertError, ManifestError, Problem
from expert.manifest.reader import ReadManifest, read_manifest
from expert.planning.choose.recipe import NEEDS_END
from expert.planning.decisions import Remark
from expert.planning.machine.target import Target, choose_target
from expert.planning.models.resolve import resolve_model
from expert.planning.plan import choose_model, make_plan
from expert.planning.survey import Survey
from expert.run.missing import find_missing
from expert.run.stored.changes import kept_of
from expert.run.stored.locate import run_to_resume, runs_folder

if TYPE_CHECKING:
    from expert.core.rundir import RunFolder
    from expert.data.feed.run_data import RunData
    from expert.data.named_sources import NamedSources
    from expert.data.pipeline import DataPipeline, Tell
    from expert.data.prepared import PreparedData
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import RunPlan

DataState = Literal["prepared", "counted", "unread"]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    folder: RunFolder
    checkpoint: Path
    """The checkpoint to start from, or the folder of checkpoints for the newest good one."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A manifest on a machine: the plan and everything it needs."""

    read: ReadManifest
    machine: Machine
    target: Target
    plan: RunPlan
    """Both shown and executed."""
    asked: Mapping[str, Any]
    """What else the plan was made with, as make_plan takes it."""
    sources: NamedSources | ExpertError | OSError
    """The row sources, or the error from finding them."""
    resumed: Resumed | None
    vram: str | None = None
    """The requested memory limit of the card, as written."""
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

    def plan_of(self, read: ReadManifest, survey: Survey | None) -> RunPlan:
        """The plan of a reading of the manifest for this machine, given what is known of its
        rows."""
        asked = dict(self.asked)
        if read.manifest.training.config.overlong != "auto":
            asked["plain_text"] = None
        asked["on_command_line"] = read.keys_on_command_line
        return make_plan(read.manifest, self.target, folder=read.folder, survey=survey, **asked)


def open_run(
    manifest: str | Path | ReadManifest,
    *,
    data: DataState = "prepared",
    gpu: str | None = None,
    vram: str | None = None,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    machine: Machine | None = None,
    resume: str | None = None,
    ranks: int = 1,
    nodes: int = 1,
    tell: Tell = lambda name, rows, tokens: None,
) -> Opened:
    """Open a manifest to run it (`prepared`: rows are tokenised and packed if needed), to plan it
    (`counted`: prepared rows are counted, others sampled; nothing is written), or to plan it by the
    size of its files (`unread`).

    The first plan decides how rows are prepared; the one that counts is made with their counts.
    `resume`: "auto", a checkpoint or a folder that identifies a run. `gpu`, `vram`: the card to
    plan for; `ranks`, `nodes`: processes and machines.
    """
    from expert.data.plain_text import are_plain_text
    from expert.planning.machine.machine import describe_machine

    began, read, runs = time.monotonic(), as_read(manifest, overrides), data == "prepared"
    if runs and resume in (None, "auto"):
        runs_folder(read)  # refuses a link before hours of preparing
    resumed = None
    if resume is not None:
        folder, checkpoint = run_to_resume(
            resume,
            runs=read.manifest.training.config.runs_beside(read.folder),
            expert=read.manifest.name,
        )
        folder.refuse_damaged()
        resumed = Resumed(folder=folder, checkpoint=checkpoint)
    here = machine or describe_machine(read.folder)
    device = read.manifest.training.config.device
    cards = ranks // nodes if nodes > 0 else ranks
    target = choose_target(here, gpu=gpu, vram=vram, device=device, cards=cards)
    fetch, plain_text = data != "counted", None
    sources = _sources(read, fetch=fetch)
    if read.manifest.training.config.overlong == "auto" and not isinstance(sources, Exception):
        plain_text = are_plain_text(read.manifest.training.dataset, sources, fetch=fetch)
    asked: dict[str, Any] = {
        "model": model,
        "ranks": ranks,
        "nodes": nodes,
        "kept": kept_of(resumed.folder, read) if resumed else None,
        "on_command_line": read.keys_on_command_line,
        "plain_text": plain_text,
    }
    opened = Opened(
        read=read,
        machine=here,
        target=target,
        plan=make_plan(read.manifest, target, folder=read.folder, **asked),
        asked=asked,
        sources=sources,
        resumed=resumed,
        vram=vram,
        began=began,
    )
    if runs:
        refuse_missing_gpu(opened)
        return _with_data(opened, tell)
    return _counted(opened, model) if data == "counted" else opened


def open_planned(plan: RunPlan, read: ReadManifest, machine: Machine) -> Opened:
    """Open the data of an existing plan; nothing is chosen or counted again."""
    from expert.data.feed.run_data import run_data
    from expert.data.pipeline import open_pipeline

    sources = _sources(read, fetch=True)
    opened = Opened(
        read=read,
        machine=machine,
        target=choose_target(machine, device=plan.kernels.device),
        plan=plan,
        asked={},
        sources=sources,
        resumed=None,
        began=time.monotonic(),
    )
    line = open_pipeline(plan, read, opened.named, tell=lambda name, rows, tokens: None)
    return replace(opened, line=line, run_data=run_data(line, _prepared(line)))


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
    asked: Any = {"gpu": gpu, "vram": vram, "model": model, "machine": machine}
    asked |= {"overrides": overrides, "ranks": ranks, "nodes": nodes}
    return open_run(manifest, data="counted", **asked).plan


def prepare(
    manifest: str | Path | ReadManifest,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    tell: Tell = lambda name, rows, tokens: None,
) -> PreparedData:
    """Tokenise and pack the rows of a manifest; a second call finds them done."""
    from expert.data.pipeline import open_pipeline
    from expert.data.splits import NothingToPrepare

    read = as_read(manifest, overrides)
    if read.manifest.training.dataset.streaming:
        what = "its rows are tokenised while training, there is nothing to prepare"
        fix = "set streaming: false to prepare them once"
        raise NothingToPrepare(f"training.dataset.streaming is true: {what}  ({fix})")
    opened = open_run(read, data="unread", model=model)
    prepared = _prepared(open_pipeline(opened.plan, read, opened.named, tell=tell))
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
        fix = "use --device cpu or auto; expert machine shows why"
        raise ExpertError(f"device is cuda, but no GPU was found  ({fix})")


# --- the rows ------------------------------------------------------------------------------------


def _sources(read: ReadManifest, *, fetch: bool) -> NamedSources | ExpertError | OSError:
    from expert.data.named_sources import named_sources

    try:
        return named_sources(read, fetch=fetch)
    except (ExpertError, OSError) as error:
        return error


def _counted(opened: Opened, model: str | None) -> Opened:
    """Opened to plan: add what is known about the rows without preparing them."""
    from expert.data.count import count_rows

    plan, counts = opened.plan, None
    if not isinstance(opened.sources, Exception):
        counts = count_rows(opened.read, plan, opened.sources)
    if counts is not None:
        plan = opened.plan_of(opened.read, counts.survey)
    absent, _ = find_missing(opened.read, model=model)
    about_rows = counts.remarks if counts is not None else ()
    remarks: tuple[Remark, ...] = (*plan.remarks, *absent, *about_rows)
    plan = plan.model_copy(update={"remarks": remarks})
    return replace(opened, plan=plan)


def _with_data(opened: Opened, tell: Tell) -> Opened:
    """Opened to run: prepare the rows if needed, and plan by their counts."""
    from expert.data.count import counts_of
    from expert.data.feed.run_data import run_data
    from expert.data.pipeline import open_pipeline

    read = opened.read
    line = open_pipeline(opened.plan, read, opened.named, tell=tell)
    prepared = _prepared(line)
    if prepared is not None:
        survey = counts_of(line, prepared).survey
        line = replace(line, plan=opened.plan_of(read, survey))
    data = run_data(line, prepared)
    if data.stream is not None:
        sequences = data.stream.bins_per_step
        seen = Survey(None, None, "the first rows of the stream", step_sequences=sequences)
        line = replace(line, plan=opened.plan_of(read, seen))
    endless = [remark.path for remark in line.plan.remarks if remark.text == NEEDS_END]
    if endless:
        fix = "set training.config.max_steps"
        raise ManifestError(read.source, [Problem(path, NEEDS_END, fix) for path in endless])
    return replace(opened, plan=line.plan, line=line, run_data=data)


def _prepared(line: DataPipeline) -> PreparedData | None:
    """The rows tokenised and packed; None if they are streamed."""
    from expert.data.splits import disk_space_for, prepare_splits

    if line.spec.streaming:
        return None
    with disk_space_for(line):
        prepared = prepare_splits(line)
    assert prepared is not None
    return prepared
