"""Evaluations of a run, and the trials at its start that show early what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from expert.data.feed.feed import Batch
from expert.data.feed.loader import padded_rows
from expert.data.feed.order import RankBatch
from expert.data.feed.run_data import evaluated_bins, evaluation_shape, split_batches, training_feed
from expert.data.prepared import PreparedSplit
from expert.parallel.group import PeerFailed
from expert.run.session.checkpoints import upcoming_optimizer_bytes
from expert.run.session.failures import RunFailed, exhausted_message, failure_of
from expert.run.session.recover import fall_back, ranks_block_in_passes, shared_failure
from expert.run.session.session import Session, model_of
from expert.training.evaluation import EvalSums, evaluate
from expert.training.objectives.objective import EvalResult
from expert.training.recovery import OutOfMemory, plan_after
from expert.training.step import forward_backward


def evaluate_validation(session: Session) -> EvalResult | None:
    """Evaluate the validation rows; None if a signal interrupted it."""
    assert session.data.validation is not None
    with session.instruments.recompiling.ignored():
        result = evaluate_split(session, session.data.validation)
    session.last_eval = result or session.last_eval
    return result


def evaluate_split(session: Session, split: PreparedSplit) -> EvalResult | None:
    """Evaluate a split, of the validation rows as many as planned; None if a signal interrupted
    it."""
    session.group.progress()
    sums = _evaluate_fitting(session, split, most=None)
    if sums is None:
        return None
    return session.objective.result(
        {name: value.item() for name, value in sums.sums.items()},
        weight=sums.weight,
        examples=sums.examples,
    )


def _evaluate_fitting(
    session: Session, split: PreparedSplit, *, most: int | None
) -> EvalSums | None:
    """Sums over the first `most` batches, or all; if a batch does not fit, halve the batch size and
    start over."""

    def stop_requested() -> bool:
        session.group.barrier()  # a signal to one rank stops all
        return session.group.signal is not None

    while True:
        message = ""
        plan, built = session.plan, model_of(session)
        rows = plan.batch.eval_batch
        try:
            world = session.group.world
            shape = evaluation_shape(plan, _evaluated(session), rows=rows, world=world)
            bins = evaluated_bins(plan, split.index, session.data.most_rows(split, plan))
            rows = min(rows, -(-len(bins) // world.size))
            with split_batches(
                plan, split, rows=rows, device=session.device, world=world, shape=shape, bins=bins
            ) as batches:
                shown = batches if most is not None else _shown(session, split, batches)
                shown = islice(shown, most)
                return evaluate(built.engine, session.objective, shown, stop=stop_requested)
        except (RuntimeError, PeerFailed) as error:
            failed = failure_of(error, "evaluation", plan)
            if not isinstance(failed, OutOfMemory):
                raise
            if ranks_block_in_passes(session):
                session.doing = "evaluation"  # so that the evaluation batch is halved
                raise
            shared_failure(session, failed, error)
            message = failed.message
        finally:
            # An exception during an evaluation leaves the model without dropout.
            built.loaded.module.train()
        failure = OutOfMemory(where="evaluation", message=message)
        after = plan_after(plan, failure)
        if after is None:
            raise RunFailed(exhausted_message(failure))
        fall_back(session, after, type(failure).__name__)


def _shown(session: Session, split: PreparedSplit, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Pass batches on and report how many rows were launched. Never waits for the device, which is
    at most a few batches behind."""
    index, launched, report = split.index, 0, session.callbacks.evaluating
    rows, most = index.examples, session.data.most_rows(split, session.plan)
    if most is not None and rows > most:
        rows = round(rows * len(evaluated_bins(session.plan, index, most)) / index.bins)
    report(split.name, 0, rows)
    for batch in batches:
        yield batch
        launched += batch.counts.examples * session.group.world.size  # all ranks are equally far
        report(split.name, min(launched, rows), rows)


def probe(session: Session) -> None:
    """Try the largest batches of training and of evaluation, and discard the result.

    For packed batches of one width the first step is trial enough. Memory for the optimizer state
    of the first step is reserved meanwhile.
    """
    plan, data, device = session.plan, session.data, session.device
    built = model_of(session)
    later = upcoming_optimizer_bytes(built, plan)
    reserved: Any = torch.empty(later, dtype=torch.uint8, device=device) if later else None

    def try_batch(batch: Batch) -> None:
        divisor = max(1, session.objective.weight(batch))
        forward_backward(built.engine, session.objective, batch, divisor=divisor)
        built.engine.discard()

    if data.order is not None and plan.is_padded:
        assert data.train is not None
        index = data.train.index
        rows = min(plan.batch.micro_batch, index.bins)
        longest = np.argsort(-index.bin_lengths(), kind="stable")[:rows].astype(np.int64)
        try_batch(padded_rows(index, RankBatch(longest), data.train.open(), device))
    # A CPU run that runs out of memory is killed: trying helps nothing there.
    elif (plan.data.trim or plan.data.flat) and device.type != "cpu":
        widest = {"data.trim": False, "data.flat": False}
        whole = plan.with_values(widest, "to try the widest", "machine")
        world, state = session.group.world, session.state
        place: dict[str, Any] = {"done": state.done, "place": state.place, "skipped": state.skipped}
        with training_feed(whole, data, **place, device=device, world=world) as fed:
            for step in islice(fed, 1):
                try_batch(step.batches[0])
    for split in _evaluated(session):
        _evaluate_fitting(session, split, most=1)
    del reserved


def _evaluated(session: Session) -> list[PreparedSplit]:
    """The splits that the run evaluates, in order."""
    data = session.data
    tested = data.test if session.keeps else None
    splits = (data.validation if session.evaluates else None, tested)
    return [split for split in splits if split is not None]
