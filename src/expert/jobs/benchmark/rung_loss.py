"""The loss of a rung on the held-out rows, computed in one way whatever rung made the weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.parallel.engine import Groups
    from expert.planning.run_plan import RunPlan
    from expert.run.session.session import Session
    from expert.training.evaluation import EvalSums


def judged(
    run: Session, weights: Groups, *, precision: str, own_way: bool, most: int
) -> dict[str, Any]:
    """Loss of the weights on so many held-out rows: rows alone, SDPA, nothing compiled. Where it is
    asked for, also as the rung trains. The model is built anew beside what the run has built."""
    own = run.plan.with_values(
        {
            "kernels.compile": False,  # that it computes the same is a rung of its own
            "kernels.loss_scaling": False,
            "kernels.checkpointing": "none",
        },
        "only looked at",
        "preset",
    )
    plan = own.with_values(
        {
            "data.packing": "none",
            "kernels.attention": "sdpa",
            "kernels.fused_loss": True,
            "kernels.precision": precision,
        },
        "all rungs are judged in one way",
        "preset",
    )
    if run.data.validation is None:
        return {"loss": None, "held_out_rows": 0, "held_out_tokens": 0}
    sums = _looked_at(plan, run, weights, most)
    seen = {
        "loss": sums.loss_sum.item() / sums.targets if sums.targets else None,
        "held_out_rows": sums.examples,
        "held_out_tokens": sums.targets,
    }
    if own_way:
        other = _looked_at(own, run, weights, most)
        seen["own_loss"] = other.loss_sum.item() / other.targets if other.targets else None
    return seen


def _looked_at(plan: RunPlan, run: Session, weights: Groups, most: int) -> EvalSums:
    """The held-out rows under a plan, with a model that is gone again afterwards."""
    from itertools import islice

    from expert.data.feed.run_data import split_batches
    from expert.run.build import build
    from expert.training.evaluation import evaluate

    split, rows, batches_of = _held_out(plan, run.data, most)
    built = build(plan, run.data.encoder, device=run.device)
    built.load(weights)
    built.loaded.module.eval()
    with split_batches(plan, split, rows=rows, device=run.device) as batches:
        sums = evaluate(built.engine, islice(batches, batches_of))
    assert sums is not None
    return sums


def _held_out(plan: RunPlan, data: RunData, most: int) -> tuple[PreparedSplit, int, int]:
    """The first of the validation rows as the plan lays them out, how many go at once, and how
    many batches that are."""
    import numpy as np

    from expert.data.pack.pack import pack_best_fit, pack_none
    from expert.data.pack.packing import is_padded
    from expert.manifest.schema.manifest import CHAR_GPT

    split = data.validation
    assert split is not None
    rows = max(1, min(8, plan.batch.eval_batch, most))
    if plan.model.name == CHAR_GPT:  # blocks of one document: there are no rows to lay out anew
        return split, rows, math.ceil(min(most, split.index.bins) / rows)
    documents = np.unique(split.index.piece_document)[:most]
    lengths = split.open().lengths[documents]
    soft, overlong = split.index.soft_tokens, plan.data.overlong
    length = plan.data.max_seq_length
    if is_padded(plan):
        index = pack_none(lengths, length, overlong=overlong, soft_tokens=soft)
    else:
        index = pack_best_fit(lengths, length, 0, overlong=overlong, soft_tokens=soft)
    index = replace(index, piece_document=documents[index.piece_document].astype("int32"))
    return replace(split, index=index), rows, math.ceil(index.bins / rows)
