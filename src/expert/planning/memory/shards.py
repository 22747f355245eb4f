"""Memory of one card and its machine if several cards share a run.

R ranks train together. Replicated, each holds everything that a single card would, for its own
micro-batch, and a float32 buffer in which the gradients of all trainable weights are reduced piece
by piece:

    gradient sum        4 min(T, 2**25)         T trainable weights

Sharded (FSDP2, a group for each block and one for the rest), S ranks hold one copy of the weights
together. S is the ranks of a machine, or all ranks if a machine cannot hold the model. P weights, b
of them in a block, e in the rest (embeddings, head, last norm); w bytes per weight in the precision
of the run, s bytes per weight of the frozen base as stored: w, or NF4 codes and scales, or int8 and
scales.

    frozen base         s P / S                 codes are cut like plain tensors, scales stay whole
    masters             4 P / S                 full fine-tuning: float32
    gradients           4 P / S                 full fine-tuning: float32, while accumulating
    optimizer           state P / S             full fine-tuning
    adapter             as on one card          whole on every rank, with gradients and optimizer
    gradient sum        4 min(T, 2**25)         of adapters, as replicated
    gathered weights    G s b + w e             adapters: blocks are gathered as stored
                        G w b + w e             full fine-tuning: gathered in 16 bits
    reduced gradients   (4 + w) b + w h         full fine-tuning: whole before they are scattered
    activations         as with an adapter      the residual stream is in 16 bits too

G blocks are gathered at a time: the one that computes and the next one, which FSDP2 prefetches. The
rest (e) is gathered in the forward and stays until the end of the backward, as FSDP2 treats the
root module. During the backward of a block its gradients are whole, in 16 bits and in the float32
copy that is scattered, and so is that of the head (h weights), which waits for the rest. The
gradients of the rest come last, when no activations are left: 16 bits and their float32 copy,
(w + 4) e, if that exceeds everything temporary before (seen with torch's FSDP memory tracker).
Offloaded, everything divided by S above is kept in host memory, and a block's shard is on the card
only while it is gathered.

The constants follow from FSDP2's design. docs/benchmarks/shards-memory-h200.json has the memory of
a rank of 2 to 64 on an H200 with torch's fake process group; a test compares this file with it.
"""

from __future__ import annotations

from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.memory.workload import Workload

GATHERED_BLOCKS = 2
"""G: the block that computes and the prefetched one."""
GATHERED_SLACK = 1.35
"""For embedding and head: 1.32 for 8B, 1.35 for 32B and 1.39 for 70B with LoRA
(docs/benchmarks/shards-memory-h200.json)."""
REDUCE_CHUNK = 2**25
"""Numbers reduced over ranks in one piece (parallel/replicated.py)."""
SUMMED_BYTES = 4
"""Of a gradient while it is reduced over ranks: float32."""
MASTER_BYTES = 4
COMMUNICATOR_BYTES = 256 * 2**20
"""NCCL's buffers, outside the allocator: 4 MiB per channel, up to 32 channels, two directions.
From its defaults, not measured."""


def shared_parts(parts: dict[str, float], work: Workload, width: int) -> dict[str, float]:
    """What each card holds, by purpose, given what a single card would hold. `width`: bytes per
    weight in the precision of the run."""
    if work.engine == "single":
        return parts
    if work.engine == "replicated":
        return {**parts, "gradient_sum": reduce_buffer_bytes(work)}
    share = 0.0 if work.offload else 1 / work.shards
    rest = width * work.shape.rest_parameters
    kept = {**parts, "base_weights": share * parts["base_weights"]}
    if not work.is_full_finetune:
        stored = parts["base_weights"] + parts["quantisation_tables"]
        block = max(0.0, stored - rest) / work.shape.layers
        summed = reduce_buffer_bytes(work)
        fetched = GATHERED_BLOCKS * block / work.shards if work.offload else 0.0
        gathered = GATHERED_BLOCKS * block + rest + fetched
        return {**kept, "gathered_weights": gathered, "gradient_sum": summed}
    gradients = MASTER_BYTES * work.trainable_parameters if work.accumulates else 0
    whole_block = work.shape.block_parameters
    gathered = GATHERED_BLOCKS * width * whole_block + rest
    head = width * work.shape.vocab * work.shape.hidden
    reduced = (SUMMED_BYTES + width) * whole_block + head
    before = gathered + reduced + sum(parts[key] for key in ("activations", "workspace", "loss"))
    at_the_end = (width + SUMMED_BYTES) * work.shape.rest_parameters
    fetched = GATHERED_BLOCKS * MASTER_BYTES * whole_block / work.shards if work.offload else 0.0
    return {
        **kept,
        "optimizer": share * parts["optimizer"],
        "gradients": share * gradients,
        "gathered_weights": gathered + fetched,
        "gradient_sum": reduced + max(0.0, at_the_end - before),
    }


def reduce_buffer_bytes(work: Workload) -> int:
    """The buffer in which gradients are reduced over ranks, piece by piece."""
    return SUMMED_BYTES * min(work.trainable_parameters, REDUCE_CHUNK)


def slack_bytes(work: Workload, width: int) -> int:
    """Allocator overhead with sharded weights: embedding and head are gathered, and in full
    fine-tuning their gradients scattered, on separate streams, whose blocks no other stream
    reuses."""
    rest = work.shape.rest_parameters
    reduced = SUMMED_BYTES * rest if work.is_full_finetune else 0
    return int(GATHERED_SLACK * width * rest) + reduced


def host_bytes(work: Workload, base: float) -> int:
    """Host memory for each rank with offloaded shards. `base`: bytes of the whole base, with its
    scales."""
    if not work.offload:
        return 0
    if not work.is_full_finetune:
        return int(base / work.shards)
    state = OPTIMIZERS[work.optimizer].state_bytes
    return int((2 * MASTER_BYTES + state) * work.trainable_parameters / work.shards)


def checkpoint_bytes(work: Workload) -> int:
    """What rank 0 gathers in host memory to write a checkpoint: all trained weights and their
    optimizer state, if sharded. Adapters are not."""
    if not work.is_sharded or not work.is_full_finetune:
        return 0
    state = OPTIMIZERS[work.optimizer].state_bytes
    return int((MASTER_BYTES + state) * work.trainable_parameters)
