"""The job behind `expert train`: from a manifest to a run folder with a trained expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.core.events import Sink
    from expert.core.rundir import RunFolder
    from expert.data.line import Tell
    from expert.manifest.reader import ReadManifest
    from expert.planning.run_plan import RunPlan
    from expert.run.open import Opened, Resumed
    from expert.run.session.finish import RunResult
    from expert.run.session.session import Evaluating


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
    acknowledge: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda done: None,
    evaluating: Evaluating = lambda split, rows, total: None,
) -> RunResult:
    """Train what a manifest describes. `resume`: "auto", a checkpoint or a folder that means a run.

    A manifest that was opened already is not opened again: `model`, `overrides`, `vram`, `resume`
    and `tell` are then those it was opened with.

    `acknowledge` is called from the handler of the first signal that asks for an end, `progress`
    after every step that was launched, `evaluating` after every batch of an evaluation; none of
    them may take long.
    """
    from expert.run.open import Opened, open_run
    from expert.run.session.execute import run_session
    from expert.run.session.run_rate import remember_run
    from expert.run.session.session import Callbacks, Start, open_session
    from expert.run.session.session import resume as resume_from

    opened = manifest
    if not isinstance(opened, Opened):
        opened = open_run(
            opened, model=model, overrides=overrides, vram=vram, resume=resume, tell=tell
        )
    resumed = opened.resumed
    if resumed is not None and not allow_changed:
        over = _over_before(opened, resumed)
        if over is not None:
            return over
    folder = resumed.folder if resumed is not None else _new_folder(opened.plan)
    running = open_session(
        folder=folder,
        plan=opened.plan,
        data=opened.data,
        manifest=opened.read.manifest,
        sinks=tuple(sinks),
        start=Start(
            source=opened.read.source,
            vram=opened.vram,
            machine=opened.machine,
            allow_remote_code=allow_remote_code,
            began=opened.began,
        ),
        callbacks=Callbacks(acknowledge=acknowledge, progress=progress, evaluating=evaluating),
        restream=opened.restream,
    )
    with _removed_if_unused(folder), folder.locked(), running as session:
        if resumed is not None:
            resume_from(session, resumed.checkpoint, allow_changed=allow_changed)
        result = run_session(session)
        if result.final is not None:
            remember_run(session)
        return replace(result, warnings=opened.warnings)


def _over_before(opened: Opened, resumed: Resumed) -> RunResult | None:
    """How a run ended that is resumed and has nothing left to do; None where it has."""
    from expert.run.session.finish import already_finished
    from expert.run.stored.changes import finished_before

    folder = resumed.folder
    if resumed.checkpoint != folder.checkpoints:
        return None
    end = finished_before(folder, opened.read.manifest, opened.data)
    if end is None:
        return None
    return replace(already_finished(folder, end, opened.data), warnings=opened.warnings)


def _new_folder(plan: RunPlan) -> RunFolder:
    from expert.core.rundir import RunFolder

    return RunFolder.create(Path(plan.watch.output_dir), plan.expert)


@contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take a run folder away again that nothing was written to, because its run never began."""
    try:
        yield
    except BaseException:
        folder.remove_if_unused()
        raise
