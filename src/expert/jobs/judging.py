"""Evaluations of a run, and the trials at its start that show at once what does not fit."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from expert.jobs.checkpoints import state_to_come
from expert.jobs.feeding import PAD_ID, is_padded, split_batches
from expert.jobs.healing import RunFailed, fall_back, is_out_of_memory, nothing_left

if TYPE_CHECKING:
    from expert.data.feed import Batch
    from expert.jobs.prepared import PreparedSplit
    from expert.jobs.session import Session
    from expert.training.evaluation import EvalResult, EvalSums


def evaluate_split(session: Session, split: PreparedSplit) -> EvalResult | None:
    """All rows of a split; None where a signal asked for an end in between."""
    from expert.training.evaluation import means_of

    sums = _fitting(session, split, most=None)
    if sums is None:
        return None
    return means_of(
        sums.loss_sum.item(),
        sums.correct.item(),
        targets=sums.targets,
        examples=sums.examples,
    )


def _fitting(session: Session, split: PreparedSplit, *, most: int | None) -> EvalSums | None:
    """Sums over the first `most` batches, or all; what does not fit is halved and begins again."""
    from expert.training.evaluation import evaluate
    from expert.training.recovery import OutOfMemory, plan_after

    while True:
        message = ""
        rows = session.plan.batch.eval_batch
        try:
            with split_batches(session.plan, split, rows=rows, device=session.device) as batches:
                return evaluate(
                    session.built.engine,
                    islice(batches, most),
                    stop=lambda: session.signals.requested is not None,
                )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        finally:
            # What was raised in the middle of an evaluation has left the model without dropout.
            session.built.loaded.module.train()
        failure = OutOfMemory(where="evaluation", message=message)
        after = plan_after(session.plan, failure)
        if after is None:
            raise RunFailed(nothing_left(failure))
        fall_back(session, after, failure)


def probe(session: Session) -> None:
    """Try the largest batch there will be, of training and of evaluation, and forget the result.

    Packed batches all have one shape, so that the first update is their trial. What the optimizer
    will keep from the first update on is held in the meantime.
    """
    import torch

    built, data = session.built, session.data
    later = state_to_come(built, session.plan)
    held: Any = torch.empty(later, dtype=torch.uint8, device=session.device) if later else None
    if data.order is not None and is_padded(session.plan):
        batch = widest_batch(session)
        built.engine.accumulate(batch, divisor=max(1, batch.targets))
        built.engine.discard()
    for split in (data.validation if session.evaluates else None, data.test):
        if split is not None:
            _fitting(session, split, most=1)
    del held


def widest_batch(session: Session) -> Batch:
    """As many of the longest rows as go at once: no batch of the run is larger."""
    import numpy as np

    from expert.data.loader import on_device, padded_tensors

    split = session.data.train
    assert split is not None
    index = split.index
    rows = min(session.plan.batch.micro_batch, index.bins)
    bins = np.argsort(-index.bin_lengths(), kind="stable")[:rows].astype(np.int64)
    made = padded_tensors(index, bins, split.open(), pad_id=PAD_ID)
    return on_device(made, bins, session.device, soft=session.data.soft)
