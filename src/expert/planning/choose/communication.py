"""What the ranks of a run send in a step, how long that takes, and their joint rate.

Replicated: gradients are all-reduced once per step in a ring: each rank sends 2 (R-1)/R of them.
This starts after the last backward, so nothing hides it.

Sharded: for each micro-batch every rank gathers the blocks in the forward and again in the
backward, (S-1)/S of their bytes, and the rest of the model once; full fine-tuning also scatters
float32 gradients. FSDP2 gathers a block while the previous one computes: a step takes as long as
the longer of the two. Gradients of adapters, and of shards replicated over several machines, are
reduced once per step, which nothing hides. A machine has one network link, shared by its ranks.

Offloaded: shards come over the card's PCIe slot, in float32 where all weights are trained, and
gradients go back; the optimizer step is limited by host memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from expert.manifest.schema.kinds import OPTIMIZERS
from expert.planning.choose.rates import Range
from expert.planning.machine.links import Cluster, bytes_per_second
from expert.planning.memory.memory import PRECISION_BYTES, base_bytes
from expert.planning.memory.shards import MASTER_BYTES, SUMMED_BYTES
from expert.planning.memory.workload import Workload
from expert.planning.run_plan import ParallelPlan

# Bytes per second that torch's fused AdamW moves on a CPU: 5.4e9 on two cores of an Arm server, so
# about this on eight. Other processors were not measured.
HOST_MEMORY = 20e9
# At the slow end links reach this share of the table: cards without peer access copy through host
# memory, and slots share lanes. Not measured.
SLOW_LINK = 0.7


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a card sends in a step; seconds are None if a link is unknown."""

    summed_bytes: float
    """Gradients reduced once per step."""
    gathered_bytes: float = 0.0
    """Weights gathered and gradients scattered, over all micro-batches."""
    host_bytes: float = 0.0
    """Between the card and host memory."""
    waiting_seconds: float | None
    """During which the card does not compute."""
    hidden_seconds: float | None = 0.0
    """During which it may compute."""
    optimizer_seconds: float = 0.0
    """Part of the waiting: the optimizer step on the CPU."""

    @property
    def sent_bytes(self) -> int:
        return int(self.summed_bytes + self.gathered_bytes + self.host_bytes)

    @property
    def seconds(self) -> float | None:
        if self.waiting_seconds is None or self.hidden_seconds is None:
            return None
        return self.waiting_seconds - self.optimizer_seconds + self.hidden_seconds

    def step_seconds(self, computing: float, share: float = 1.0) -> float | None:
        """Seconds of a step with `computing` seconds of compute; `share`: of the link speed."""
        if self.waiting_seconds is None or self.hidden_seconds is None:
            return None
        return max(computing, self.hidden_seconds / share) + self.waiting_seconds / share


def traffic_of(work: Workload, parallel: ParallelPlan | Cluster, micro_batches: int) -> Traffic:
    """What a rank sends in a step of `micro_batches` micro-batches."""
    gradients, ranks = SUMMED_BYTES * work.trainable_parameters, parallel.ranks
    of_a_node = ranks // parallel.nodes
    if work.engine == "replicated" or not work.is_full_finetune:
        summed = _ring(ranks) * gradients
        waiting = _over(summed, _slowest(parallel, ranks))
    else:  # shards of gradients, reduced over the machines that hold copies of them
        summed = _ring(ranks // work.shards) * gradients / work.shards
        waiting = _over(summed * of_a_node, bytes_per_second(parallel.network))
    if work.engine == "replicated":
        return Traffic(summed_bytes=summed, waiting_seconds=waiting)
    gathered = micro_batches * _gathered(work)
    moved = micro_batches * _offload_traffic(work) if work.offload else 0.0
    on_cpu = _optimizer_seconds(work, of_a_node) if work.offload else 0.0
    hidden = _over(gathered, _slowest(parallel, work.shards))
    moving = _over(moved, bytes_per_second(parallel.host_link))
    return Traffic(
        summed_bytes=summed,
        gathered_bytes=gathered,
        host_bytes=moved,
        waiting_seconds=None if waiting is None else waiting + on_cpu,
        hidden_seconds=None if hidden is None or moving is None else hidden + moving,
        optimizer_seconds=on_cpu,
    )


def _slowest(parallel: ParallelPlan | Cluster, ranks: int) -> float | None:
    """Bytes per second of a ring through `ranks` ranks; None if a link is unknown."""
    of_a_node = parallel.ranks // parallel.nodes
    used = [parallel.link] if of_a_node > 1 else []
    used += [parallel.network] if ranks > of_a_node else []
    speeds = [bytes_per_second(name) or 0.0 for name in used]
    return min(speeds, default=0.0) or None


@dataclass(frozen=True)
class JointRate:
    """The joint rate of all ranks, each value as a range from slowest to fastest."""

    tokens_per_second: Range
    efficiency: Range
    """Relative to the same number of single cards."""
    waiting: Range
    """Share of a step spent waiting for communication."""
    balance: float
    """Mean load of a rank relative to the busiest."""


def joint_rate(
    traffic: Traffic, rank: Range, alone: Range | None, *, tokens: float, sequences: int, ranks: int
) -> JointRate | None:
    """The joint rate; None if a link is unknown. `rank`: tokens per second of a computing rank;
    `alone`: of one card computing whole steps, None if it cannot; `tokens`: per step."""
    share = -(-sequences // ranks) / sequences
    computing = [tokens * share / rate for rate in rank]
    slow = traffic.step_seconds(computing[0], SLOW_LINK)
    fast = traffic.step_seconds(computing[1])
    if slow is None or fast is None:
        return None
    rates = (tokens / slow, tokens / fast)
    single = alone or rank
    efficient = sorted(rate / (ranks * card) for rate, card in zip(rates, single, strict=True))
    waiting = sorted((1 - computing[0] / slow, 1 - computing[1] / fast))
    return JointRate(
        rates,
        (efficient[0], min(1.0, efficient[1])),
        (waiting[0], waiting[1]),
        1 / (ranks * share),
    )


def _ring(ranks: int) -> float:
    """The share each rank sends in a ring all-reduce: once to add, once to distribute."""
    return 2 * (ranks - 1) / ranks


def _gathered(work: Workload) -> float:
    """Bytes sent per micro-batch: blocks in forward and backward, the rest once, and scattered
    gradients."""
    width, shape = PRECISION_BYTES[work.precision], work.shape
    rest = width * shape.rest_parameters
    blocks = float(sum(base_bytes(work)) - rest)
    scattered = 0.0
    if work.is_full_finetune:
        blocks = float(width * shape.layers * shape.block_parameters)
        scattered = float(SUMMED_BYTES * shape.parameters)
    return (work.shards - 1) / work.shards * (2 * blocks + rest + scattered)


def _offload_traffic(work: Workload) -> float:
    """Bytes over the card's slot per micro-batch: weights twice, and gradients back."""
    if work.is_full_finetune:
        return 3 * MASTER_BYTES * work.shape.parameters / work.shards
    return 2 * sum(base_bytes(work)) / work.shards


def _optimizer_seconds(work: Workload, ranks: int) -> float:
    """Seconds of the optimizer step on the CPU for all ranks of a machine: it reads the gradients,
    and reads and writes the weights and the optimizer state."""
    if not work.is_full_finetune:
        return 0.0
    touched = 3 * MASTER_BYTES + 2 * OPTIMIZERS[work.optimizer].state_bytes
    return ranks * touched * work.trainable_parameters / work.shards / HOST_MEMORY


def _over(count: float, speed: float | None) -> float | None:
    """Seconds to send `count` bytes; None if the speed is unknown."""
    if not count:
        return 0.0
    return count / speed if speed else None
