"""Ranks that come late, not at all, twice, or to another place."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from typing import Any

import pytest

from expert.core.errors import EXIT_RUN_FAILED, EXIT_USAGE
from expert.core.world import World
from tests.parallel.ranks import Ended, free_port, ranks

LATE_SECONDS = 0.6


def came(index: World, worlds: list[tuple[int, int, float]], address: str, limit: float) -> Any:
    """What a process said while it waited, and how it ended. `worlds`: for each process its rank,
    the size of its world and the seconds by which it is late."""
    from expert.core.errors import ExpertError
    from expert.parallel import meeting
    from expert.parallel.group import open_group

    meeting.REPORT_AFTER_SECONDS, meeting.PRESENT_SECONDS = LATE_SECONDS / 3, 0.5
    meeting.CONNECT_SECONDS, meeting.EXTRA_WAIT_SECONDS = 1.0, 2.0
    rank, size, late = worlds[index.rank]
    time.sleep(late)
    host, _, port = address.partition(":")
    os.environ["MASTER_ADDR"] = host
    if port:
        os.environ["MASTER_PORT"] = port
    told: list[str] = []
    world = World(rank=rank, size=size, local_rank=0, local_size=1)
    try:
        with open_group(world, device="cpu", limit=limit, tell=told.append) as group:
            total = group.total(rank + 1)
            group.exit_barrier()
    except ExpertError as error:
        return told, error.exit_code, str(error)
    return told, 0, total


def ended_of(*worlds: tuple[int, int, float], address: str = "127.0.0.1", limit: float = 20) -> Any:
    ended: list[Ended] = ranks(len(worlds), came, list(worlds), address, limit)
    for each in ended:
        assert not each.raised, each.raised
    return [each.made for each in ended]


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_waited_for_with_a_line_that_names_it(late):
    worlds = [(rank, 2, LATE_SECONDS * 2 * (rank == late)) for rank in range(2)]
    made = ended_of(*worlds)
    assert [(code, total) for _, code, total in made] == [(0, (3,)), (0, (3,))]
    assert not made[late][0]
    (line,) = made[1 - late][0]
    assert (
        " waits for rank 0 at 127.0.0.1:" if late == 0 else f"{1} of 2 ranks are at 127.0.0.1:"
    ) in line
    assert f"rank {late}" in line


def test_a_missing_rank_ends_all_with_who_came_and_what_to_check():
    for told, code, text in ended_of((0, 3, 0), (1, 3, 0), limit=1.5):
        assert told
        assert code == EXIT_RUN_FAILED
        head, first, second, fix = text.splitlines()
        assert head.startswith(f"rank {2} did not come to 127.0.0.1:")
        for rank, line in enumerate((first, second)):
            assert line.endswith(" is waiting here")
            assert f"rank {rank} " in line
        assert fix.startswith(
            f"  (start rank {2} with the same MASTER_ADDR and MASTER_PORT; no firewall may "
            "close port "
        )


def test_a_first_rank_that_never_comes_is_said_by_the_others():
    ((_, code, text),) = ended_of((1, 2, 0), limit=1)
    assert code == EXIT_RUN_FAILED
    assert text.startswith("rank 0 could not be reached at 127.0.0.1:")


def test_two_processes_with_one_rank_are_refused_on_all():
    for _, code, text in ended_of((0, 3, 0), (1, 3, 0), (1, 3, 0)):
        assert code == EXIT_USAGE
        assert "(give each process its own RANK or --node-rank)" in text
        assert "rank 1 " in text


def test_a_rank_of_another_world_size_is_refused_on_all():
    for _, code, text in ended_of((0, 2, 0), (1, 3, 0)):
        assert code == EXIT_USAGE
        assert text.endswith(f"has WORLD_SIZE={3}, but it is {2} on rank 0")


def test_another_program_at_the_master_address_is_an_error():
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for _, code, text in ended_of((0, 2, 0), (1, 2, 0), address=address):
            assert code == EXIT_USAGE
            assert (
                "is in use on this machine  (end what uses it, or set another" in text
                or "another program is listening at 127.0.0.1:" in text
            )


def test_a_second_first_rank_on_the_same_machine_finds_the_port_in_use():
    made = ended_of((0, 2, 0), (0, 2, 0.5), limit=2, address=f"127.0.0.1:{free_port()}")
    assert made[0][1] == EXIT_RUN_FAILED
    assert made[1][1] == EXIT_USAGE
    assert "is in use on this machine  (end what uses it, or set another" in made[1][2]


def test_a_process_that_comes_after_all_have_is_told_so():
    address = f"127.0.0.1:{free_port()}"
    fine, _, late = ranks(3, stays, address)
    assert not fine.raised
    assert "are complete without it: 1 problem" in late.raised


def stays(index: World, address: str) -> None:
    """Ranks 0 and 1 of a world of two, and a second rank 1 that comes later."""
    from expert.parallel.group import open_group

    os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = address.partition(":")
    rank = min(index.rank, 1)
    time.sleep(1.5 if index.rank == 2 else 0)
    with open_group(World(rank, 2, 0, 1), device="cpu", limit=20):
        time.sleep(3)
