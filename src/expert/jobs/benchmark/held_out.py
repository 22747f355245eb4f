"""The loss of a setting on the held-out rows, computed in one way whatever trained the weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from expert.data.pack.packing import is_padded
from expert.manifest.schema.manifest import CHAR_GPT
from expert.run.build import build

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.data.prepared import PreparedSplit
    from expert.jobs.benchmark.processes import Job
    from expert.parallel.engine import Groups
    from expert.planning.run_plan import RunPlan
    from expert.run.session.session import Session
    from expert.training.evaluation import EvalSums

BECAUSE = "all settings are judged in the same way"


def judged(run: Session, weights: Groups, job: Job) -> dict[str, Any]:
    """Loss of the weights on the first held-out rows: not packed, SDPA, nothing compiled. Where it
    is asked for, also as the setting trains. The model is built again beside the trained one."""
    if run.data.validation is None:
        return {"loss": None, "held_out_rows": 0, "held_out_tokens": 0}
    own = {
        # That these compute the same is a setting of its own.
        "kernels.compile": False,
        "kernels.fused_blocks": False,
        "kernels.loss_scaling": False,
        "kernels.checkpointing": "none",
    }
    common = {
        "data.packing": "none",
        "kernels.attention": "sdpa",
        "kernels.fused_loss": True,
        "kernels.precision": job.judged_in,
    }
    sums = _evaluated(run.plan.with_values(own | common, BECAUSE, "preset"), run, weights, job)
    found = {
        "loss": _mean(sums),
        "held_out_rows": sums.examples,
        "held_out_tokens": sums.targets,
    }
    if job.own_way:
        other = _evaluated(run.plan.with_values(own, BECAUSE, "preset"), run, weights, job)
        found["own_loss"] = _mean(other)
    return found


def _mean(sums: EvalSums) -> float | None:
    """None also where it is not finite: JSON has no word for that, and it agrees with nothing."""
    loss = sums.loss_sum.item() / sums.targets if sums.targets else math.nan
    return loss if math.isfinite(loss) else None


def _evaluated(plan: RunPlan, run: Session, weights: Groups, job: Job) -> EvalSums:
    """The held-out rows under a plan, with a model that is gone again afterwards."""
    from itertools import islice

    from expert.data.feed.run_data import split_batches
    from expert.training.evaluation import evaluate

    split, rows, batches_of = _held_out(plan, run.data, job.pace.held_out)
    built = build(plan, run.data.encoder, device=run.device)
    built.load(weights)
    built.loaded.module.eval()
    with split_batches(plan, split, rows=rows, device=run.device) as batches:
        sums = evaluate(built.engine, islice(batches, batches_of))
    assert sums is not None
    return sums


def _held_out(plan: RunPlan, data: RunData, most: int) -> tuple[PreparedSplit, int, int]:
    """The first validation rows as the plan lays them out, the batch size, and the batches."""
    import numpy as np

    from expert.data.pack.pack import pack_best_fit, pack_none

    split = data.validation
    assert split is not None
    rows = max(1, min(8, plan.batch.eval_batch, most))
    if plan.model.name == CHAR_GPT:  # blocks of one document, not rows
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
