"""The job behind `expert train`: from a manifest to a run folder with a trained expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.manifest.schema.kinds import ON_POLICY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from expert.core.events import Sink
    from expert.core.rundir import RunFolder
    from expert.data.pipeline import Tell
    from expert.manifest.reader import ReadManifest
    from expert.parallel.group import Group
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened
    from expert.run.session.result import RunResult
    from expert.run.session.session import Callbacks, Evaluating, Session

    StepsOfAnswers = Callable[[Session, Iterable[Any]], Iterable[Any]]
    """Turns the steps of a run into steps with answers that its model gives."""


def train(
    manifest: str | Path | ReadManifest | Opened,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    vram: str | None = None,
    resume: str | None = None,
    allow_changed: bool = False,
    allow_remote_code: bool = False,
    sinks: Sequence[Sink] = (),
    tell: Tell = lambda name, rows, tokens: None,
    acknowledge: Callable[[bool], None] = lambda again: None,
    progress: Callable[[int], None] = lambda done: None,
    evaluating: Evaluating = lambda split, rows, total: None,
    begin: Callable[[Path], None] = lambda run: None,
    group: Group | None = None,
    answers: StepsOfAnswers | None = None,
) -> RunResult:
    """Train what a manifest describes. `resume`: "auto", a checkpoint or a folder that means a run.

    A manifest that is already opened is not opened again: `model`, `overrides`, `vram`, `resume`
    and `tell` then have no effect.

    `acknowledge` is called from the handler of stop signals (`again`: of a second one, which ends
    the process), `progress` after every launched step, `evaluating` after every batch of an
    evaluation; none of them may take long.
    `begin` is called with the run's folder. `group`: the processes that train together, of which
    this is the first; the others call `join`. `answers`: makes the steps of a method that learns
    from answers of its own.
    """
    from expert.core.rundir import RunFolder
    from expert.parallel.group import Group
    from expert.run.open import Opened, open_run
    from expert.run.session.session import Callbacks

    opened, group = manifest, group or Group()
    if not isinstance(opened, Opened):
        opened = open_run(
            opened, model=model, overrides=overrides, vram=vram, resume=resume, tell=tell
        )
    if opened.plan.objective.method == ON_POLICY and answers is None:
        raise ExpertError(
            f"training.config.method: {ON_POLICY} learns from judged answers of its own  (expert "
            f"improve RUN --method {ON_POLICY} trains with it, or continues with --resume)"
        )
    resumed = opened.resumed
    if resumed is not None and not allow_changed:
        from expert.run.session.finish import already_finished

        over = already_finished(opened, resumed)
        if over is not None:
            group.run_on_rank_0(lambda: None)
            return over
    if resumed is not None:
        folder, checkpoint = resumed.folder, resumed.checkpoint
    else:
        plan = opened.plan
        folder, checkpoint = RunFolder.create(Path(plan.watch.output_dir), plan.expert), None
    callbacks = Callbacks(acknowledge=acknowledge, progress=progress, evaluating=evaluating)
    try:
        with folder.locked():
            begin(folder.path)
            # The plan, the run, and the checkpoint to resume from.
            group.run_on_rank_0(lambda: (opened.plan, folder.path, checkpoint))
            return _run(
                opened,
                folder,
                checkpoint,
                group,
                allow_changed=allow_changed,
                allow_remote_code=allow_remote_code,
                sinks=sinks,
                callbacks=callbacks,
                answers=answers,
            )
    except BaseException:
        folder.remove_if_unused()  # nothing was written to it: its run never started
        raise


def join(
    read: ReadManifest,
    group: Group,
    *,
    begin: Callable[[Path], None] = lambda run: None,
    **allowed: Any,
) -> RunResult | None:
    """Take part in a run that the first rank of the group has opened; None if it found nothing to
    do. `begin` is called with the run's folder once it exists; `allowed`: as for `train`."""
    from expert.core.rundir import RunFolder
    from expert.planning.machine.machine import describe_machine
    from expert.run.open import open_planned

    def not_first() -> tuple[RunPlan, Path, Path | None] | None:
        raise AssertionError("the first rank announces a run, the others join it")

    announced = group.run_on_rank_0(not_first)
    if announced is None:
        return None
    plan, run, checkpoint = announced
    begin(run)
    opened = open_planned(plan, read, describe_machine(read.folder))
    return _run(opened, RunFolder(run), checkpoint, group, **allowed)


def _run(
    opened: Opened,
    folder: RunFolder,
    checkpoint: Path | None,
    group: Group,
    *,
    allow_changed: bool = False,
    allow_remote_code: bool = False,
    sinks: Sequence[Sink] = (),
    callbacks: Callbacks | None = None,
    answers: StepsOfAnswers | None = None,
) -> RunResult:
    """A run from its first step, or from a checkpoint, to its end; every rank calls this."""
    from expert.parallel.launch import refuse_differences
    from expert.run.session.checkpoints import resume
    from expert.run.session.execute import run_session
    from expert.run.session.session import open_session

    keys = {
        f"prepared {split.name} rows": " ".join(prepared.key[:12] for prepared in split.folders)
        for split in opened.data.splits()
    }
    refuse_differences(group.gather(keys))  # data folders may only look shared
    more: dict[str, Any] = {"sinks": sinks, "callbacks": callbacks, "group": group}
    with open_session(
        opened, folder=folder, allow_remote_code=allow_remote_code, **more
    ) as session:
        if checkpoint is not None:
            resume(session, checkpoint, allow_changed=allow_changed)
        result = run_session(session, through=partial(answers, session) if answers else iter)
        return replace(result, warnings=opened.warnings)
