"""Recovery from a failure: another plan, an earlier checkpoint, or a clear end."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import Any

from expert.core.errors import EXIT_RUN_FAILED
from expert.core.events import plain
from expert.core.files import write_text_atomically
from expert.core.resources import DiskFull
from expert.core.secrets import known_secrets
from expert.core.stored_json import read_object_or_empty
from expert.data.feed.run_data import RunData
from expert.manifest.schema.kinds import SPLITS_WEIGHTS
from expert.parallel.group import PeerFailed
from expert.parallel.launch import FAILURE_FILE
from expert.planning.run_plan import RunPlan
from expert.run.session.checkpoints import fallbacks_of, newest, save, with_fallbacks
from expert.run.session.failures import RunFailed, exhausted_message
from expert.run.session.session import Session, change_plan, continue_from, loading_seconds
from expert.training.checkpoint import CheckpointError, load_checkpoint, put_aside_after
from expert.training.loop import Ending, judge
from expert.training.recorder import Trouble
from expert.training.recovery import Failure, LossSpike, NotFinite, OutOfMemory, changes, plan_after
from expert.training.schedule import after_rollback, rollbacks_of
from expert.training.state import TrainState

SHOWN_ROWS = 10


def recover_from_failure(session: Session, failure: Failure, *, interrupted: bool) -> None:
    """Adapt the plan, after judging the pending numbers of earlier steps, and repeat the step; or
    raise RunFailed. `interrupted`: the step failed while it changed the weights."""
    after = plan_after(session.plan, failure)
    if after is None:
        session.emit("failed", step=session.state.done, error=exhausted_message(failure))
        raise RunFailed(exhausted_message(failure))
    ending = _judge_pending(session)
    if ending is not None and ending.verdict == "stop":
        recover_from_trouble(session, ending, sound=not interrupted)
    fall_back(session, after, type(failure).__name__)
    if interrupted:
        session.emit("warning", text="optimizer step interrupted; weights may be inconsistent")
    if ending is not None:
        recover_from_trouble(session, ending)
    elif interrupted:
        from_step = session.state.done
        _return_to_checkpoint(session)
        _report_rollback(session, from_step)


def shared_failure(
    session: Session, failure: Failure | None, error: BaseException
) -> Failure | None:
    """The failure that all ranks respond to with the same plan: this rank's, broadcast to the
    others, or the one received from another rank."""
    built = session.built
    if isinstance(error, PeerFailed):
        return failure
    if isinstance(failure, OutOfMemory) and built is not None:
        failure = replace(failure, blocks=len(built.loaded.blocks))
    shared: Failure | None = session.group.failed(failure, f"{type(error).__name__}: {error}")
    return shared


def ranks_block_in_passes(session: Session) -> bool:
    """Whether ranks wait for each other in the middle of a pass, where they cannot be notified."""
    return session.group.is_distributed and session.plan.parallel.engine in SPLITS_WEIGHTS


def end_all(session: Session, failure: Failure | None, error: BaseException) -> None:
    """End all ranks, which cannot be notified; the plan to try next is stored, so that a resumed
    run starts with it."""
    text = f"{type(error).__name__}: {error}"
    after = plan_after(session.plan, failure) if failure is not None else None
    if after is not None:
        path = session.folder.path / FAILURE_FILE
        path.parent.mkdir(exist_ok=True)
        kept = {"failure": type(failure).__name__, "fallbacks": fallbacks_of(after)}
        write_text_atomically(path, json.dumps(plain(kept, known_secrets())))
    session.emit("failed", step=session.state.done, error=text)
    session.group.explain_end(text)


def apply_stored_failure(session: Session) -> None:
    """Take the plan that the failure before this start has left, if it ended all ranks."""

    def read() -> dict[str, Any]:
        path = session.folder.path / FAILURE_FILE
        content = read_object_or_empty(path)
        path.unlink(missing_ok=True)
        return content

    kept = session.group.run_on_rank_0(read)
    if not kept:
        return
    try:
        after, failure = with_fallbacks(session.plan, kept["fallbacks"]), str(kept["failure"])
    except (KeyError, TypeError, ValueError) as error:
        session.emit("warning", text=f"{FAILURE_FILE} is damaged and was not used: {error}")
        return
    fall_back(session, after, failure)


def next_start_message(session: Session, failure: Failure) -> str:
    """Why all ranks ended, and what the next start changes."""
    after = plan_after(session.plan, failure)
    if after is None:
        return exhausted_message(failure)
    decisions = changes(session.plan, after)
    values = ", ".join(f"{decision.path}: {decision.value}" for decision in decisions)
    return f"{decisions[0].because}  (--resume continues with {values})"


def _judge_pending(session: Session) -> Ending | None:
    """Read the pending numbers and report every trouble; an Ending for the first that cannot be
    skipped."""
    return judge(
        session.recorder.wait_for_numbers(),
        session.state,
        session.loop_plan.stability,
        emit=session.emit,
        rows_in=lambda bins: rows_in_bins(session.data, bins),
    )


def fall_back(session: Session, after: RunPlan, failure: str) -> None:
    """Switch to another plan within the run; the training state is kept."""
    decisions = changes(session.plan, after)
    session.emit(
        "fell_back",
        step=session.state.done,
        failure=failure,
        reason=decisions[0].because if decisions else "",
        changes=[decision.model_dump(mode="json") for decision in decisions],
    )
    change_plan(session, after, {decision.path for decision in decisions})


def recover_from_trouble(session: Session, ending: Ending, *, sound: bool = True) -> None:
    """Return to the last checkpoint and skip the rows that broke the run, or stop, as the verdict
    says. `sound`: no step was interrupted while it changed the weights."""
    assert ending.trouble is not None
    what, kept = ending.trouble.what, ""
    if ending.verdict == "rollback":
        _roll_back(session, ending.trouble)
        return
    if isinstance(what, NotFinite):
        words = f"a loss or gradient of step {what.step + 1} is not finite"
        rows = rows_in_bins(session.data, what.bins)
        words += f"; rows {', '.join(map(str, rows))} were in it" if rows else ""
        if sound:  # a non-finite gradient changes no weights
            _judge_pending(session)
            state, step = session.state, what.step
            kept = _try_save(session, replace(state, skipped=state.skipped.with_window(step, step)))
    else:
        words = f"the loss spiked to {what.loss:.3g} from {what.median:.3g} at step {what.step + 1}"
    session.emit("stopped", step=session.state.done, reason=words, exit_code=EXIT_RUN_FAILED)
    fix = "look at these rows, lower learning_rate or lengthen warmup_steps"
    keys = "on_not_finite, on_loss_spike and max_rollbacks set what is tried first"
    raise RunFailed(f"{words}{kept}  ({fix}; {keys})")


def save_after_data_failure(session: Session) -> str:
    """Save the progress when the data fails, and return a sentence about it; "" if nothing is
    saved: on one of several ranks, before the first step, or after a trouble."""
    may_save = session.state.done and not session.group.is_distributed
    sound = may_save and _judge_pending(session) is None
    return _try_save(session, session.state) if sound else ""


def _try_save(session: Session, state: TrainState) -> str:
    if not session.keeps:
        return ""
    try:
        save(session, replace(state, **session.recorder.state()))
    except (CheckpointError, DiskFull) as error:
        session.emit("warning", step=state.done, text=f"nothing was saved: {error}")
        return ""
    return f"; a checkpoint after step {state.done} was saved, --resume continues after it"


def _roll_back(session: Session, trouble: Trouble) -> None:
    """Return to the last good checkpoint, skip the steps of the trouble, and lower the rate."""
    from_step, loop = session.state.done, session.loop_plan
    first, last = trouble.what.step, max(trouble.what.step, from_step - 1)
    if isinstance(trouble.what, LossSpike):
        # A loss belongs to the weights before its step: those were already broken, most likely by
        # the step before.
        first = max(0, first - 1)
        if session.keeps and session.group.world.is_first:
            put_aside_after(session.folder.checkpoints, first)
    skipped = session.state.skipped.with_window(first, last)
    rollbacks = session.state.rollbacks + 1
    _return_to_checkpoint(session)
    schedule = rollbacks_of(after_rollback(loop.schedule, at=session.state.done))
    session.state = replace(session.state, skipped=skipped, rollbacks=rollbacks, schedule=schedule)
    _report_rollback(session, from_step)


def _report_rollback(session: Session, from_step: int) -> None:
    session.emit(
        "rolled_back",
        step=session.state.done,
        from_step=from_step,
        to_step=session.state.done,
        skipped=session.state.skipped.to_json(),
        rate_factor=session.loop_plan.schedule.rate_factor,
    )


def _return_to_checkpoint(session: Session) -> None:
    """Continue from the newest good checkpoint, or start over without one."""
    session.group.progress(loading_seconds(session.folder.checkpoints))
    path = newest(session) if session.keeps else None
    groups, saved = load_checkpoint(path) if path is not None else (None, {})
    session.group.progress()
    kept = session.state
    state = TrainState.from_json(saved["state"]) if saved else TrainState()
    state = replace(state, skipped=kept.skipped, rollbacks=kept.rollbacks, schedule=kept.schedule)
    continue_from(session, state, groups)


def rows_in_bins(data: RunData, bins: tuple[int, ...]) -> list[int | str]:
    """The first source rows, counted from 0, of these packed sequences; unknown for a stream.

    With several sources each row is prefixed with its prepared folder.
    """
    split = data.train
    if split is None or not bins:
        return []
    index, store, folders = split.index, split.open(), split.folders
    ends = list(accumulate(prepared.statistics.documents for prepared in folders))
    rows: dict[int | str, None] = {}
    for number in bins:
        for piece in range(index.bin_offsets[number], index.bin_offsets[number + 1]):
            document = int(index.piece_document[piece])
            row: int | str = store.row(document)
            if len(ends) > 1:
                row = f"{folders[bisect_right(ends, document)].folder.name}:{row}"
            rows[row] = None
    return list(rows)[:SHOWN_ROWS]
