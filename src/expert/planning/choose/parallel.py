"""How the processes of a run share its work: the engine, shards and offloading."""

from __future__ import annotations

import math
from dataclasses import replace

from expert.core.text import counted, gib
from expert.manifest.schema.kinds import OPTIMIZERS, SPLITS_WEIGHTS
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.memory.fitting import (
    budget_of,
    host_bytes_of_node,
    peak_bytes,
    with_fewest_checkpointed,
)
from expert.planning.memory.shards import checkpoint_bytes
from expert.planning.memory.workload import Workload

DEFAULT = "the default"


def settle_engine(draft: PlanDraft, work: Workload | None) -> None:
    """The engine and what it shards; `work`: what fits."""
    cluster, asked = draft.cluster, draft.config.distributed
    each, nodes, shards = cluster.ranks_per_node, cluster.nodes, 1
    engine = "sharded" if asked == "sharded" else "replicated"
    if work is not None:
        engine, shards = work.engine, work.shards
    elif cluster.ranks == 1:
        engine = "single"
    elif engine in SPLITS_WEIGHTS:
        shards = each if each > 1 else cluster.ranks
    source: Source = "preset"
    because = DEFAULT
    if engine != "single":
        because, source = _engine_reason(draft, work)
    draft.settle("parallel.engine", engine, because, source)
    if engine == "single" and asked != "auto":
        text = f"distributed: {asked}: one process has nothing to share; it applies with --gpus"
        draft.supersede("parallel.engine", text)
    because = f"{each} on each of {nodes} machines" if nodes > 1 else "on one machine"
    draft.settle("parallel.ranks", cluster.ranks, because if cluster.ranks > 1 else DEFAULT)
    draft.settle("parallel.nodes", nodes, "asked for" if nodes > 1 else DEFAULT)
    because = "ranks that hold one copy of the weights together"
    draft.settle("parallel.shard_ranks", shards, because if shards > 1 else DEFAULT)
    _settle_offload(draft, work)
    gathered, waiting = (0, 0)
    if work is not None:
        gathered, waiting = checkpoint_bytes(work), host_bytes_of_node(draft, work)
    free = draft.target.host_bytes
    if gathered and free is not None and gathered + waiting > free:
        beside = f" beside the {gib(waiting)} that are offloaded" if waiting else ""
        text = f"rank 0 gathers a checkpoint in the memory of its machine: {gib(gathered)}{beside},"
        text += f" and {gib(free)} are free  (train an adapter, or use a machine with more memory)"
        draft.warn("parallel.shard_ranks", text)
    # An optimizer that cannot be sharded is replaced where all weights are trained and sharded.
    optimizer, path = draft["optim.optimizer"], "optim.optimizer"
    obstacle = OPTIMIZERS[optimizer].not_shardable
    shards_all = engine in SPLITS_WEIGHTS and cluster.ranks > 1 and draft["adapter.type"] == "full"
    if obstacle and shards_all:
        plain = "adamw_torch_fused" if draft.on_gpu else "adamw_torch"
        taken = work.optimizer if work is not None else plain
        del draft.decisions[path]
        draft.settle(path, taken, obstacle)
        text = f"optim: {optimizer}: {obstacle}; {taken} takes 8 bytes per weight, sharded"
        draft.supersede(path, text)
    sequences, ranks = draft["batch.sequences_per_update"], cluster.ranks
    if sequences and ranks > sequences:
        fills = math.ceil(draft["batch.examples_per_update"] * ranks / sequences)
        text = f"a step has {counted(sequences, 'sequence')} for {ranks} ranks: "
        text += f"{ranks - sequences} of them have nothing to compute; batch_size: {fills} (rows "
        draft.warn("parallel.ranks", f"{text}of a step) would fill them")


def _engine_reason(draft: PlanDraft, work: Workload | None) -> tuple[str, Source]:
    """Why several processes use this engine, or one process offloads."""
    if work is not None and work.offload:
        return "the card does not hold weights, gradients and optimizer state", "machine"
    if draft.config.distributed != "auto":
        return SET, "manifest"
    if work is None:
        return f"what fits is not known: {draft.resolved.shape_from}", "preset"
    if work.engine == "replicated":
        because = f"everything fits each card ({gib(budget_of(draft))}): only gradients are sent"
        return because, "machine"
    alone = replace(work, engine="replicated", shards=1, rows=1)
    alone = with_fewest_checkpointed(draft, alone, budget_of(draft))
    needs = f"one card would need {gib(peak_bytes(draft, alone))} of {gib(budget_of(draft))}"
    return needs, "machine"


def _settle_offload(draft: PlanDraft, work: Workload | None) -> None:
    path = "parallel.offload"
    if work is None or not work.offload:
        draft.settle(path, False, DEFAULT, "preset")
        draft.settle("parallel.host_bytes", None, "nothing is offloaded")
        return
    on_the_card = peak_bytes(draft, replace(work, offload=False))
    because = f"without it {gib(on_the_card)} of {gib(budget_of(draft))} would be needed"
    draft.settle(path, True, f"the last resort: {because}")
    text = "slow: weights, gradients and optimizer steps go through the memory of the machine"
    draft.warn(path, text)
    needed = host_bytes_of_node(draft, work)
    what = "weights, gradients and optimizer state" if work.is_full_finetune else "weights"
    draft.settle("parallel.host_bytes", needed, f"{what} are kept there")
    if draft.target.host_bytes is None:
        text = f"each machine needs {gib(needed)} of free memory beside its cards"
        draft.warn("parallel.host_bytes", text)
