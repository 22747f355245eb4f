"""All ranks respond to a fault of one of them with the same plan."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from expert.core.errors import EXIT_HUNG
from expert.core.resources import DiskFull
from expert.parallel.engine import Engine
from expert.run import build
from expert.training.recovery import KernelUnavailable
from tests.jobs.runs import (
    ROWS,
    Now,
    base_model,
    events_of,
    inject,
    losses_of,
    run,
    saved_steps,
    write_expert,
)
from tests.parallel.ranks import LIMIT_SECONDS, Ended, fine, ranks, started, trained
from tests.parallel.test_worlds import CLOSE, numbers_of

CONFIG: dict[str, Any] = {"epochs": 1, "micro_batch_size": 2, "save_steps": 2}


@pytest.fixture(scope="module")
def base() -> Path:
    return base_model(layers=2)


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory) -> Path:
    return run(write_expert(tmp_path_factory.mktemp("alone"), base, CONFIG)).folder


def with_fault(world, manifest, options, rank, step, fault) -> Any:
    """A run in which `fault` meets one rank at one step, or at every one, in its forward passes."""

    def faulty(loss: Any, batch: Any, now: Now) -> Any:
        met = world.rank == rank and step in (None, now.update)
        return fault(loss, batch) if met else loss

    with pytest.MonkeyPatch.context() as patch:
        inject(patch, faulty)
        return trained(world, manifest, options)


def out_of_memory(loss, batch):
    if batch.tokens.shape[0] > 1:
        raise torch.OutOfMemoryError("no room")
    return loss


def not_finite(loss, batch):
    return loss * float("nan")


def send(number, loss, batch):
    os.kill(os.getpid(), number)
    return loss


ASK_TO_STOP, DIE, STOP = (
    partial(send, number) for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
)


def fail(loss, batch):
    raise ValueError("something else")


def kill_workers(loss, batch, left=[0] * 4):
    if left and multiprocessing.active_children():
        left.pop()
        for worker in multiprocessing.active_children():
            worker.kill()
    return loss


@pytest.mark.fault(18)
@pytest.mark.slow
def test_the_data_workers_of_a_rank_may_die_several_times(base, tmp_path):
    """Nothing can be saved meanwhile: the other ranks are in the middle of a step."""
    config = {**CONFIG, "epochs": 3, "packing": False, "dataloader_num_workers": 1}
    config["dataloader_prefetch_factor"] = 1
    alone = run(write_expert(tmp_path / "alone", base, config)).folder
    manifest = write_expert(tmp_path / "killed", base, config)
    folder = fine(ranks(2, with_fault, manifest, {}, 0, None, kill_workers))[0]
    told = [e["text"] for e in events_of(folder, "warning") if "SIGKILL" in e["text"]]
    assert len(told) > 1
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_memory_that_runs_out_on_one_rank_makes_the_micro_batches_of_all_smaller(
    rank, base, alone, tmp_path
):
    manifest = write_expert(tmp_path, base, CONFIG)
    folder = fine(ranks(2, with_fault, manifest, {}, rank, 2, out_of_memory))[0]
    (fell,) = events_of(folder, "fell_back")
    assert fell["failure"] == "OutOfMemory"
    assert {change["path"] for change in fell["changes"]} >= {"batch.micro_batch"}
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


@pytest.mark.slow
def test_memory_that_runs_out_where_weights_are_spread_ends_all_and_resuming_takes_less(
    base, alone, tmp_path
):
    manifest = write_expert(tmp_path, base, {**CONFIG, "distributed": "sharded"})
    first, second = ranks(2, with_fault, manifest, {}, 1, 3, out_of_memory)
    assert "rank 1: OutOfMemoryError: no room" in first.raised
    assert "OutOfMemoryError" in second.raised
    (folder,) = (tmp_path / "runs").iterdir()
    assert "OutOfMemoryError: no room" in events_of(folder, "failed")[-1]["error"]
    options = {"resume": str(folder)}
    fine(ranks(2, with_fault, manifest, options, 1, 3, out_of_memory))
    (fell,) = events_of(folder, "fell_back")
    assert fell["failure"] == "OutOfMemory"
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def with_a_wrong_kernel(world, manifest, options) -> Any:
    """A run on cards whose kernel for attention turns out to be wrong before the first step."""

    def check(plan: Any, *_: Any) -> None:
        if plan.kernels.attention == "sdpa":
            raise build.PlanUnsupported(KernelUnavailable(kernel="attention", reason="off by 1.1"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "check_attention", check)
        return trained(world, manifest, options)


def test_a_kernel_that_no_card_can_run_is_replaced_where_weights_are_spread_too(
    base, alone, tmp_path
):
    manifest = write_expert(tmp_path, base, {**CONFIG, "distributed": "sharded"})
    folder = fine(ranks(2, with_a_wrong_kernel, manifest, {}))[0]
    (fell,) = events_of(folder, "fell_back")
    assert [change["path"] for change in fell["changes"]] == ["kernels.attention"]
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def with_full_evaluation(world, manifest, options) -> Any:
    """A run in which one rank has no room to evaluate more than a row at a time."""
    evaluate = Engine.evaluate

    def faulty(self: Engine, objective: Any, batch: Any) -> Any:
        if world.rank == 1 and batch.tokens.shape[0] > 1:
            raise torch.OutOfMemoryError("no room")
        return evaluate(self, objective, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "evaluate", faulty)
        return trained(world, manifest, options)


def test_without_a_checkpoint_the_next_start_takes_less_too(base, alone, tmp_path):
    sharded = {"distributed": "sharded", "eval_batch_size": 11}  # rows: 4 sequences
    manifest = write_expert(tmp_path, base, {**CONFIG, **sharded})
    options: dict[str, str] = {}
    for fewer in (2, 1):
        _, second = ranks(2, with_full_evaluation, manifest, options)
        assert f"(--resume continues with batch.eval_batch: {fewer})" in second.raised
        options = {"resume": str(next((tmp_path / "runs").iterdir()))}
    folder = fine(ranks(2, with_full_evaluation, manifest, options))[0]
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def test_a_loss_that_is_not_finite_on_one_rank_changes_no_weight_on_any(base, tmp_path):
    manifest = write_expert(tmp_path, base, {**CONFIG, "on_not_finite": "skip"})
    folder = fine(ranks(2, with_fault, manifest, {}, 1, 2, not_finite))[0]
    (event,) = events_of(folder, "not_finite")
    assert event["step"] == 3
    assert len(event["rows"]) > 1
    assert events_of(folder, "finished")


def test_a_signal_to_one_rank_saves_once_and_ends_all(base, alone, tmp_path):
    manifest = write_expert(tmp_path, base, CONFIG)
    folder = fine(ranks(2, with_fault, manifest, {}, 1, 2, ASK_TO_STOP))[0]
    (stopped,) = events_of(folder, "stopped")
    assert stopped["exit_code"] == 143
    assert saved_steps(folder)[-1] == stopped["step"] == 3
    resumed = fine(ranks(3, trained, manifest, {"resume": str(folder)}))[0]
    assert resumed == folder
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def test_a_failure_that_no_plan_helps_against_ends_all_and_names_the_rank(base, tmp_path):
    manifest = write_expert(tmp_path, base, CONFIG)
    first, second = ranks(2, with_fault, manifest, {}, 1, 2, fail)
    assert "ValueError: something else" in second.raised
    assert "rank 1 failed: ValueError: something else" in first.raised


def test_a_rank_that_is_killed_ends_the_others_and_the_run_can_be_resumed(base, alone, tmp_path):
    manifest = write_expert(tmp_path, base, CONFIG)
    first, second = ranks(2, with_fault, manifest, {}, 1, 3, DIE)
    assert second == Ended(exit_code=-signal.SIGKILL)
    assert "another rank failed: it has ended" in first.raised
    (folder,) = (tmp_path / "runs").iterdir()
    assert saved_steps(folder) == [2]
    resumed = fine(ranks(2, trained, manifest, {"resume": str(folder)}))[0]
    assert losses_of(resumed)[3]
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)


def hang(loss, batch):
    time.sleep(LIMIT_SECONDS)
    return loss


@pytest.mark.parametrize(
    ("rank", "fault"),
    [pytest.param(1, STOP, marks=pytest.mark.slow), pytest.param(0, STOP), pytest.param(1, hang)],
)
def test_a_rank_that_does_not_answer_ends_the_run_with_stacks(rank, fault, base, tmp_path):
    manifest = write_expert(tmp_path, base, {**CONFIG, "hang_timeout": 4})
    under_way = started(2, with_fault, manifest, {}, rank, 3, fault)
    hanging = rank if fault is hang else 1 - rank  # a stopped one does not notice
    under_way.processes[hanging].join(LIMIT_SECONDS / 2)
    assert under_way.processes[hanging].exitcode == EXIT_HUNG
    (folder,) = (tmp_path / "runs").iterdir()
    stacks = (folder / "ranks" / f"rank-{hanging}.stacks.txt").read_text()
    assert "it has made no progress for" in stacks.splitlines()[0]
    assert ("in hang" in stacks) is (fault is hang)
    for process in under_way.processes:
        process.kill()


def with_own_manifest(world, manifests, options) -> Any:
    return trained(world, manifests[world.rank], options)


def test_ranks_that_found_different_rows_are_refused_before_the_first_step(base, tmp_path):
    one = write_expert(tmp_path / "one", base, CONFIG)
    other = write_expert(tmp_path / "other", base, CONFIG, rows=ROWS[:-1])
    for ended in ranks(2, with_own_manifest, [one, other], {}):
        assert "WorldError" in ended.raised
        assert "prepared train rows: " in ended.raised
    assert not list((tmp_path / "one" / "runs").iterdir())


def full_disk(loss, batch):
    """From here on nothing can be saved."""
    from expert.run.session import checkpoints

    def refuse(folder: Path, needed: int, count: int = 1) -> None:
        raise DiskFull(f"{folder}: no room")

    setattr(checkpoints, "check_space", refuse)  # noqa: B010 - its own module exports it
    return loss


def test_a_disk_that_is_full_for_the_rank_that_saves_ends_all(base, tmp_path):
    manifest = write_expert(tmp_path, base, CONFIG)
    first, second = ranks(2, with_fault, manifest, {}, 0, 2, full_disk)
    assert "DiskFull" in first.raised
    assert "rank 0 failed: DiskFull" in second.raised
    (folder,) = (tmp_path / "runs").iterdir()
    assert saved_steps(folder) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_a_rank_killed_at_any_moment_ends_all_and_the_run_continues(seed, base, alone, tmp_path):
    random = Random(seed)
    manifest = write_expert(tmp_path, base, {**CONFIG, "save_steps": 1})
    under_way = started(2, trained, manifest, {})
    # From the start of the processes to a while after the last step: 2 s on two quiet cores.
    time.sleep(random.uniform(0.2, 3.0))
    rank = random.randrange(2)
    under_way.processes[rank].kill()
    killed = time.monotonic()
    for process in under_way.processes:
        process.join(15)
    assert time.monotonic() - killed < 15
    ended = under_way.ended()
    runs = tmp_path / "runs"
    folders = list(runs.iterdir()) if runs.is_dir() else []
    saved = folders and saved_steps(folders[0])
    if ended[rank].exit_code == 0:  # it was over before
        assert numbers_of(fine(ended)[0]) == pytest.approx(numbers_of(alone), rel=CLOSE)
        return
    assert ended[1 - rank].raised or ended[1 - rank].exit_code
    options = {"resume": str(folders[0])} if saved else {}
    folder = fine(ranks(2, trained, manifest, options))[0]
    assert numbers_of(folder) == pytest.approx(numbers_of(alone), rel=CLOSE)
    assert not list(folder.rglob(".tmp*"))
