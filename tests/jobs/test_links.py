"""Links put into a run folder during training."""

from __future__ import annotations

import pytest

from expert.core.links import LinkRefused
from expert.jobs.train import train
from tests.jobs.runs import base_model, events_of, write_expert


def test_checkpoints_that_become_a_link_while_training_are_not_followed(tmp_path):
    config = {"max_steps": 4, "save_steps": 2, "save_total_limit": None}
    manifest, outside = write_expert(tmp_path / "own", base_model(), config), tmp_path / "photos"
    outside.mkdir()

    def swap(done: int) -> None:
        [run] = (tmp_path / "own" / "runs").iterdir()
        if done == 3:
            (run / "checkpoints").rename(tmp_path / "kept")
            (run / "checkpoints").symlink_to(outside)

    with pytest.raises(LinkRefused, match="checkpoints: is a link"):
        train(manifest, progress=swap)
    [run] = (tmp_path / "own" / "runs").iterdir()
    assert "is a link" in events_of(run, "failed")[0]["error"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-000002"]
    assert not list(outside.iterdir())
