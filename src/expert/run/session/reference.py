"""The reference of preference training: log-probabilities of the answers under the weights that
training starts from.

They are measured once, by the model that is about to be trained and in the micro-batches of its
first epoch, so that the first step sees no difference at all; and stored beside the prepared
tokens, under a key of rows, weights and kernels. No second model is ever in memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from expert.core.hashed import file_integrity, writing_hashed
from expert.data.feed.run_data import evaluated_bins, split_batches, training_feed
from expert.run.session.identity import start_of, weights_of

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.parallel.group import Group
    from expert.planning.run_plan import RunPlan
    from expert.run.build import Built
    from expert.training.recorder import Emit

Documents = NDArray[np.integer[Any]]
Logps = NDArray[np.float32]
"""[documents, answers]; NaN where not measured."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the reference of a run's answers is measured with."""

    plan: RunPlan
    data: RunData
    built: Built
    """The model, with the weights that training starts from."""
    device: torch.device
    group: Group
    emit: Emit
    show: Callable[[str, int, int], None]
    """Called with the rows measured so far, and all."""

    def measured(self, *splits: PreparedSplit | None) -> RunData:
        """The data with a reference for these splits, from a file or from the model."""
        began, found, read = time.monotonic(), dict[str, Any](), 0
        weights = weights_of(self.plan.model)
        for split in filter(None, splits):
            file = self._file_of(split, weights)
            known = _stored(file, self._needed(split), len(split.open()))
            if self.built.engine.total(int(known is not None))[0] == self.group.world.size:
                read += 1
            else:
                known = self._measure(split)
                if self.group.world.is_first:
                    try:
                        with writing_hashed(file) as stream:
                            np.save(stream, known, allow_pickle=False)
                    except OSError as error:
                        what = "the reference cannot be kept, and is measured again next time"
                        text = f"{file.parent}: {what}: {error.strerror}"
                        self.emit("warning", text=text)
            found[split.name] = replace(split, reference=known)
        how = "read" if read == len(found) else "measured"
        rows = sum(len(self._needed(split)) for split in filter(None, splits))
        self.emit("reference", rows=rows, how=how, seconds=time.monotonic() - began)
        return replace(self.data, **found)

    def _file_of(self, split: PreparedSplit, weights: str | None) -> Path:
        """Where the reference of a split is kept; its name follows from all that determines it."""
        plan = self.plan
        decides = [
            split.index_file.name,
            weights,
            plan.model.model_dump(include={"name", "revision", "quantization", "architecture"}),
            plan.kernels.model_dump(include={"precision", "attention", "tf32", "fused_blocks"}),
            plan.adapter.type,
            start_of(plan.adapter),
        ]
        key = hashlib.sha256(json.dumps(decides).encode("utf-8")).hexdigest()[:16]
        return split.index_file.parent / f"reference-{split.name}-{key}.npy"

    def _needed(self, split: PreparedSplit) -> Documents:
        """The documents of a split that the run uses."""
        plan, index = self.plan, split.index
        if split is not self.data.train:
            most = self.data.most_rows(split, plan)
            return index.documents_in(evaluated_bins(plan, index, most))
        _, order = self.data.prepared
        total = plan.length.total_steps
        if total is None or total >= order.steps_per_epoch:
            return index.piece_document
        return index.documents_in(np.concatenate([step.bins for step in order.steps(0, total)]))

    def _measure(self, split: PreparedSplit) -> Logps:
        plan, engine, answers = self.plan, self.built.engine, self.plan.objective.branches
        count = len(split.open())
        values = torch.zeros((count, answers), dtype=torch.float32, device=self.device)
        times = torch.zeros(count, dtype=torch.float32, device=self.device)
        with ExitStack() as stack:
            batches = stack.enter_context(self._batches(split))
            # Without dropout; but as in training where that is the same: FP8 evaluates otherwise.
            as_trained = split is self.data.train and not plan.adapter.dropout
            answering = self.built.loaded.answering()
            stack.enter_context(nullcontext() if as_trained else answering)
            done, total = 0, len(self._needed(split))
            for batch in batches:
                self.group.progress()
                if not batch.counts.examples:
                    continue
                sums = engine.evaluate(_answer_logps, batch)["logps"].float()
                documents = split.index.documents_in(np.array(batch.bins))
                at = torch.from_numpy(documents).long().to(self.device)
                values[at] = sums.view(-1, answers)[: len(documents)]
                times[at] += 1
                done += batch.counts.examples * self.group.world.size
                self.show("reference", min(done, total), total)
        values, times = engine.summed(values), engine.summed(times)
        known: Logps = torch.where(times[:, None] > 0, values, torch.nan).cpu().numpy()
        return known

    @contextmanager
    def _batches(self, split: PreparedSplit) -> Iterator[Iterator[Any]]:
        """The micro-batches of the first epoch, or of an evaluation."""
        plan, data, device, world = self.plan, self.data, self.device, self.group.world
        if split is not data.train:
            bins = evaluated_bins(plan, split.index, data.most_rows(split, plan))
            rows = plan.batch.eval_batch
            with split_batches(
                plan, split, rows=rows, device=device, world=world, bins=bins
            ) as batches:
                yield batches
            return
        _, order = data.prepared
        total = min(plan.length.total_steps or order.steps_per_epoch, order.steps_per_epoch)
        first = plan.with_values({"length.total_steps": total}, "the first epoch", "machine")
        with training_feed(
            first, data, done=0, place=None, skipped=(), device=device, world=world
        ) as steps:
            yield (batch for step in steps for batch in step.batches)


def _stored(file: Path, needed: Documents, documents: int) -> Logps | None:
    """A stored reference, if it is sound and has all documents that are needed."""
    if file_integrity(file) != "sound":
        return None
    try:
        known: Logps = np.load(file, allow_pickle=False)
    except (OSError, ValueError):
        return None
    fits = known.dtype == np.float32 and known.shape[:1] == (documents,)
    return known if fits and bool(np.isfinite(known[needed]).all()) else None


def _answer_logps(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"logps": model.answer_logps(batch)[0]}
