"""The links between the processes of a run, within a machine and between machines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from expert.core.errors import ExpertError
from expert.planning.machine.cards import AMPERE, HOPPER
from expert.planning.machine.target import Target


class ImpossibleCluster(ExpertError):
    """Impossible numbers of cards or machines, or links; with all reasons."""


@dataclass(frozen=True)
class Link:
    """A link of a card or machine, and its speed."""

    words: str
    bytes_per_second: float
    """In one direction, as achieved by collectives; less than on the data sheet."""
    between_machines: bool = False


LINKS = {
    "pcie3": Link("PCIe 3 x16", 12e9),
    "pcie4": Link("PCIe 4 x16", 25e9),
    "pcie5": Link("PCIe 5 x16", 50e9),
    "nvlink": Link("NVLink of H100 and H200", 450e9),
    "eth10": Link("10 Gb/s Ethernet", 1.1e9, True),
    "eth25": Link("25 Gb/s Ethernet", 2.8e9, True),
    "eth100": Link("100 Gb/s Ethernet", 11e9, True),
    "ib400": Link("400 Gb/s InfiniBand", 45e9, True),
}
_NVLINK_CARDS = ("h100", "h200", "h20")
# Joined by another NVLink, or with fewer than 16 lanes: their speed is not in the table.
_OTHER_LINKS = re.compile(r"sxm|^(a100|v100)-\d+gb$|^(b|gh)[23]00|-nvl$")
_FEWER_LANES = re.compile(r"rtx-(3050|4060|5050|5060|2000-ada)|^a2$|laptop")
_PCIE = {3: "pcie3", 4: "pcie4", 5: "pcie5"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a run: how many, on how many machines, and their links."""

    ranks: int
    """On all machines together, each with its own device."""
    nodes: int
    link: str | None
    """Between the cards of a machine; None if unknown."""
    link_because: str
    network: str | None
    """Between machines; None if unknown or there is only one."""
    host_link: str | None
    """Between a card and host memory."""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def share_of(self, sequences: int) -> int:
        """Sequences of a step that the busiest rank computes."""
        return math.ceil(sequences / self.ranks)


def bytes_per_second(link: str | None) -> float | None:
    return LINKS[link].bytes_per_second if link is not None else None


def choose_cluster(target: Target, *, ranks: int, nodes: int, link: str | None) -> Cluster:
    """The processes to plan for. `link`: one name, or two separated by a comma, for the cards of a
    machine and between machines."""
    problems = list(cluster_problems(ranks=ranks, nodes=nodes, link=link))
    if problems:
        raise ImpossibleCluster("\n".join(problems))
    given = [name.strip() for name in link.split(",")] if link else []
    inside = next((name for name in given if not LINKS[name].between_machines), None)
    between = next((name for name in given if LINKS[name].between_machines), None)
    here, because = _link_of(target)
    if inside is not None:
        here, because = inside, LINKS[inside].words
    return Cluster(
        ranks=ranks,
        nodes=nodes,
        link=here if ranks > nodes else None,
        link_because=because,
        network=between if nodes > 1 else None,
        host_link=_host_link(target, inside),
    )


def target_per_rank(target: Target, cluster: Cluster) -> Target:
    """What one process may use of its machine. Each has its own card; processes on a CPU divide its
    memory, and all divide the cores of this machine."""
    processes = cluster.ranks_per_node
    if processes == 1:
        return target
    memory = target.budget_bytes // (processes if target.device == "cpu" else 1)
    cores = max(1, target.cores // processes) if target.is_this_machine else target.cores
    return replace(target, budget_bytes=memory, cores=cores)


def cluster_problems(*, ranks: int, nodes: int, link: str | None) -> Iterator[str]:
    """Everything that is wrong with the request."""
    if nodes < 1:
        yield f"--nodes {nodes}: a run needs at least one machine"
    if ranks < 1:
        yield "--gpus: a run needs at least one card on each machine"
    elif nodes > 1 and ranks % nodes:
        yield f"{ranks} processes cannot be divided evenly among {nodes} machines"
    seen: set[bool] = set()
    for name in link.split(",") if link else ():
        known = LINKS.get(name.strip())
        if known is None:
            yield f"--link {name.strip()}: no such link  (known: {', '.join(LINKS)})"
            continue
        if known.between_machines in seen:
            yield f"--link {link}: two links of one kind  (one for the cards of a machine, one for"
            yield "  the network between machines, such as pcie4,eth100)"
        if known.between_machines and nodes == 1:
            yield f"--link {name.strip()} is between machines, but there is one  (add --nodes)"
        seen.add(known.between_machines)


def _link_of(target: Target) -> tuple[str | None, str]:
    """The link between the cards of a machine, and why it is assumed."""
    card = target.card
    if target.device == "cpu":
        return None, "processes on one CPU share its memory"
    if card is not None and card.slug in _NVLINK_CARDS:
        return "nvlink", f"{card.name} is sold on boards with NVLink; --link names another"
    host = _host_link(target, None)
    if host is None or (card is not None and _OTHER_LINKS.search(card.slug)):
        return None, f"unknown: the link between cards of {target.name} is not known; give --link"
    where = "as the driver reports it" if target.pcie is not None else "if the slot has it"
    return host, f"{LINKS[host].words}, {where}; --link names another"


def _host_link(target: Target, given: str | None) -> str | None:
    """The slot of a card: named by the user, reported by the driver, or by its generation."""
    if target.device == "cpu":
        return None
    if given in _PCIE.values():
        return given
    if target.pcie is not None:
        generation, width = target.pcie
        return _PCIE.get(generation) if width >= 16 else None
    card = target.card
    if card is None or target.is_this_machine or _FEWER_LANES.search(card.slug):
        return None
    if card.capability < AMPERE:
        return "pcie3"
    return "pcie5" if card.capability >= HOPPER else "pcie4"
