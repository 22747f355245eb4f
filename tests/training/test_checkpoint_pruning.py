"""Which old checkpoints are deleted: never the newest, a protected one, or anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.core.publish import damage
from expert.training import checkpoint
from expert.training.checkpoint import prune, put_aside_after, save_checkpoint
from tests.training.checkpoints import check_pruning, groups_of, newest_after, pruning_cases, saved


def test_one_that_was_just_verified_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)

    def look(path: Path, *, contents: bool = True) -> str:
        assert not contents
        return damage(path, contents=False)

    monkeypatch.setattr(checkpoint, "damage", look)
    assert prune(tmp_path, 1, set(), verified=newest) == [tmp_path / "step-000001"]


@pruning_cases
def test_survivors_are_those_of_the_specification(kinds, keep, protect, seed):
    check_pruning(kinds, keep, protect, seed)


def test_a_run_that_goes_back_can_save_its_steps_again(tmp_path: Path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    aside = put_aside_after(tmp_path, 1)
    assert [path.name for path in aside] == [".old-step-000002", ".old-step-000003"]
    assert damage(aside[0]) == ""
    save_checkpoint(tmp_path, 2, groups_of(9), {})
    assert newest_after(tmp_path) == tmp_path / "step-000002"
