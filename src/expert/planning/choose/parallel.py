"""How the processes of a run share its work: the engine, the traffic, the joint rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from expert.core.text import counted, gib, percent, span
from expert.manifest.schema.kinds import OPTIMIZERS, SPLITS_WEIGHTS
from expert.planning.choose.communication import Traffic, joint_rate, traffic_of
from expert.planning.choose.expected_time import device_rate, run_shape
from expert.planning.choose.length import matching_rate, total_tokens
from expert.planning.choose.rates import measured_range
from expert.planning.decisions import Decision, Remark, Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.machine.links import LINKS
from expert.planning.measurements import MeasuredRate
from expert.planning.memory.fitting import (
    budget_of,
    host_bytes_of_node,
    lacking_host_bytes,
    largest_batch,
    peak_bytes,
    suggest_fit,
    with_fewest_checkpointed,
)
from expert.planning.memory.shards import checkpoint_bytes
from expert.planning.memory.workload import Workload
from expert.planning.run_plan import ParallelPlan

DEFAULT = "the default"
RANKS_PATH = "parallel.ranks"
_OF_A_STEP = ("sent_bytes", "communication_seconds", "tokens_per_second", "efficiency")
_ESTIMATES = ("rank_tokens_per_second", "alone_tokens_per_second", *_OF_A_STEP)


def settle_engine(draft: PlanDraft, work: Workload | None) -> None:
    """The engine and what it shards; `work`: what fits."""
    cluster, asked = draft.cluster, draft.config.distributed
    engine = work.engine if work is not None else _engine_without_sizes(draft)
    source: Source = "preset"
    because = DEFAULT
    if engine != "single":
        because, source = _engine_reason(draft, work)
    draft.settle("parallel.engine", engine, because, source)
    if engine == "single" and asked != "auto":
        text = f"distributed: {asked}: one process has nothing to share; it applies with --gpus"
        draft.supersede("parallel.engine", text)
    each, nodes = cluster.ranks_per_node, cluster.nodes
    because = f"{each} on each of {nodes} machines" if nodes > 1 else "on one machine"
    draft.settle("parallel.ranks", cluster.ranks, because if cluster.ranks > 1 else DEFAULT)
    draft.settle("parallel.nodes", nodes, "asked for" if nodes > 1 else DEFAULT)
    _settle_links(draft)
    shards = work.shards if work is not None else 1
    if work is None and engine in SPLITS_WEIGHTS:
        shards = each if each > 1 else cluster.ranks
    where = "of a machine" if shards < cluster.ranks else "together"
    because = f"the ranks {where} hold one copy of the weights" if shards > 1 else DEFAULT
    draft.settle("parallel.shard_ranks", shards, because)
    _settle_offload(draft, work)
    if work is not None:
        _warn_of_gathering(draft, work)
    if engine in SPLITS_WEIGHTS and cluster.ranks > 1:
        _settle_optimizer(draft, work)


def _settle_optimizer(draft: PlanDraft, work: Workload | None) -> None:
    """Replace an optimizer that cannot be sharded where all weights are trained and sharded."""
    path = "optim.optimizer"
    asked = draft[path]
    because = OPTIMIZERS[asked].not_shardable
    if not because or draft["adapter.type"] != "full":
        return
    plain = "adamw_torch_fused" if draft.on_gpu else "adamw_torch"
    taken = work.optimizer if work is not None else plain
    del draft.decisions[path]
    draft.settle(path, taken, because)
    draft.supersede(path, f"optim: {asked}: {because}; {taken} takes 8 bytes per weight, sharded")


def _engine_without_sizes(draft: PlanDraft) -> str:
    """For a model of unknown size, as the manifest says."""
    if draft.cluster.ranks == 1:
        return "single"
    return "sharded" if draft.config.distributed == "sharded" else "replicated"


def _engine_reason(draft: PlanDraft, work: Workload | None) -> tuple[str, Source]:
    """Why several processes use this engine, or one process offloads."""
    cluster, asked = draft.cluster, draft.config.distributed
    if work is None:
        because = f"what fits is not known: {draft.resolved.shape_from}"
        return (SET, "manifest") if asked != "auto" else (because, "preset")
    if work.offload:
        return "the card does not hold weights, gradients and optimizer state", "machine"
    if asked != "auto":
        return SET, "manifest"
    if work.engine == "replicated":
        because = f"everything fits each card ({gib(budget_of(draft))}): only gradients are sent"
        return because, "machine"
    alone = replace(work, engine="replicated", shards=1, rows=1)
    alone = with_fewest_checkpointed(draft, alone, budget_of(draft))
    needs = f"one card would need {gib(peak_bytes(draft, alone))} of {gib(budget_of(draft))}"
    if work.shards < cluster.ranks:
        return f"{needs}; sharded in a machine, replicated over {cluster.nodes}", "machine"
    if cluster.nodes > 1 and cluster.ranks_per_node > 1:
        return f"{needs}; one machine does not hold it either", "machine"
    return needs, "machine"


def _settle_links(draft: PlanDraft) -> None:
    cluster, path = draft.cluster, "parallel.link"
    if cluster.ranks == cluster.nodes:
        because = "one process" if cluster.ranks == 1 else "one card in each machine"
        draft.settle(path, None, because)
    else:
        draft.settle(path, cluster.link, cluster.link_because)
    path = "parallel.network"
    if cluster.nodes == 1:
        draft.settle(path, None, "one machine")
    elif cluster.network is None:
        draft.unknown("give --link the network between machines, such as eth100", path)
    else:
        draft.settle(path, cluster.network, LINKS[cluster.network].words)


def _settle_offload(draft: PlanDraft, work: Workload | None) -> None:
    path = "parallel.offload"
    if work is None or not work.offload:
        draft.settle(path, False, DEFAULT, "preset")
        draft.settle("parallel.host_link", None, "nothing is offloaded")
        draft.settle("parallel.host_bytes", None, "nothing is offloaded")
        lacking = lacking_host_bytes(draft, work) if work is not None else None
        if lacking is not None:
            free = gib(draft.target.host_bytes or 0)
            draft.warn(path, f"would fit, but needs {gib(lacking)} of memory and {free} are free")
        return
    on_the_card = peak_bytes(draft, replace(work, offload=False))
    because = f"without it {gib(on_the_card)} of {gib(budget_of(draft))} would be needed"
    draft.settle(path, True, f"the last resort: {because}")
    slot, path = draft.cluster.host_link, "parallel.host_link"
    if slot is None:
        draft.unknown(f"the slot of {draft.target.name} is not known; give --link", path)
    else:
        draft.settle(path, slot, LINKS[slot].words)
    needed = host_bytes_of_node(draft, work)
    what = "weights, gradients and optimizer state" if work.is_full_finetune else "weights"
    draft.settle("parallel.host_bytes", needed, f"{what} are kept there")
    if draft.target.host_bytes is None:
        text = f"each machine needs {gib(needed)} of free memory beside its cards"
        draft.warn("parallel.host_bytes", text)


def _warn_of_gathering(draft: PlanDraft, work: Workload) -> None:
    """Warn if the machine of rank 0 has no room to gather a checkpoint."""
    gathered, waiting = checkpoint_bytes(work), host_bytes_of_node(draft, work)
    free = draft.target.host_bytes
    if not gathered or free is None or gathered + waiting <= free:
        return
    beside = f" beside the {gib(waiting)} that are offloaded" if waiting else ""
    text = (
        f"rank 0 gathers a checkpoint in the memory of its machine: {gib(gathered)}{beside}, and "
        f"{gib(free)} are free  (train an adapter, or use a machine with more memory)"
    )
    draft.warn("parallel.shard_ranks", text)


# --- traffic and joint rate ----------------------------------------------------------------------


def settle_communication(draft: PlanDraft, work: Workload | None) -> None:
    """Bytes and seconds per step, the rate of all ranks and their efficiency."""
    sequences, ranks = draft["batch.sequences_per_update"], draft.cluster.ranks
    if sequences and (
        remark := too_few_sequences(ranks, sequences, draft["batch.examples_per_update"])
    ):
        draft.remarks.append(remark)
    paths = [f"parallel.{key}" for key in _ESTIMATES]
    if work is None and ranks > 1:
        draft.unknown(draft.resolved.shape_from, *paths)
    elif work is None or work.engine == "single":
        for path in paths:
            draft.settle(path, None, "one process")
    else:
        _settle_rates_of_a_card(draft, work)
        tokens = total_tokens(draft)
        known = ParallelEstimate(
            parallel=_parallel(draft),
            work=work,
            micro_batches=draft["batch.accumulation"],
            sequences=sequences,
            step_tokens=tokens / draft["length.total_steps"] if tokens else None,
            card=draft.target.name,
            measured=matching_rate(draft) if ranks > 1 else None,
            estimated=draft.decisions["parallel.rank_tokens_per_second"].source == "machine",
        )
        for decision in known.decisions():
            draft.decisions[decision.path] = decision
        if work.offload:
            draft.warn("parallel.offload", _offload_cost(draft, work))


def _parallel(draft: PlanDraft) -> ParallelPlan:
    """The parallel plan as settled so far."""
    return ParallelPlan.model_validate(draft.tree()["parallel"])


def too_few_sequences(ranks: int, sequences: int, examples: int) -> Remark | None:
    """The warning if a step has fewer sequences than there are ranks."""
    if ranks <= sequences:
        return None
    fills, waiting = math.ceil(examples * ranks / sequences), ranks - sequences
    text = f"a step has {counted(sequences, 'sequence')} for {ranks} ranks: {waiting} of them have "
    text += f"nothing to compute; batch_size: {fills} (rows of a step) would fill them"
    return Remark.warning(RANKS_PATH, text)


def _settle_rates_of_a_card(draft: PlanDraft, work: Workload) -> None:
    """The rate of one rank, and of one card alone."""
    path, alone_path = "parallel.rank_tokens_per_second", "parallel.alone_tokens_per_second"
    run, sequences = run_shape(draft, work), draft["batch.sequences_per_update"]
    if isinstance(run, str) or not sequences:
        reason = run if isinstance(run, str) else "the sequences per step are not known yet"
        draft.unknown(reason, path, alone_path)
        return
    share = draft.cluster.share_of(sequences) / sequences
    rate = device_rate(draft, replace(run, tokens=run.tokens * share))
    if isinstance(rate, str):
        draft.unknown(rate, path, alone_path)
        return
    source: Source = "measurement" if rate.measured else "machine"
    draft.settle(path, rate.rate, rate.because, source)
    single = replace(work, engine="single", shards=1, offload=False)
    most = largest_batch(draft, single, sequences, budget_of(draft))
    if not most:
        draft.settle(alone_path, None, "one card does not hold it")
        return
    whole = replace(run, work=single, micro_batches=math.ceil(sequences / most))
    alone = device_rate(draft, whole)
    assert not isinstance(alone, str)
    draft.settle(alone_path, alone.rate, alone.because, source)


def _offload_cost(draft: PlanDraft, work: Workload) -> str:
    """What offloading costs, and what would avoid it."""
    traffic = traffic_of(work, _parallel(draft), 1)
    text = f"slow: for each micro-batch {gib(traffic.host_bytes)} between card and machine"
    if traffic.gathered_bytes:
        text += f" and {gib(traffic.gathered_bytes)} between cards"
    if traffic.hidden_seconds is not None:
        text += f", {span(traffic.hidden_seconds)}"
    if traffic.optimizer_seconds:
        text += f", and the optimizer step on the CPU about {span(traffic.optimizer_seconds)}"
    alone = replace(work, engine="single", shards=1, offload=False)
    return f"{text}; on the card, {suggest_fit(draft, alone)}" if draft.cluster.ranks == 1 else text


@dataclass(frozen=True, kw_only=True)
class ParallelEstimate:
    """Inputs for traffic and rates, before the rows are prepared and after."""

    parallel: ParallelPlan
    work: Workload
    micro_batches: int | None
    """Of one rank in a step."""
    sequences: int | None
    step_tokens: float | None
    card: str
    estimated: bool
    """Whether the rate of one rank is an estimate rather than measured."""
    measured: MeasuredRate | None = None
    """The joint rate of a run like this one."""

    def decisions(self) -> Iterator[Decision]:
        """sent_bytes, communication_seconds, tokens_per_second and efficiency, with reasons."""
        if self.micro_batches is None and self.work.is_sharded:
            unknown = "the sequences per step are not known yet"
            yield from (_unknown(key, unknown) for key in _OF_A_STEP)
            return
        traffic = traffic_of(self.work, self.parallel, self.micro_batches or 1)
        yield _decided("sent_bytes", traffic.sent_bytes, self._what_is_sent(traffic))
        if traffic.seconds is None:
            yield _unknown("communication_seconds", self._missing_link())
        else:
            because = self._what_hides_it(traffic)
            yield _decided("communication_seconds", traffic.seconds, because)
        yield from self._reached(traffic)

    def _reached(self, traffic: Traffic) -> Iterator[Decision]:
        rank, alone = self.parallel.rank_tokens_per_second, self.parallel.alone_tokens_per_second
        if self.measured is not None:
            rate = measured_range(self.measured.tokens_per_second, "run")
            because = f"measured on {self.measured.measured_on} in a run like this one"
            yield _decided("tokens_per_second", rate, because, "measurement")
            yield _unknown("efficiency", "no single card was measured beside it")
            return
        if rank is None or not self.step_tokens or not self.sequences:
            unknown = "the rate of one rank is not known"
            yield from (_unknown(key, unknown) for key in _OF_A_STEP[2:])
            return
        reached = joint_rate(
            traffic,
            rank,
            alone,
            tokens=self.step_tokens,
            sequences=self.sequences,
            ranks=self.parallel.ranks,
        )
        if reached is None:
            yield from (_unknown(key, self._missing_link()) for key in _OF_A_STEP[2:])
            return
        kind = "estimated" if self.estimated else "from the measured rate of one card"
        low, high = reached.waiting
        waits = "less than 1 %" if high < 0.01 else f"{percent(low)} to {percent(high)}"
        what = "communication and the CPU" if self.work.offload else "communication"
        because = f"{kind}: cards wait for {what} {waits} of a step"
        yield _decided("tokens_per_second", reached.tokens_per_second, because)
        ranks = self.parallel.ranks
        beside = f"{ranks} single cards" if alone is not None else f"{ranks} cards with room for it"
        beside = "one card with room for it" if ranks == 1 else beside
        because = f"of what {beside} would reach"
        if reached.balance < 1:
            because += f"; {self.sequences} sequences keep ranks busy {percent(reached.balance)}"
        yield _decided("efficiency", reached.efficiency, because)

    def _what_is_sent(self, traffic: Traffic) -> str:
        parts, micro = [], self.micro_batches or 1
        each = "a micro-batch" if micro == 1 else f"each of {micro} micro-batches"
        if traffic.summed_bytes:
            parts.append(f"{gib(traffic.summed_bytes)} to sum gradients once a step")
        if traffic.gathered_bytes:
            what = "weights and gradients" if self.work.is_full_finetune else "weights"
            parts.append(f"{gib(traffic.gathered_bytes / micro)} of {what} for {each}")
        if traffic.host_bytes:
            words = f"{gib(traffic.host_bytes / micro)} to and from the memory of the machine"
            parts.append(f"{words} for {each}")
        return "; ".join(parts)

    def _what_hides_it(self, traffic: Traffic) -> str:
        if not traffic.hidden_seconds:
            return "after the last backward: nothing hides it"
        return f"{span(traffic.hidden_seconds)} of it while blocks compute"

    def _missing_link(self) -> str:
        parallel = self.parallel
        if parallel.nodes > 1 and parallel.network is None:
            return "the network between the machines is not known; give --link"
        if self.work.offload and parallel.host_link is None:
            return f"the slot of {self.card} is not known; give --link"
        return f"the link between {self.card} and the next is not known; give --link"


def _decided(key: str, value: Any, because: str, source: Source = "machine") -> Decision:
    value = list(value) if isinstance(value, tuple) else value
    return Decision(path=f"parallel.{key}", value=value, because=because, source=source)


def _unknown(key: str, because: str) -> Decision:
    return _decided(key, None, f"unknown: {because}")
