"""Evaluations of a run, and the trials at its start that show at once what does not fit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any

from expert.data.pack.packing import PAD_ID, is_padded
from expert.run.checkpoints import state_to_come
from expert.run.recover import RunFailed, fall_back, is_out_of_memory, nothing_left

if TYPE_CHECKING:
    from expert.data.feed.feed import Batch
    from expert.data.prepared import PreparedSplit
    from expert.run.session import Session
    from expert.training.evaluation import EvalResult, EvalSums


def evaluate_split(session: Session, split: PreparedSplit) -> EvalResult | None:
    """All rows of a split; None where a signal asked for an end in between."""
    from expert.training.evaluation import means_of

    began = time.monotonic()
    sums = _fitting(session, split, most=None)
    if sums is None:
        return None
    result = means_of(
        sums.loss_sum.item(),
        sums.correct.item(),
        targets=sums.targets,
        examples=sums.examples,
    )
    _remember(session, split, time.monotonic() - began)
    return result


def _remember(
    session: Session, split: PreparedSplit, seconds: float, *, share: float = 1.0
) -> None:
    """How long a split, or a share of it, took tells how long the next evaluations will take."""
    ahead = session.recorder.meter.ahead
    if ahead is None:
        return
    validates = split is session.data.validation
    done = session.state.done if validates and share == 1 else None
    cost = ahead.validation if validates else ahead.test
    ahead.measured(seconds, cost=share * cost, done=done)


def _fitting(session: Session, split: PreparedSplit, *, most: int | None) -> EvalSums | None:
    """Sums over the first `most` batches, or all; what does not fit is halved and begins again."""
    from expert.data.feed.run_data import split_batches
    from expert.training.evaluation import evaluate
    from expert.training.recovery import OutOfMemory, plan_after

    while True:
        message = ""
        rows = session.plan.batch.eval_batch
        try:
            with split_batches(session.plan, split, rows=rows, device=session.device) as batches:
                told = batches if most is not None else _told(session, split, batches)
                return evaluate(
                    session.built.engine,
                    islice(told, most),
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


def _told(session: Session, split: PreparedSplit, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches on their way to the model: how many of the rows were launched. Nothing waits for
    the device; it is never more than some batches behind."""
    rows = split.index.examples
    launched = 0
    session.evaluating(split.name, 0, rows)
    for batch in batches:
        yield batch
        launched += batch.counts.examples
        session.evaluating(split.name, launched, rows)


def probe(session: Session) -> None:
    """Try the largest batch there will be, of training and of evaluation, and forget the result.

    Packed batches of one width need no trial but the first update. What the optimizer will keep
    from the first update on is held in the meantime.
    """
    import torch

    built, data = session.built, session.data
    later = state_to_come(built, session.plan)
    held: Any = torch.empty(later, dtype=torch.uint8, device=session.device) if later else None
    if data.order is not None and is_padded(session.plan):
        batch = widest_batch(session)
        built.engine.accumulate(batch, divisor=max(1, batch.targets))
        built.engine.discard()
    elif varies_in_width(session):
        with full_width_feed(session) as fed:
            for update in islice(fed, 1):
                batch = update.batches[0]
                built.engine.accumulate(batch, divisor=max(1, batch.targets))
                built.engine.discard()
    for split in (data.validation if session.evaluates else None, data.test):
        if split is not None:
            began = time.monotonic()
            sums = _fitting(session, split, most=1)
            # A card compiles meanwhile, and of rows that go alone the longest come first.
            if sums is not None and session.device.type == "cpu" and not is_padded(session.plan):
                share = sums.examples / max(1, split.index.examples)
                _remember(session, split, time.monotonic() - began, share=share)
    del held


def varies_in_width(session: Session) -> bool:
    """Whether a later batch may need more of a card than the first; a CPU has its memory or dies
    of it."""
    return session.plan.data.trim and session.device.type != "cpu"


def full_width_feed(session: Session) -> AbstractContextManager[Any]:
    """The updates to come with batches as wide as any can be."""
    from expert.data.feed.run_data import training_feed

    whole = session.plan.with_values({"data.trim": False}, "to try the widest", "machine")
    return training_feed(whole, session.data, session.state, device=session.device)


def widest_batch(session: Session) -> Batch:
    """As many of the longest rows as go at once: no batch of the run is larger."""
    import numpy as np

    from expert.data.feed.loader import on_device, padded_tensors

    split = session.data.train
    assert split is not None
    index = split.index
    rows = min(session.plan.batch.micro_batch, index.bins)
    bins = np.argsort(-index.bin_lengths(), kind="stable")[:rows].astype(np.int64)
    made = padded_tensors(index, bins, split.open(), pad_id=PAD_ID)
    return on_device(made, bins, session.device, soft=session.data.soft)
