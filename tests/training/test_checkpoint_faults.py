"""The faults of the matrix at full count: kills at every stage, flips everywhere, full disks."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from expert.core.publish import damage, sweep
from expert.training.checkpoint import CheckpointError, find_checkpoint, load_checkpoint
from tests.training.checkpoints import (
    FILES,
    assert_is,
    check_pruning,
    flip,
    full_disk,
    newest_after,
    prune_in_stages,
    pruning_cases,
    save_in_stages,
    saved,
)
from tests.wording import wording

pytestmark = pytest.mark.slow

ROUNDS = 20


def test_a_kill_at_every_stage_of_saving_leaves_a_whole_newest_one(tmp_path: Path):
    saved(tmp_path, 1)
    count = int(save_in_stages(tmp_path, 2, None)[1])
    shutil.rmtree(tmp_path / "step-000002")
    for stage in range(count):
        for _ in range(ROUNDS):
            assert save_in_stages(tmp_path, 2, stage)[0] == -signal.SIGKILL
            newest = newest_after(tmp_path)
            assert_is(newest, 2 if newest == tmp_path / "step-000002" else 1)
            sweep(tmp_path)
            assert_is(saved(tmp_path, 2), 2)
            shutil.rmtree(tmp_path / "step-000002")
            assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_kill_at_every_stage_of_pruning_loses_none_that_stays(tmp_path: Path):
    def fill() -> None:
        for step in (1, 2, 3, 4):
            saved(tmp_path, step)

    fill()
    count = int(prune_in_stages(tmp_path, 2, None)[1])
    for stage in range(count):
        for _ in range(4):
            fill()
            assert prune_in_stages(tmp_path, 2, stage)[0] == -signal.SIGKILL
            for path in tmp_path.glob("step-*"):
                assert damage(path) == ""
            for step in (3, 4):
                assert_is(tmp_path / f"step-{step:06d}", step)
            sweep(tmp_path)
            assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", FILES)
def test_five_hundred_flips_in_every_file_are_refused(tmp_path: Path, name: str):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    good = (path / name).read_bytes()
    chance = random.Random(name)
    for _ in range(500):
        offset, bit = chance.randrange(len(good)), chance.randrange(8)
        flip(path / name, offset, bit)
        with pytest.raises(CheckpointError) as refusal:
            load_checkpoint(path)
        assert name in str(refusal.value) or name == "DONE", (offset, bit)
        found = find_checkpoint(tmp_path)
        assert found.path == tmp_path / "step-000001"
        (tmp_path / ".bad-step-000002").rename(path)
        flip(path / name, offset, bit)
    assert_is(find_checkpoint(tmp_path).path, 2)


def test_fifty_full_disks_leave_nothing_behind(tmp_path: Path):
    largest = max(file.stat().st_size for file in saved(tmp_path / "measured", 2).iterdir())
    saved(tmp_path / "c", 1)
    for number in range(50):
        code, text = full_disk(tmp_path / "c", number * largest // 50)
        assert code == 0, text
        assert wording("a-checkpoint-needs") in text
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000001"]
    assert_is(newest_after(tmp_path / "c"), 1)


@settings(max_examples=10_000)
@pruning_cases
def test_survivors_of_ten_thousand_cases_are_those_of_the_specification(kinds, keep, protect, seed):
    check_pruning(kinds, keep, protect, seed)
