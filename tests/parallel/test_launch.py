"""Which world a process belongs to, by its environment, and what its ranks must share."""

from __future__ import annotations

import time
from typing import Any

import pytest

from expert.core.errors import EXIT_USAGE
from expert.core.world import ERROR_FILE, SECONDS_LATER, SINGLE_PROCESS, World, record_failure
from expert.parallel.launch import (
    WorldError,
    card_of,
    own_facts,
    refuse_differences,
    refuse_shared_cards,
    world_from_environment,
)
from tests.each import each

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_the_world_is_the_one_of_torchrun_or_a_process_is_alone():
    world = world_from_environment(TORCHRUN)
    assert world == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world.nodes == 2
    for env in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "", "MASTER_ADDR": "10.0.0.1"}):
        assert world_from_environment(env) == SINGLE_PROCESS


@each(
    ("env", "named"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["LOCAL_RANK is missing", "LOCAL_WORLD_SIZE"]),
        ({"LOCAL_RANK": "1"}, ["RANK is missing", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
        ({**TORCHRUN, "RANK": "-1", "WORLD_SIZE": "x"}, ["RANK=-1", "WORLD_SIZE=x"]),
        ({**TORCHRUN, "RANK": "9"}, ["RANK=9"]),
        ({**TORCHRUN, "WORLD_SIZE": "6"}, ["WORLD_SIZE=6"]),
        # As many private runs as tasks would be started.
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["8 processes of one run"]),
    ],
)
def test_variables_that_describe_no_world_are_refused_with_all_reasons(env, named):
    with pytest.raises(WorldError) as refused:
        world_from_environment(env)
    assert refused.value.exit_code == EXIT_USAGE
    assert all(name in str(refused.value) for name in named)


def test_ranks_that_differ_are_refused_with_every_difference():
    same = {**own_facts(manifest="{}", overrides=("epochs=2",)), "prepared data": "abc"}
    refuse_differences([same, dict(same), dict(same)])
    other = {**same, "torch": "2.9.0", "prepared data": ""}
    with pytest.raises(WorldError) as refused:
        refuse_differences([same, other, same])
    assert str(refused.value).splitlines()[1:] == [
        f"  - torch: {same['torch']} on ranks 0, 2; 2.9.0 on rank 1",
        "  - prepared data: abc on ranks 0, 2; none on rank 1",
    ]
    assert own_facts(manifest="{} ")["manifest"] != same["manifest"]


def test_a_rank_has_a_card_of_its_own():
    assert card_of(World(5, 8, 1, 4), 4) == card_of(World(5, 8, 1, 4), 8) == 1
    assert card_of(World(5, 8, 1, 4), 1) == 0  # a scheduler shows each process its own
    with pytest.raises(WorldError, match="4 ranks on this machine, but 3 GPUs"):
        card_of(World(5, 8, 1, 4), 3)
    cards = ["a GPU-1", "a GPU-2", "b GPU-1", "", ""]
    refuse_shared_cards(cards)
    with pytest.raises(WorldError, match="ranks 0, 5 share a GPU-1"):
        refuse_shared_cards([*cards, "a GPU-1"])


def test_the_first_message_of_a_process_that_fails_is_kept_as_torch_elastic_reads_it(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    record_failure("nobody listens", exit_code=4, env={})
    env = {ERROR_FILE: str(file)}
    for text in ("no room", "another"):
        record_failure(text, exit_code=75, of_another=text == "no room", env=env)
    read: Any = ProcessFailure(local_rank=0, pid=1, exitcode=75, error_file=str(file))
    assert read.message["message"] == "no room"
    assert read.message["extraInfo"].items() >= {"of_another": True, "exit_code": 75}.items()
    assert read.timestamp == pytest.approx(time.time() + SECONDS_LATER, abs=2)
