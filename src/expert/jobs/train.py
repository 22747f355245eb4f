"""The job behind `expert train`: from a manifest to a run folder with a trained expert.

A run heals itself: what fails is caught here, a pure function says what to try next, the change is
recorded, and the same update is taken again with the same data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import EXIT_OK
from expert.run.recover import RunFailed, failure_of, heal, recover, try_another

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.core.rundir import RunFolder
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.planning.draft import Kept
    from expert.run.feed import RunData
    from expert.run.prepare import Tell
    from expert.run.session import Evaluating, Session


__all__ = ["RunFailed", "RunResult", "train"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path
    exit_code: int
    steps: int
    loss: float | None
    """The mean over all updates."""
    eval_loss: float | None
    """The best on the validation rows; None where another metric was followed."""
    test_loss: float | None
    final: Path | None
    last_eval_loss: float | None = None
    """On the validation rows, the last time that they were looked at."""
    held_out: bool = True
    """Whether there are rows to judge it by that it has not learnt."""
    nothing_left: bool = False
    """The run was over before, as it is asked to be now: nothing was done."""


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
    after every update that was launched, `evaluating` after every batch of an evaluation; none of
    them may take long.
    """
    from expert.manifest.reader import ReadManifest, read_manifest
    from expert.run.locate import runs_folder
    from expert.run.open import planned_and_open, stream_of
    from expert.run.run_rate import remember_run
    from expert.run.session import Session
    from expert.run.smollm2 import provide_model

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
    with _removed_if_unused(folder), folder.locked():
        session = Session(
            folder=folder,
            plan=plan,
            data=data,
            manifest=read.manifest,
            source=read.source,
            sinks=tuple(sinks),
            restream=lambda changed: stream_of(builder, changed),
            allow_remote_code=allow_remote_code,
            vram=vram,
            acknowledge=acknowledge,
            progress=progress,
            evaluating=evaluating,
            began=began,
        )
        with session:
            if checkpoint is not None:
                session.resume(checkpoint, allow_changed=allow_changed)
            result = run_session(session)
            if result.final is not None:
                remember_run(session, vram=vram)
            return result


def kept_by_run(
    read: ReadManifest, resume: str | None, *, model: str | None, vram: str | None
) -> Kept | None:
    """What the run that is to be resumed has settled; None for a new one."""
    from expert.run.plan import plan as plan_job
    from expert.run.resume import kept_of

    if resume is None:
        return None
    folder, _ = _run_folder(plan_job(read, model=model, vram=vram, look=False), resume)
    return kept_of(folder, read)


def _own_indexes(read: ReadManifest, resume: str | None, plan: RunPlan) -> frozenset[str]:
    """The names of the indexes of a run that resumes as it was started."""
    from expert.run.resume import changed_since
    from expert.run.trained_rows import learnt_rows

    folder = _run_folder(plan, resume)[0] if resume is not None else None
    if folder is None or changed_since(folder, read.manifest):
        return frozenset()
    return learnt_rows(folder).indexes


def _over_before(plan: RunPlan, read: ReadManifest, data: RunData, resume: str) -> RunResult | None:
    """How a run ended that is to go on and has nothing left to do; None where it has."""
    from expert.run.resume import finished_before

    folder, checkpoint = _run_folder(plan, resume)
    if checkpoint != folder.checkpoints:
        return None
    end = finished_before(folder, read.manifest, data)
    if end is None:
        return None
    return RunResult(
        folder=folder.path,
        exit_code=EXIT_OK,
        steps=int(end.get("step") or 0),
        loss=end.get("loss"),
        eval_loss=end.get("eval_loss"),
        test_loss=end.get("test_loss"),
        final=folder.final,
        last_eval_loss=end.get("last_eval_loss"),
        held_out=_holds_out(data),
        nothing_left=True,
    )


@contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take a run folder away again that nothing was written to, because its run never began."""
    try:
        yield
    except BaseException:
        folder.remove_if_unused()
        raise


def _tell_of_data(session: Session, data: RunData) -> None:
    """Say of every prepared folder whether it was there, and why or why not; and what there is to
    say once the rows are counted."""
    from expert.planning.choose.length import MAX_STEPS

    splits = [split for split in (data.train, data.validation, data.test) if split is not None]
    for split in splits:
        for prepared in split.folders:
            session.emit(
                "data",
                split=split.name,
                folder=str(prepared.folder.absolute()),
                hit=prepared.hit,
                because=prepared.because,
                key=prepared.key,
                rows=_rows_hash(prepared.folder),
                index=split.index_file.name,
                bad_rows=prepared.statistics.bad_rows,
            )
    for text in data.columns:
        session.emit("columns", text=text)
    made = {each.folder: each.left_out for split in splits for each in split.folders}
    told = [remark.text for remark in session.plan.remarks if remark.path == MAX_STEPS]
    for text in filter(None, (*made.values(), *data.doubts, *told)):
        session.emit("warning", text=text)


def _rows_hash(folder: Path) -> str | None:
    """Of the rows that a prepared folder was made from, whatever tokenizer made it."""
    from expert.data.tokens.prepare import RECIPE

    try:
        found = json.loads((folder / RECIPE).read_text(encoding="utf-8")).get("data")
    except (OSError, ValueError, AttributeError):
        return None
    return str(found) if found else None


def _run_folder(plan: RunPlan, resume: str | None) -> tuple[RunFolder, Path | None]:
    """A new run folder, or the one to go on with and the checkpoint in it."""
    from expert.core.rundir import RunFolder
    from expert.run.locate import run_to_resume

    parent = Path(plan.watch.output_dir)
    if resume is None:
        return RunFolder.create(parent, plan.expert), None
    return run_to_resume(resume, runs=parent, expert=plan.expert)


def run_session(session: Session) -> RunResult:
    """Attempt, and where that fails take the next plan, until the run has ended."""
    from expert.training.step import UpdateTorn

    session.announce()
    _tell_of_data(session, session.data)
    while True:
        failure, torn, ending = None, False, None
        try:
            ending = session.attempt()
        except Exception as error:
            failure = failure_of(error, session.doing, session.plan)
            torn = isinstance(error, UpdateTorn)
            if failure is None:
                session.emit(
                    "failed", step=session.state.done, error=f"{type(error).__name__}: {error}"
                )
                raise
        if failure is not None:
            # Out here: while an exception is handled, its traceback keeps tensors alive.
            heal(session, failure, torn=torn)
            continue
        assert ending is not None
        if ending.sign is not None:
            try_another(session, ending.sign)
        elif ending.trouble is not None:
            recover(session, ending.trouble, ending.verdict)
        elif ending.exit_code is not None:
            return _result(session, ending.exit_code, final=None)
        else:
            return _finished(session, early=ending.early)


def _finished(session: Session, *, early: bool) -> RunResult:
    from expert.run.ending import last_eval_loss, take_best

    take_best(session)
    test = session.evaluate_test()
    if session.signals.requested is not None:
        return _result(session, session.signals.requested, final=None)
    final = session.publish_final()
    facts = session.recorder.meter.run_line()
    session.emit(
        "finished",
        step=session.state.done,
        loss=facts["loss"],
        eval_loss=_best_loss(session),
        last_eval_loss=last_eval_loss(session),
        test_loss=test.loss if test else None,
        seconds=facts["seconds"],
        wall_seconds=time.monotonic() - session.began,
        tokens=facts["tokens"],
        tokens_per_second=facts["tokens_per_second"],
        steps_per_second=facts["steps_per_second"],
        early=early,
        final=str(final),
    )
    return _result(session, EXIT_OK, final=final, test_loss=test.loss if test else None)


def _best_loss(session: Session) -> float | None:
    """The lowest loss on the validation rows; None where another metric was followed."""
    return session.best.best if session.best.metric == "eval_loss" else None


def _result(
    session: Session, exit_code: int, *, final: Path | None, test_loss: float | None = None
) -> RunResult:
    from expert.core.interrupts import asked_by
    from expert.run.ending import last_eval_loss

    if exit_code != EXIT_OK:
        reason = asked_by(exit_code)
        session.emit("stopped", step=session.state.done, reason=reason, exit_code=exit_code)
    return RunResult(
        folder=session.folder.path,
        exit_code=exit_code,
        steps=session.state.done,
        loss=session.recorder.meter.run_line()["loss"],
        eval_loss=_best_loss(session),
        test_loss=test_loss,
        final=final,
        last_eval_loss=last_eval_loss(session),
        held_out=_holds_out(session.data),
    )


def _holds_out(data: RunData) -> bool:
    return data.validation is not None or data.test is not None
