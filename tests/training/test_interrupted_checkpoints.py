"""A kill or a full disk at any stage leaves the previous checkpoint intact."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from expert.core.publish import damage, remove_leftovers
from expert.training import checkpoint
from expert.training.checkpoint import bytes_needed, save_checkpoint
from tests.core.test_publish import names
from tests.faults.counting import cases
from tests.training.checkpoints import (
    FILES,
    assert_is,
    full_disk,
    in_stages,
    newest_after,
    saved,
)


def some_and_every(apart: int, rounds: int) -> pytest.MarkDecorator:
    """Every so many stages once; or all stages in so many rounds."""
    every = pytest.param(1, rounds, marks=pytest.mark.slow, id="every stage")
    return pytest.mark.parametrize(("apart", "rounds"), [(apart, 1), every])


@pytest.mark.fault(2)
@some_and_every(3, 20)
def test_a_kill_at_a_stage_of_saving_leaves_a_whole_newest_one(
    tmp_path: Path, apart: int, rounds: int
):
    saved(tmp_path, 1)
    save = partial(saved, tmp_path, 2)
    code, stages = in_stages(save, None)
    assert code == 0
    assert_is(newest_after(tmp_path), 2)
    shutil.rmtree(tmp_path / "step-000002")
    assert int(stages) >= 12
    for stage in range(0, int(stages), apart):
        for _ in cases(rounds):
            assert in_stages(save, stage)[0] == -signal.SIGKILL
            newest = newest_after(tmp_path)
            assert_is(newest, 2 if newest == tmp_path / "step-000002" else 1)
            remove_leftovers(tmp_path)
            assert_is(saved(tmp_path, 2), 2)
            shutil.rmtree(tmp_path / "step-000002")
            assert names(tmp_path) == ["step-000001"]


@pytest.mark.fault(10)
@some_and_every(4, 4)
def test_a_kill_at_a_stage_of_pruning_loses_none_that_stays(
    tmp_path: Path, apart: int, rounds: int
):
    def fill() -> None:
        for step in (1, 2, 3, 4):
            saved(tmp_path, step)

    fill()
    keep_two = partial(checkpoint.prune, tmp_path, 2, set())
    count = int(in_stages(keep_two, None)[1])
    assert count >= 10
    for stage in range(0, count, apart):
        for _ in cases(rounds):
            fill()
            assert in_stages(keep_two, stage)[0] == -signal.SIGKILL
            visible = [name for name in names(tmp_path) if name.startswith("step-")]
            assert all(damage(tmp_path / name) == "" for name in visible)
            for step in (3, 4):
                assert_is(tmp_path / f"step-{step:06d}", step)
            remove_leftovers(tmp_path)
            assert names(tmp_path) == visible


@pytest.mark.fault(6)
@pytest.mark.parametrize("times", [len(FILES), pytest.param(50, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_nothing_and_the_one_before_is_whole(tmp_path: Path, times: int):
    sizes = [file.stat().st_size for file in saved(tmp_path / "measured", 2).iterdir()]
    saved(tmp_path / "c", 1)
    for number in cases(times):
        few = times == len(sizes)
        limit = sizes[number] - 1 if few else number * max(sizes) // times
        code, text = full_disk(tmp_path / "c", limit)
        assert code == 0, text
        assert f"step-000002: {os.strerror(errno.EFBIG)}: " in text
        assert "(make room and resume, keep fewer with" in text
        assert names(tmp_path / "c") == ["step-000001"]
    assert_is(newest_after(tmp_path / "c"), 1)


def test_what_a_checkpoint_takes_is_known_before(tmp_path: Path):
    weight = torch.randn(500, 100)
    groups = {"model": {"a": weight, "tied": weight}, "optimizer": {"m": weight.double()}}
    path = save_checkpoint(tmp_path, 1, groups, {"x": 1})
    taken = sum(file.stat().st_size for file in path.iterdir())
    # Above what it takes, by no more than the allowance for the state and the heads.
    assert taken <= bytes_needed(groups) <= taken + checkpoint.STATE_BYTES + 3 * 256
