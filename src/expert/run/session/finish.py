"""The end of a run: the best weights, the test rows, the published result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_INTERRUPTED, EXIT_OK
from expert.core.events import read_events
from expert.core.interrupts import signal_label
from expert.core.publish import publishing
from expert.core.resources import reporting_disk_full
from expert.core.rundir import checkpoint_name
from expert.data.feed.run_data import RunData
from expert.model.saving import save_trained
from expert.run.open import Opened, Resumed
from expert.run.session.evaluate import evaluate_split
from expert.run.session.result import RunResult
from expert.run.session.session import Session, loading_seconds, model_of, saving_seconds
from expert.run.stored.changes import finished_before
from expert.training.checkpoint import CheckpointError, bytes_needed, check_space, load_checkpoint

FACTS = (
    *("loss", "smoothed_loss", "seconds", "steps_per_second"),
    *("tokens", "tokens_per_second", "median_tokens_per_second"),
)
"""Of the whole run, in its last event."""


def finished(session: Session, *, early: bool) -> RunResult:
    if session.keeps:
        session.group.progress(loading_seconds(session.folder.checkpoints))
        _load_best_checkpoint(session)
    test = None
    if session.keeps and session.data.test is not None:
        began = time.monotonic()
        test = evaluate_split(session, session.data.test)  # None: a signal interrupted it
        if test is not None:
            step = session.state.done if session.final_step is None else session.final_step
            fields = {**test.fields(), "best": False, "seconds": time.monotonic() - began}
            session.emit("eval", step=step, split="test", **fields)
    session.group.barrier()
    if session.group.signal is not None:
        return stopped(session, session.group.signal)
    final = publish_final(session) if session.keeps else session.folder.path
    facts, state = session.instruments.meter.run_line(), session.state
    test_loss = test.loss if test else None
    session.emit(
        "finished",
        step=state.done,
        **{name: facts[name] for name in FACTS},
        eval_loss=_best_loss(session),
        last_eval_loss=last_eval_loss(session),
        test_loss=test_loss,
        wall_seconds=time.monotonic() - session.opened.began,
        earlier_seconds=session.instruments.meter.earlier_seconds,
        early=early,
        final=str(final),
    )
    return _result(session, exit_code=EXIT_OK, final=final, test_loss=test_loss)


def stopped(session: Session, exit_code: int) -> RunResult:
    # SIGINT is Ctrl-C, or Stop on the board, or a scheduler: the signal does not say which.
    reason = "" if exit_code == EXIT_INTERRUPTED else signal_label(exit_code)
    session.emit("stopped", step=session.state.done, reason=reason, exit_code=exit_code)
    return _result(session, exit_code=exit_code, final=None, test_loss=None)


def already_finished(opened: Opened, resumed: Resumed) -> RunResult | None:
    """The result of a resumed run with nothing left to do, from its last event; None if it has."""
    folder, end = resumed.folder, None
    if resumed.checkpoint == folder.checkpoints:
        end = finished_before(folder, opened.read.manifest, opened.data)
    if end is None:
        return None
    return RunResult(
        folder=folder.path,
        exit_code=EXIT_OK,
        steps=int(end.get("step") or 0),
        **{name: end.get(name) for name in ("loss", "eval_loss", "test_loss", "last_eval_loss")},
        final=folder.final,
        held_out=_has_held_out_rows(opened.data),
        nothing_left=True,
        warnings=opened.warnings,
    )


def _result(session: Session, **ending: Any) -> RunResult:
    return RunResult(
        folder=session.folder.path,
        steps=session.state.done,
        loss=session.instruments.meter.run_line()["loss"],
        eval_loss=_best_loss(session),
        last_eval_loss=last_eval_loss(session),
        held_out=_has_held_out_rows(session.data),
        **ending,
    )


def _best_loss(session: Session) -> float | None:
    """The lowest loss on the validation rows; None if another metric was tracked."""
    best = session.best
    return best.best if best.metric == "eval_loss" else None


def _has_held_out_rows(data: RunData) -> bool:
    return data.validation is not None or data.test is not None


def _load_best_checkpoint(session: Session) -> None:
    """Load the best checkpoint if the plan asks for it and it is not the last one."""
    best = session.best.best_step
    if not session.plan.watch.load_best or best is None or best == session.state.done:
        return
    path = session.folder.checkpoints / checkpoint_name(best)
    try:
        groups, _ = load_checkpoint(path)
    except CheckpointError as error:
        text = f"keeping the last weights; the best cannot be loaded: {error}"
        session.emit("warning", step=session.state.done, text=text)
        return
    model_of(session).load(groups)
    session.final_step = best
    session.emit("took_best", step=best, path=str(path))


def last_eval_loss(session: Session) -> float | None:
    """The last validation loss, perhaps from before a resume."""
    if session.last_eval is not None:
        return session.last_eval.loss
    events = read_events(session.folder.events) if session.evaluates else ()
    evals = [e for e in events if e["event"] == "eval" and e.get("split") == "validation"]
    loss = evals[-1].get("loss") if evals else None
    return float(loss) if isinstance(loss, int | float) else None


def publish_final(session: Session) -> Path:
    loaded = model_of(session).whole()
    if session.group.world.is_first:
        needed = bytes_needed({"weights": loaded.weights})
        check_space(session.folder.path, needed)
        session.group.progress(saving_seconds(session, needed))
        final = session.folder.final
        with (
            reporting_disk_full(
                final, "the result", needed, fix="free some space and resume the run"
            ),
            publishing(final) as folder,
        ):
            save_trained(loaded, folder)
    session.group.barrier(saving_seconds(session))  # ends no rank before rank 0 has written
    return session.folder.final
