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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expert.core.hashed import file_integrity, writing_hashed
from expert.data.feed.run_data import evaluated_bins, split_batches, training_feed
from expert.run.session.identity import weights_of

if TYPE_CHECKING:
    from expert.data.prepared import PreparedSplit
    from expert.run.build import Built
    from expert.run.session.session import Session


def measure_reference(session: Session, built: Built) -> None:
    """Give every split of the session its reference, from a file or from the model, which must have
    the weights that training starts from."""
    data, began = session.data, time.monotonic()
    validates = session.evaluates and data.validation is not None
    splits = {
        "train": data.train,
        "validation": data.validation if validates else None,
        "test": data.test if session.keeps else None,
    }
    weights = weights_of(session.plan.model)
    found, read = {}, 0
    for name, split in splits.items():
        if split is None:
            continue
        file = _file_of(session, split, weights)
        needed = _needed(session, split)
        known = _stored(file, needed, len(split.open()))
        if built.engine.total(int(known is not None))[0] < session.group.world.size:
            known = _measured(session, built, split)
            if session.group.world.is_first:
                _store(session, file, known)
        else:
            read += 1
        found[name] = replace(split, reference=known)
    session.data = replace(data, **found)
    where = "read" if read == len(found) else "measured"
    rows = sum(len(_needed(session, split)) for split in found.values())
    session.emit("reference", rows=rows, how=where, seconds=time.monotonic() - began)


def _file_of(session: Session, split: PreparedSplit, weights: str | None) -> Path:
    """Where the reference of a split is kept; its name follows from all that determines it."""
    plan = session.plan
    decides = [
        split.index_file.name,
        weights,
        plan.model.model_dump(include={"name", "revision", "quantization", "architecture"}),
        plan.kernels.model_dump(include={"precision", "attention", "tf32", "fused_blocks"}),
        plan.adapter.type,
        plan.objective.start,
    ]
    key = hashlib.sha256(json.dumps(decides).encode("utf-8")).hexdigest()[:16]
    return split.index_file.parent / f"reference-{split.name}-{key}.npy"


def _needed(session: Session, split: PreparedSplit) -> np.ndarray[Any, Any]:
    """The documents of a split that the run uses."""
    plan, index = session.plan, split.index
    if split is not session.data.train:
        most = plan.watch.eval_rows if split is session.data.validation else None
        return index.documents_in(evaluated_bins(plan, index, most))
    _, order = session.data.prepared
    total = plan.length.total_steps
    if total is None or total >= order.steps_per_epoch:
        return index.piece_document
    return index.documents_in(np.concatenate([step.bins for step in order.steps(0, total)]))


def _stored(
    file: Path, needed: np.ndarray[Any, Any], documents: int
) -> np.ndarray[Any, Any] | None:
    """A stored reference, if it is sound and has all documents that are needed."""
    if file_integrity(file) != "sound":
        return None
    try:
        known = np.load(file, allow_pickle=False)
    except (OSError, ValueError):
        return None
    fits = known.dtype == np.float32 and known.shape[:1] == (documents,)
    return known if fits and bool(np.isfinite(known[needed]).all()) else None


def _store(session: Session, file: Path, known: np.ndarray[Any, Any]) -> None:
    try:
        with writing_hashed(file) as stream:
            np.save(stream, known, allow_pickle=False)
    except OSError as error:
        text = f"{file.parent}: the reference cannot be kept, and is measured again next time: "
        session.emit("warning", text=f"{text}{error.strerror}")


def _measured(session: Session, built: Built, split: PreparedSplit) -> np.ndarray[Any, Any]:
    """The log-probabilities of a split's answers, [documents, answers]; NaN where not measured."""
    plan, device, loaded = session.plan, session.device, built.loaded
    count, engine = len(split.open()), built.engine
    shape = (count, plan.objective.branches)
    values = torch.zeros(shape, dtype=torch.float32, device=device)
    times = torch.zeros(count, dtype=torch.float32, device=device)
    trains = split is session.data.train
    with ExitStack() as stack:
        batches = stack.enter_context(_batches(session, split))
        # Without dropout; but as in training where that is the same: FP8 evaluates otherwise.
        as_trained = trains and not plan.adapter.dropout
        stack.enter_context(nullcontext() if as_trained else loaded.answering())
        done, total = 0, len(_needed(session, split))
        for batch in batches:
            if not batch.counts.examples:
                continue
            sums = engine.evaluate(_answer_logps, batch)["logps"].float()
            documents = torch.from_numpy(split.index.documents_in(np.array(batch.bins))).long()
            at = documents.to(device)
            values[at] = sums.view(-1, shape[1])[: len(documents)]
            times[at] += 1
            done += batch.counts.examples * session.group.world.size
            session.group.progress()
            session.callbacks.evaluating("reference", min(done, total), total)
    values, times = engine.summed(values), engine.summed(times)
    known: np.ndarray[Any, Any] = torch.where(times[:, None] > 0, values, torch.nan).cpu().numpy()
    return known


def _answer_logps(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return {"logps": model.answer_logps(batch)[0]}


@contextmanager
def _batches(session: Session, split: PreparedSplit) -> Iterator[Iterator[Any]]:
    """The micro-batches of the first epoch, or of an evaluation."""
    plan, data, world = session.plan, session.data, session.group.world
    if split is not data.train:
        most = plan.watch.eval_rows if split is data.validation else None
        bins, rows = evaluated_bins(plan, split.index, most), plan.batch.eval_batch
        with split_batches(
            plan, split, rows=rows, device=session.device, world=world, bins=bins
        ) as batches:
            yield batches
        return
    _, order = data.prepared
    total = min(plan.length.total_steps or order.steps_per_epoch, order.steps_per_epoch)
    first = plan.with_values({"length.total_steps": total}, "the first epoch", "machine")
    feed = training_feed(
        first, data, done=0, place=None, skipped=(), device=session.device, world=world
    )
    with feed as steps:
        yield (batch for step in steps for batch in step.batches)
