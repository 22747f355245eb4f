"""The checkpoints of a run: contents, disk space, and resuming."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from expert.core.links import refuse_links
from expert.core.publish import DONE
from expert.core.rundir import RunFolderError, checkpoint_name, checkpoint_step, checkpoints_in
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.parallel.engine import Groups
from expert.planning.run_plan import RunPlan
from expert.run.build import Built
from expert.run.session.identity import KERNELS, NO_EFFECT_ON_WEIGHTS, identity
from expert.run.session.session import (
    Session,
    continue_from,
    model_of,
    saving_seconds,
    settle_loader,
)
from expert.run.stored.changes import Option, changed_options, what_changed
from expert.training.checkpoint import (
    CheckpointError,
    DifferentRun,
    bytes_needed,
    check_space,
    delete,
    find_checkpoint,
    load_checkpoint,
    prune,
    put_aside,
    put_aside_after,
    read_state,
    save_checkpoint,
    state_difference,
)
from expert.training.learner import LOSS_SCALE, MODEL, OPTIMIZER
from expert.training.state import TrainState


def fallbacks_of(plan: RunPlan) -> list[dict[str, Any]]:
    """Every plan change made after a failure; a resumed run starts with them."""
    return [d.model_dump(mode="json") for d in plan.decisions if d.source == "fallback"]


def with_fallbacks(plan: RunPlan, fallbacks: list[dict[str, Any]]) -> RunPlan:
    for decision in fallbacks:
        values = {decision["path"]: decision["value"]}
        plan = plan.with_values(values, decision["because"], "fallback")
    return plan


def save(session: Session, state: TrainState) -> None:
    """Write a checkpoint, unless the run keeps nothing; then prune the surplus ones.

    An existing checkpoint of the same step with another state, as after a rollback, is replaced.
    """
    session.state = state
    if not session.keeps:
        return
    tensors = model_of(session).tensors()  # every rank takes part, one writes
    needed = bytes_needed(tensors)
    seconds = saving_seconds(session, needed)
    session.group.progress(seconds)
    if session.group.world.is_first:
        _write(session, tensors, needed)
    session.group.barrier(seconds)


def _write(session: Session, tensors: Groups, needed: int) -> None:
    run, plan, state = session.folder, session.plan, session.state
    run.refuse_missing()
    began, folder = time.monotonic(), run.checkpoints
    there = folder / checkpoint_name(state.done)
    exists = (there / DONE).is_file()
    if exists:
        with suppress(CheckpointError, KeyError, TypeError):  # unreadable: it is replaced
            saved_state = TrainState.from_json(read_state(there)["state"])
            if replace(saved_state, sums={}) == replace(state, sums={}):  # apart from times
                return
    refuse_links(folder, below=run.path)
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, needed)
    saved = {
        "state": state.to_json(),
        "identity": identity(plan, session.data, session.base()),
        "fallbacks": fallbacks_of(plan),
    }
    old = put_aside(there, "old") if exists else None
    try:
        path = save_checkpoint(folder, state.done, tensors, saved)
    except BaseException:
        if old is not None and not there.exists():
            old.rename(there)
        raise
    if old is not None:
        delete(old)
    best = state.best.get("best_step")
    protected = {best} if best is not None else set()
    prune(folder, plan.watch.keep_checkpoints, protected, verified=path)
    seconds = time.monotonic() - began
    session.emit("saved", step=state.done, path=str(path), bytes=needed, seconds=seconds)


def newest(session: Session) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are set aside and reported."""

    def find() -> Path | None:
        path, rejected = find_checkpoint(session.folder.checkpoints)
        for bad, reason in rejected:
            session.emit("rejected", path=str(bad), reason=reason)
        return path

    path: Path | None = session.group.run_on_rank_0(find)
    return path


def resume(session: Session, checkpoint: Path, *, allow_changed: bool) -> None:
    """Continue from a checkpoint, or from the newest good one in a folder. A run that has never
    saved one starts over; CheckpointError if none is usable or it belongs to another run."""
    folder, first = session.folder, session.group.world.is_first
    found = checkpoint if checkpoint_step(checkpoint.name) is not None else newest(session)
    if found is None:
        there = folder.checkpoints
        # Remains of checkpoints: set aside, or left by someone else.
        if not there.is_dir() or all(path.name.startswith(".tmp-") for path in there.iterdir()):
            text = "nothing was saved yet: this run starts at step 0"
            session.emit("warning", step=0, text=text)
            return
        what = "there is no checkpoint to resume from"
        raise CheckpointError(f"{checkpoint}: {what}  (start over without --resume)")
    groups, saved = load_checkpoint(found)
    state = TrainState.from_json(saved["state"])
    # Changes made after failures belong to the run itself.
    plan = with_fallbacks(session.plan, saved["fallbacks"])
    options = changed_options(folder, session.opened.read.manifest)
    now = identity(plan, session.data, session.group.run_on_rank_0(session.base))
    changed = state_difference(saved["identity"], now)
    # Another kernel chosen by a machine or a failure merely rounds differently: only reported.
    asked = {KERNELS.get(path.rpartition(".")[2]) for path, _, _ in options}
    paths = [(line, line.partition(":")[0]) for line in changed]
    counted = [line for line, path in paths if not path.startswith("kernels.") or path in asked]
    if counted and not allow_changed:
        raise _different_run(session, found, saved["identity"], counted, options)
    if first:
        put_aside_after(found.parent, state.done)
    session.emit("resumed", step=state.done, path=str(found), changed=changed)
    session.plan = plan
    settle_loader(session)
    continue_from(session, state, groups)
    session.recorder.meter.restore(state.sums)
    if state.done != plan.length.total_steps and first and folder.final.exists():
        aside = put_aside(folder.final, "old")  # the result of an earlier end
        if aside == folder.final:
            raise RunFolderError(f"{aside}: cannot be renamed  (move it away, then resume)")
        session.emit("warning", text=f"final was renamed to {aside.name}: training continues")


def check_room(session: Session, needed: int | None) -> None:
    """Raise DiskFull unless all checkpoints that will exist together fit on the disk. `needed`:
    bytes of one, if known."""
    done, loop, folder = session.state.done, session.loop_plan, session.folder.checkpoints
    if not session.keeps or needed is None or done == session.plan.length.total_steps:
        return
    keep = session.plan.watch.keep_checkpoints
    # One more than is kept: the new one is complete before an old one is deleted.
    limits = [keep + 1 - len(checkpoints_in(folder))] if keep is not None else []
    if loop.total_steps is not None:  # how many are still to come, including the last
        every = loop.save_every or loop.total_steps
        between = loop.save_best and loop.eval_every % every and loop.eval_every < loop.total_steps
        limits.append(math.ceil(loop.total_steps / every) - done // every + bool(between))
    check_space(folder, needed, max(1, min(limits, default=1)))


def _different_run(
    session: Session,
    found: Path,
    then: dict[str, Any],
    changed: list[str],
    options: Sequence[Option],
) -> CheckpointError:
    """The error for a run started with other settings: the causes first, then what they change.
    `then`: the identity of the checkpoint."""
    free = {f"training.config.{key}" for key in NO_EFFECT_ON_WEIGHTS}
    options = [option for option in options if option[0] not in free]
    causes = what_changed(options, then.get("data", {}).get("tokens"), session.data)
    seen = {cause.partition(":")[0] for cause in causes}
    rest = [line for line in changed if line.partition(":")[0] not in seen]
    why = ": it was started with other options" if options else ""
    lines = "\n".join(f"  - {line}" for line in [*causes, *rest])
    return DifferentRun(
        f"{found}: belongs to another run{why}\n{lines}\n  (undo the change, or resume anyway "
        "with --allow-changed)",
        [(path, value) for path, value, _ in options],
    )


def upcoming_optimizer_bytes(built: Built, plan: RunPlan) -> int:
    """Bytes of optimizer state that the first step will create; 0 if it exists."""
    own = built.engine.own_tensors()
    if any(not name.startswith(LOSS_SCALE) for name in own[OPTIMIZER]):
        return 0
    weights = sum(parameter.numel() for parameter in own[MODEL].values())
    return int(weights * OPTIMIZERS[plan.optim.optimizer].state_bytes)
