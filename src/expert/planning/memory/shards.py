"""Memory of one card, and of its machine, where several cards share a run.

R ranks train together. Replicated, each of them holds everything that one card would, for its own
micro-batch, and one flat float32 buffer in which the gradients of all trainable weights are summed:

    gradient sum        4 T                     T trainable weights

Sharded (FSDP2, a group for each block and one for the rest), S ranks hold one copy of the weights
between them. S is the ranks of a machine, or all of them where a machine does not hold the model.
P weights, b of them in a block, e in the rest (embeddings, head, last norm); w bytes a weight in
the precision of the run, s bytes a weight of the frozen base as it is stored: w, or NF4 codes and
scales, or int8 and scales.

    frozen base         s P / S                 codes and scales are cut like plain tensors
    masters             4 P / S                 full fine-tuning: float32
    gradients           4 P / S                 full fine-tuning: float32, while steps accumulate
    optimizer           state P / S             full fine-tuning
    adapter             as on one card          whole on every rank, with gradients and optimizer
    gradient sum        4 T                     of adapters, as replicated
    gathered weights    G s b + w e             adapters: blocks are gathered as they are stored
                        G w b + w e             full fine-tuning: gathered in 16 bits
    reduced gradients   D 4 b + w e             full fine-tuning: whole before they are scattered

G blocks are whole at once: the one that computes and the next one, which FSDP2 fetches ahead. The
rest (e) is gathered in the forward and stays until the end of the backward, as FSDP2 treats the
root module. D blocks of gradients are whole at once: the one walked back, and the one before it,
which is being scattered. The gradients of the rest come last, when no activations are left: 16 bits
and their float32 copy, (w + 4) e, where that is more than all that comes and goes before (seen with
torch's FSDP memory tracker). Offloaded, everything that is divided by S above waits in the memory
of the machine, and a block's shard is on the card only while it is gathered.

The constants below are FSDP2's way of working, read off torch 2.13, not measurements.
"""

from __future__ import annotations

from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.memory.workload import Workload

GATHERED_BLOCKS = 2
"""G: the block that computes and the one that is fetched ahead."""
REDUCED_BLOCKS = 2
"""D: the block that is walked back and the one whose gradients are being scattered."""
SUMMED_BYTES = 4
"""Of a gradient while it is summed over ranks: float32."""
MASTER_BYTES = 4
COMMUNICATOR_BYTES = 256 * 2**20
"""NCCL's buffers, outside the allocator: 4 MiB for each of up to 32 channels, in two directions.
Counted from its defaults, not measured."""


def shared_parts(parts: dict[str, float], work: Workload, width: int) -> dict[str, float]:
    """What a card holds, by purpose, of what one card alone would. `width`: bytes of a weight in
    the precision of the run."""
    if work.engine == "single":
        return parts
    if work.engine == "replicated":
        return {**parts, "gradient_sum": SUMMED_BYTES * work.trainable_parameters}
    share = 0.0 if work.offload else 1 / work.shards
    rest = width * work.shape.rest_parameters
    kept = {
        **parts,
        "base_weights": share * parts["base_weights"],
        "quantisation_tables": share * parts["quantisation_tables"],
    }
    if not work.trains_everything:
        stored = parts["base_weights"] + parts["quantisation_tables"]
        block = max(0.0, stored - rest) / work.shape.layers
        summed = SUMMED_BYTES * work.trainable_parameters
        fetched = GATHERED_BLOCKS * block / work.shards if work.offload else 0.0
        gathered = GATHERED_BLOCKS * block + rest + fetched
        return {**kept, "gathered_weights": gathered, "gradient_sum": summed}
    gradients = MASTER_BYTES * work.trainable_parameters if work.accumulates else 0
    whole_block = work.shape.block_parameters
    gathered = GATHERED_BLOCKS * width * whole_block + rest
    reduced = REDUCED_BLOCKS * SUMMED_BYTES * whole_block + rest
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


def host_bytes(work: Workload, base: float) -> int:
    """What waits in the memory of the machine for each rank whose shards are offloaded. `base`:
    bytes of the whole base, with its scales."""
    if not work.offload:
        return 0
    if not work.trains_everything:
        return int(base / work.shards)
    state = OPTIMIZERS[work.optimizer].state_bytes
    return int((2 * MASTER_BYTES + state) * work.trainable_parameters / work.shards)
