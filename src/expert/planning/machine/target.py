"""The target of a plan: this machine's GPU, a named card, an amount of memory, or the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from expert.core.errors import ExpertError
from expert.manifest.schema.types import parse_size
from expert.planning.machine.cards import Card, card_by_nvml_name, find_card, suggest_cards
from expert.planning.machine.machine import Machine
from expert.planning.machine.nvml import Gpu

GIB = 2**30
# Cores assumed beside a card elsewhere: guides name 8 to 16.
CORES_BESIDE_A_NAMED_CARD = 8
# The driver and a display take 0.3-0.6 GiB of a desktop card before training starts.
SHARE_OF_A_NAMED_CARD = 0.97


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where training will run, as far as the plan needs to know."""

    device: Literal["cuda", "cpu"]
    name: str
    budget_bytes: int
    """Memory the run may use."""
    budget_because: str
    capability: tuple[int, int] | None
    card: Card | None
    cores: int
    is_this_machine: bool
    total_bytes: int
    """All memory within --vram, including what others hold now: choices that change the training
    depend on it, so that a run can be resumed beside other programs."""
    held_bytes: int = 0
    """Memory held by other processes on the card."""
    disk_free_bytes: int | None = None
    """Free disk space beside the manifest, if the plan is for this machine."""
    host_bytes: int | None = None
    """Free host memory, if the plan is for this machine."""


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, on all machines together, each with its own device."""

    ranks: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1:
            raise ExpertError("a run needs at least one card on each of its machines")
        if self.ranks % self.nodes:
            text = f"{self.ranks} processes cannot be divided evenly among {self.nodes} machines"
            raise ExpertError(text)

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def share_of(self, sequences: int) -> int:
        """Sequences of a step that the busiest rank computes."""
        return -(-sequences // self.ranks)


def choose_target(
    machine: Machine,
    *,
    gpu: str | None = None,
    vram: str | None = None,
    device: str = "auto",
    cards: int = 1,
) -> Target:
    """The card named with --gpu, else this machine's first GPU, else its CPU. `cards`: how many of
    this machine's cards are used; the plan is for the one with the least free memory."""
    try:
        limit = parse_size(vram) if vram is not None else None
    except ValueError as error:
        raise ExpertError(f"--vram: {error}") from None
    cores = machine.cores_available.value or 1
    elsewhere = Target(
        device="cuda",
        name="",
        budget_bytes=limit or 0,
        total_bytes=limit or 0,
        budget_because="--vram",
        capability=None,
        card=None,
        cores=cores,
        is_this_machine=False,
    )
    if gpu is not None:
        card = find_card(gpu)
        if card is None:
            near = suggest_cards(gpu)
            fix = f"did you mean {', '.join(near)}?" if near else "see: expert machine --cards"
            raise ExpertError(f"--gpu {gpu}: no such card in the table  ({fix})")
        memory = int(card.memory_gib * GIB * SHARE_OF_A_NAMED_CARD)
        budget = min(memory, limit) if limit else memory
        because = f"{SHARE_OF_A_NAMED_CARD:.0%} of {card.name}'s {card.memory_gib:.1f} GiB"
        return replace(
            elsewhere,
            name=card.name,
            budget_bytes=budget,
            total_bytes=budget,
            budget_because="--vram" if limit and limit < memory else because,
            capability=card.capability,
            card=card,
            cores=max(elsewhere.cores, CORES_BESIDE_A_NAMED_CARD),
        )
    here = replace(elsewhere, is_this_machine=True, disk_free_bytes=machine.disk_free_bytes.value)
    if machine.gpus and device != "cpu":
        here = replace(here, host_bytes=machine.ram_available_bytes.value)
        targets = [_on_this_gpu(card, limit, here) for card in machine.gpus[: max(1, cards)]]
        return min(targets, key=lambda target: target.budget_bytes)
    if limit is not None and device != "cpu":
        size = f"{limit / GIB:.3g} GiB" if limit >= GIB else f"{limit / 2**20:.0f} MiB"
        return replace(elsewhere, name=f"a card with {size}")
    because = "device: cpu" if device == "cpu" else "no GPU was found: see expert machine"
    ram = machine.ram_available_bytes.value or 0
    return replace(
        here,
        device="cpu",
        name=machine.cpu_model.value or "CPU",
        budget_bytes=ram,
        total_bytes=machine.ram_total_bytes.value or ram,
        budget_because=f"free memory of this machine ({because})",
    )


def _on_this_gpu(gpu: Gpu, limit: int | None, here: Target) -> Target:
    name = gpu.name.value or "NVIDIA GPU"
    total = gpu.memory_total_bytes.value or 0
    free = gpu.memory_free_bytes.value if gpu.memory_free_bytes.value is not None else total
    return replace(
        here,
        name=name,
        budget_bytes=min(free, limit) if limit else free,
        total_bytes=min(total, limit) if limit else total,
        budget_because="--vram" if limit and limit < free else f"free of {total / GIB:.1f} GiB",
        capability=gpu.capability.value,
        card=card_by_nvml_name(name, total),
        held_bytes=sum(holder.used_bytes or 0 for holder in gpu.holders.value or ()),
    )
