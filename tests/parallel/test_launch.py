"""Which world a process belongs to, by its environment, and what its ranks must share."""

from __future__ import annotations

import json

import pytest

from expert.core.errors import EXIT_USAGE
from expert.core.world import ERROR_FILE, SINGLE_PROCESS, World, record_failure, recorded_failure
from expert.parallel.launch import (
    PORTS,
    MasterAddress,
    WorldError,
    card_of,
    code_hash,
    differences,
    first_host,
    master_address,
    own_facts,
    refuse_differences,
    shared_cards,
    started_by,
    world_from_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}


def test_torchrun_and_slurm_describe_the_same_world():
    world = World(rank=5, size=8, local_rank=1, local_size=4)
    assert world_from_environment(TORCHRUN) == world
    assert world_from_environment(SLURM) == world
    assert world.nodes == 2
    assert world_from_environment({**SLURM, **TORCHRUN, "RANK": "6", "LOCAL_RANK": "2"}).rank == 6
    assert [started_by(env) for env in (TORCHRUN, SLURM, {})] == ["torchrun", "Slurm", ""]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"},
        # a batch script of 8 tasks before srun, and an interactive step of one
        {name: text for name, text in SLURM.items() if "STEP" not in name},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_a_process_without_rank_variables_is_alone(env):
    assert world_from_environment(env) == SINGLE_PROCESS


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]),
        ({"LOCAL_RANK": "1"}, ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]),
        ({**TORCHRUN, "RANK": "-1", "WORLD_SIZE": "x"}, ["RANK=-1", "WORLD_SIZE=x"]),
        ({**TORCHRUN, "RANK": "9", "LOCAL_RANK": "4"}, ["RANK=9", "LOCAL_RANK=4"]),
        ({**TORCHRUN, "WORLD_SIZE": "6"}, ["WORLD_SIZE=6"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["RANK=5"]),
        ({**TORCHRUN, "MASTER_ADDR": "", "MASTER_PORT": "x"}, ["MASTER_ADDR", "MASTER_PORT=x"]),
        ({**SLURM, "SLURM_PROCID": "", "SLURM_LOCALID": ""}, ["SLURM_PROCID", "SLURM_LOCALID"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, ["5, 3"]),
        ({**SLURM, "SLURM_LOCALID": "0"}, ["--distribution=block"]),
    ],
)
def test_variables_that_describe_no_world_are_refused_with_all_reasons(env, named):
    with pytest.raises(WorldError) as refused:
        world_from_environment(env)
    assert refused.value.exit_code == EXIT_USAGE
    assert len(refused.value.problems) >= len(named)
    for name in named:
        assert any(name in problem for problem in refused.value.problems), name


def test_ranks_meet_where_the_environment_says_or_at_the_first_host_of_the_step():
    assert master_address(TORCHRUN) == MasterAddress("10.0.0.1", 29500)
    found = master_address(SLURM)
    assert found == MasterAddress("gpu07", PORTS[0] + 4711)
    assert master_address({**SLURM, "SLURM_STEP_ID": "1"}).port == found.port + 1
    assert master_address({**SLURM, "MASTER_PORT": "29501"}) == MasterAddress("gpu07", 29501)
    assert PORTS[0] <= master_address({**SLURM, "SLURM_JOB_ID": "98765432"}).port <= PORTS[1]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("node[03-05,9],login", "node03"),
        ("node[3]", "node3"),
        ("rack[1-2]gpu[07,09].lan,x", "rack1gpu07.lan"),
        ("a-b[10-12]", "a-b10"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


def test_ranks_that_differ_are_refused_with_every_difference():
    same = {**own_facts(manifest="{}", overrides=("epochs=2",)), "prepared data": "abc"}
    assert differences([same, dict(same), dict(same)]) == []
    other = {**same, "torch": "2.9.0", "prepared data": ""}
    assert differences([same, other, same]) == [
        f"torch: {same['torch']} on ranks 0, 2; 2.9.0 on rank 1",
        "prepared data: abc on ranks 0, 2; none on rank 1",
    ]
    with pytest.raises(
        WorldError, match="the ranks do not have the same code, data or manifest: 2 problems"
    ) as refused:
        refuse_differences([same, other])
    assert len(refused.value.problems) == 2
    assert own_facts(manifest="{} ")["manifest"] != same["manifest"]
    assert same["code"] == code_hash()


def test_a_rank_has_a_card_of_its_own():
    assert card_of(World(5, 8, 1, 4), 4) == 1
    assert card_of(World(5, 8, 1, 4), 8) == 1
    assert card_of(World(5, 8, 1, 4), 1) == 0  # Slurm shows each task its own
    with pytest.raises(WorldError, match="4 ranks on this machine, but 3 GPUs"):
        card_of(World(5, 8, 1, 4), 3)
    cards = ["a GPU-1", "a GPU-2", "b GPU-1", "a GPU-1", "", ""]
    assert shared_cards(cards) == ["ranks 0, 3 share a GPU-1"]
    assert shared_cards(cards[:3]) == []


def test_the_first_message_of_a_process_that_fails_is_kept_as_torch_elastic_reads_it(tmp_path):
    file = tmp_path / "error.json"
    assert recorded_failure(file) is None
    record_failure("row-7 broken", exit_code=4, env={ERROR_FILE: str(file)})
    record_failure("a later one", exit_code=4, env={ERROR_FILE: str(file)})
    record_failure("nobody asks", exit_code=4, env={})
    kept = recorded_failure(file)
    assert kept is not None
    assert kept.message == "row-7 broken"
    assert json.loads(file.read_text())["message"]["extraInfo"]["timestamp"] == str(kept.time)
    file.write_text("{")
    assert recorded_failure(file) is None
