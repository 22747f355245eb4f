"""The job behind `expert train`: from a manifest to a run folder with a trained expert."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.core.rundir import RunFolder
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.planning.situation import Kept
    from expert.run.feed import RunData
    from expert.run.prepare import Tell
    from expert.run.session.finish import RunResult
    from expert.run.session.session import Evaluating


def train(
    manifest: str | Path | ReadManifest,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    vram: str | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    allow_remote_code: bool = False,
    sinks: Sequence[Sink] = (),
    tell: Tell = lambda name, rows, tokens: None,
    acknowledge: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda done: None,
    evaluating: Evaluating = lambda split, rows, total: None,
) -> RunResult:
    """Train what a manifest describes. `resume`: "auto", a checkpoint or a folder that means a run.

    `acknowledge` is called from the handler of the first signal that asks for an end, `progress`
    after every step that was launched, `evaluating` after every batch of an evaluation; none of
    them may take long.
    """
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.run.open import planned_and_open, stream_of
    from expert.run.session.execute import run_session
    from expert.run.session.run_rate import remember_run
    from expert.run.session.session import Callbacks, Start, open_session
    from expert.run.session.session import resume as resume_from
    from expert.run.smollm2 import provide_model
    from expert.run.stored.locate import runs_folder

    began = time.monotonic()
    read = manifest
    if not isinstance(read, ReadManifest):
        read = read_manifest(read, overrides=overrides)
    if resume in (None, "auto"):
        runs_folder(read)  # refused before an hour of preparing
    provide_model(read, model)
    kept = kept_by_run(read, resume, model=model, vram=vram)
    plan, data, builder = planned_and_open(
        read,
        tell,
        model=model,
        vram=vram,
        kept=kept,
        own_indexes=partial(_own_indexes, read, resume),
    )
    if resume is not None and not allow_changed:
        over = _over_before(plan, read, data, resume)
        if over is not None:
            return over
    folder, checkpoint = _run_folder(plan, resume)
    # --- opened: from here on it runs -----------------------------------------------------------
    opened = open_session(
        folder=folder,
        plan=plan,
        data=data,
        manifest=read.manifest,
        sinks=tuple(sinks),
        start=Start(
            source=read.source, vram=vram, allow_remote_code=allow_remote_code, began=began
        ),
        callbacks=Callbacks(acknowledge=acknowledge, progress=progress, evaluating=evaluating),
        restream=lambda changed: stream_of(builder, changed),
    )
    with _removed_if_unused(folder), folder.locked(), opened as session:
        if checkpoint is not None:
            resume_from(session, checkpoint, allow_changed=allow_changed)
        result = run_session(session)
        if result.final is not None:
            remember_run(session)
        return result


def kept_by_run(
    read: ReadManifest, resume: str | None, *, model: str | None, vram: str | None
) -> Kept | None:
    """What the run that is to be resumed has settled; None for a new one."""
    from expert.run.plan import plan as plan_job
    from expert.run.stored.changes import kept_of

    if resume is None:
        return None
    folder, _ = _run_folder(plan_job(read, model=model, vram=vram, look=False), resume)
    return kept_of(folder, read)


def _own_indexes(read: ReadManifest, resume: str | None, plan: RunPlan) -> frozenset[str]:
    """The names of the indexes of a run that resumes as it was started."""
    from expert.run.stored.changes import changed_since
    from expert.run.stored.trained_rows import learnt_rows

    folder = _run_folder(plan, resume)[0] if resume is not None else None
    if folder is None or changed_since(folder, read.manifest):
        return frozenset()
    return learnt_rows(folder).indexes


def _over_before(plan: RunPlan, read: ReadManifest, data: RunData, resume: str) -> RunResult | None:
    """How a run ended that is to go on and has nothing left to do; None where it has."""
    from expert.run.session.finish import already_finished
    from expert.run.stored.changes import finished_before

    folder, checkpoint = _run_folder(plan, resume)
    if checkpoint != folder.checkpoints:
        return None
    end = finished_before(folder, read.manifest, data)
    if end is None:
        return None
    return already_finished(folder, end, data)


@contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take a run folder away again that nothing was written to, because its run never began."""
    try:
        yield
    except BaseException:
        folder.remove_if_unused()
        raise


def _run_folder(plan: RunPlan, resume: str | None) -> tuple[RunFolder, Path | None]:
    """A new run folder, or the one to go on with and the checkpoint in it."""
    from expert.core.rundir import RunFolder
    from expert.run.stored.locate import run_to_resume

    parent = Path(plan.watch.output_dir)
    if resume is None:
        return RunFolder.create(parent, plan.expert), None
    return run_to_resume(resume, runs=parent, expert=plan.expert)
