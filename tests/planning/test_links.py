"""Links between cards and machines: named, known by the card, or unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from expert.planning.machine.host import Fact
from expert.planning.machine.links import (
    LINKS,
    Cluster,
    ImpossibleCluster,
    choose_cluster,
    target_per_rank,
)
from expert.planning.machine.target import choose_target
from tests.each import each
from tests.planning.planning import GIB, gpu, machine, target


def cluster(card: str | None = "rtx-4090", **asked: Any) -> Cluster:
    return choose_cluster(target(card), **{"ranks": 4, "nodes": 1, "link": None, **asked})


@each(
    ("card", "link"),
    [
        ("rtx-2080-ti", "pcie3"),
        ("rtx-4090", "pcie4"),
        ("rtx-5090", "pcie5"),
        ("h100-pcie", "pcie5"),
        ("h200", "nvlink"),
        ("a100-80gb", None),  # an older NVLink, which is not in the table
        ("b200", None),
        ("h100-nvl", None),
        ("rtx-4060-ti-16gb", None),  # eight lanes
        ("rtx-4090-laptop", None),
    ],
)
def test_a_card_is_joined_by_what_it_is_known_to_have_and_by_nothing_else(card, link):
    assert cluster(card).link == link
    assert cluster(card, link="nvlink").link == "nvlink"


def test_one_name_is_enough_for_one_machine_and_two_say_both():
    assert cluster(link="pcie5").link == "pcie5"
    both = cluster(ranks=8, nodes=2, link="pcie5, eth100")
    assert (both.link, both.network, both.ranks_per_node) == ("pcie5", "eth100", 4)
    alone = cluster(ranks=2, nodes=2, link="ib400")
    assert (alone.link, alone.network) == (None, "ib400")
    assert cluster(ranks=8, nodes=2).network is None


def test_the_slot_of_a_card_is_the_one_the_driver_reports():
    def host_link(generation: int, width: int) -> str | None:
        card = replace(
            gpu("NVIDIA GeForce RTX 5090", 32, (12, 0)),
            pcie_generation=Fact(generation, "test"),
            pcie_width=Fact(width, "test"),
        )
        here = choose_target(machine(card))
        return choose_cluster(here, ranks=2, nodes=1, link=None).host_link

    assert [host_link(4, 16), host_link(5, 16), host_link(5, 8)] == ["pcie4", "pcie5", None]


@each(
    ("asked", "told"),
    [
        ({"ranks": 3, "nodes": 2}, "3 processes cannot be divided evenly among 2 machines"),
        ({"link": "eth100"}, "eth100 is between machines, but there is one"),
        ({"ranks": 4, "nodes": 2, "link": "pcie4,nvlink"}, "two links of one kind"),
    ],
)
def test_all_problems_of_an_impossible_cluster_are_reported(asked, told):
    with pytest.raises(ImpossibleCluster, match=told):
        cluster(**asked)
    with pytest.raises(ImpossibleCluster) as caught:
        cluster(ranks=0, nodes=0, link="foo,eth100")
    assert len(str(caught.value).splitlines()) == 3
    assert all(name in str(caught.value) for name in LINKS)


def test_processes_on_a_cpu_divide_its_memory_and_cores():
    here = target(None)
    two = choose_cluster(here, ranks=2, nodes=1, link=None)
    share = target_per_rank(here, two)
    assert (share.budget_bytes, share.cores) == (here.budget_bytes // 2, here.cores // 2)
    assert share.total_bytes == here.total_bytes  # training must not depend on the ranks
    card = target("rtx-4090")
    assert target_per_rank(card, cluster()) == card


def test_several_cards_of_this_machine_are_planned_for_by_the_fullest():
    cards = [gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), held_gib=held) for held in (0, 6, 12)]
    here = machine(*cards)
    free = [choose_target(here, cards=count).budget_bytes // GIB for count in (1, 2, 3)]
    assert free == [24, 18, 12]
