"""The checkpoints of a run: contents, disk space, and resuming."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.links import refuse_links
from expert.core.rundir import (
    RunFolder,
    RunFolderError,
    checkpoint_name,
    checkpoint_step,
    checkpoints_in,
)
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.run.session.identity import (
    BaseWeights,
    blocking_differences,
    identity,
    options_affecting_weights,
)
from expert.run.stored.changes import Option, what_changed
from expert.training.state import TrainState

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.parallel.engine import Groups
    from expert.parallel.group import Group
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built
    from expert.training.checkpoint import CheckpointError
    from expert.training.recorder import Emit


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A loaded checkpoint: tensors by group, the state, and the fallbacks of its run."""

    path: Path
    groups: Groups
    state: TrainState
    identity: dict[str, Any]
    fallbacks: list[dict[str, Any]]


def fallbacks_of(plan: RunPlan) -> list[dict[str, Any]]:
    """Every plan change made after a failure; a resumed run starts with them."""
    return [d.model_dump(mode="json") for d in plan.decisions if d.source == "fallback"]


def with_fallbacks(plan: RunPlan, fallbacks: list[dict[str, Any]]) -> RunPlan:
    for decision in fallbacks:
        values = {decision["path"]: decision["value"]}
        plan = plan.with_values(values, decision["because"], "fallback")
    return plan


class Checkpoints:
    def __init__(
        self,
        folder: RunFolder,
        emit: Emit,
        group: Group | None = None,
        *,
        base: BaseWeights,
    ) -> None:
        """`base`: hashes the base weights for the checkpoint."""
        from expert.parallel.group import Group

        self.run, self.folder, self.base = folder, folder.checkpoints, base
        self._emit, self._group = emit, group or Group()

    def save(
        self, state: TrainState, groups: Groups, plan: RunPlan, data: RunData, *, due: bool = True
    ) -> None:
        """Write a checkpoint, then prune the surplus ones.

        An existing checkpoint of the same step with another state, as after a rollback, is
        replaced. `due`: requested by the manifest; otherwise the best so far, or the stop of a run.
        """
        from expert.training.checkpoint import (
            bytes_needed,
            check_space,
            delete,
            prune,
            put_aside,
            save_checkpoint,
        )

        if not self._group.world.is_first:
            return
        self.run.refuse_missing()
        began = time.monotonic()
        there = self.folder / checkpoint_name(state.done)
        if (there / "DONE").is_file() and _holds_state(there, state):
            return
        due = due or ((there / "DONE").is_file() and not _is_unscheduled(there))
        needed = bytes_needed(groups)
        refuse_links(self.folder, below=self.folder.parent)
        self.folder.mkdir(parents=True, exist_ok=True)
        check_space(self.folder, needed)
        saved = {
            "state": state.to_json(),
            "identity": identity(plan, data, self.base()),
            "fallbacks": fallbacks_of(plan),
            "due": due,
        }
        old = put_aside(there, "old") if (there / "DONE").is_file() else None
        try:
            path = save_checkpoint(self.folder, state.done, groups, saved)
        except BaseException:
            if old is not None and not there.exists():
                old.rename(there)
            raise
        if old is not None:
            delete(old)
        best = state.best.get("best_step")
        protected = {best} if best is not None else set()
        keep = plan.watch.keep_checkpoints
        prune(self.folder, keep, protected, verified=path, is_unscheduled=_is_unscheduled)
        seconds = time.monotonic() - began
        self._emit("saved", step=state.done, path=str(path), bytes=needed, seconds=seconds)

    def newest(self) -> LoadedCheckpoint | None:
        """The newest checkpoint that verifies; damaged ones are set aside and reported."""
        from expert.training.checkpoint import find_checkpoint

        def find() -> Path | None:
            search = find_checkpoint(self.folder)
            for bad, reason in search.rejected:
                self._emit("rejected", path=str(bad), reason=reason)
            return search.path

        path = self._group.run_on_rank_0(find)
        return None if path is None else load(path)

    def chosen(
        self,
        checkpoint: Path,
        plan: RunPlan,
        data: RunData,
        *,
        options: Sequence[Option] = (),
        allow: bool,
    ) -> LoadedCheckpoint | None:
        """The checkpoint to continue from; None if the run has never saved one, CheckpointError
        if none is usable.

        `options`: manifest keys that changed since the start of the run.
        """
        from expert.training.checkpoint import CheckpointError, put_aside_after, state_difference

        named = checkpoint_step(checkpoint.name) is not None
        found = load(checkpoint) if named else self.newest()
        if found is None and not _has_remains(self.folder):
            text = "nothing was saved yet: this run starts at step 0"
            self._emit("warning", step=0, text=text)
            return None
        if found is None:
            raise CheckpointError(
                f"{checkpoint}: there is no checkpoint to resume from  (start over without "
                "--resume)"
            )
        # Changes made after failures belong to the run itself.
        now = identity(
            with_fallbacks(plan, found.fallbacks), data, self._group.run_on_rank_0(self.base)
        )
        changed = state_difference(found.identity, now)
        counted = blocking_differences(changed, options)
        if counted and not allow:
            raise _different_run(found, counted, options, plan, data)
        if self._group.world.is_first:
            put_aside_after(found.path.parent, found.state.done)
        self._emit("resumed", step=found.state.done, path=str(found.path), changed=changed)
        return found

    def check_room(self, needed: int, plan: RunPlan, saves: int | None) -> None:
        """Raise DiskFull unless all checkpoints that will exist together fit on the disk.

        `saves`: how many the run will write, if known; `needed`: bytes of one.
        """
        from expert.training.checkpoint import check_space

        there, keep = len(checkpoints_in(self.folder)), plan.watch.keep_checkpoints
        # One more than is kept: the new one is complete before an old one is deleted.
        limits = [keep + 1 - there] if keep is not None else []
        limits += [saves] if saves is not None else []
        check_space(self.folder, needed, max(1, min(limits, default=1)))


def _has_remains(folder: Path) -> bool:
    """Whether there are remains of checkpoints: set aside, or left by someone else."""
    return folder.is_dir() and any(not path.name.startswith(".tmp-") for path in folder.iterdir())


def _different_run(
    found: LoadedCheckpoint,
    changed: list[str],
    options: Sequence[Option],
    plan: RunPlan,
    data: RunData,
) -> CheckpointError:
    """The error for a run started with other settings: the causes first, then what they change."""
    from expert.training.checkpoint import DifferentRun

    saved, options = found.identity.get("data", {}), options_affecting_weights(options)
    causes = what_changed(options, saved.get("tokens"), plan, data)
    seen = {cause.partition(":")[0] for cause in causes}
    rest = [line for line in changed if line.partition(":")[0] not in seen]
    why = ": it was started with other options" if options else ""
    lines = "\n".join(f"  - {line}" for line in [*causes, *rest])
    return DifferentRun(
        f"{found.path}: belongs to another run{why}\n{lines}\n  (undo the change, or resume anyway "
        "with --allow-changed)",
        [(path, then) for path, then, _ in options],
    )


def _is_unscheduled(path: Path) -> bool:
    """Whether a checkpoint was saved outside the schedule."""
    from expert.training.checkpoint import CheckpointError, read_state

    try:
        return read_state(path).get("due") is False
    except CheckpointError:
        return False


def _holds_state(path: Path, state: TrainState) -> bool:
    """Whether a checkpoint holds this state, apart from accumulated times."""
    from expert.training.checkpoint import CheckpointError, read_state

    try:
        there = TrainState.from_json(read_state(path)["state"])
    except (CheckpointError, KeyError, TypeError):
        return False
    return replace(there, sums={}) == replace(state, sums={})


def put_final_aside(folder: RunFolder) -> Path | None:
    """Rename the result of an earlier end of the run; None if there is none."""
    from expert.training.checkpoint import put_aside

    if not folder.final.exists():
        return None
    aside = put_aside(folder.final, "old")
    if aside == folder.final:
        raise RunFolderError(f"{folder.final}: cannot be renamed  (move it away, then resume)")
    return aside


def load(path: Path) -> LoadedCheckpoint:
    """Load a checkpoint; raises unless it is complete."""
    from expert.training.checkpoint import load_checkpoint

    groups, saved = load_checkpoint(path)
    return LoadedCheckpoint(
        path=path,
        groups=groups,
        state=TrainState.from_json(saved["state"]),
        identity=saved["identity"],
        fallbacks=saved["fallbacks"],
    )


def checkpoint_size(built: Built, plan: RunPlan) -> int:
    """Bytes of a checkpoint, including the optimizer state that the first step creates."""
    from expert.training.checkpoint import bytes_needed

    return bytes_needed(built.tensors()) + upcoming_optimizer_bytes(built, plan)


def upcoming_optimizer_bytes(built: Built, plan: RunPlan) -> int:
    """Bytes of optimizer state that the first step will create; 0 if it exists."""
    from expert.training.learner import LOSS_SCALE, MODEL, OPTIMIZER

    own = built.engine.own_tensors()
    if any(not name.startswith(LOSS_SCALE) for name in own[OPTIMIZER]):
        return 0
    weights = sum(parameter.numel() for parameter in own[MODEL].values())
    return int(weights * OPTIMIZERS[plan.optim.optimizer].state_bytes)
