"""A checkpoint is complete or absent, and loads bit for bit."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from expert.training.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    state_difference,
)
from tests.core.test_publish import flip, names
from tests.training.checkpoints import FILES, assert_is, assert_same, saved


def stored(folder: Path, groups: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return load_checkpoint(save_checkpoint(folder, 1, groups, {}))[0]


def test_what_was_saved_comes_back_to_the_last_bit(tmp_path: Path):
    path = saved(tmp_path / "checkpoints", 400)
    assert path == tmp_path / "checkpoints" / "step-000400"
    assert names(path) == sorted(FILES)
    assert_is(path, 400)
    assert names(tmp_path / "checkpoints") == ["step-000400"]


def test_every_type_and_shape_comes_back(tmp_path: Path):
    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64)
    group = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in types}
    group |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "also empty": torch.zeros(0, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "learnt": torch.ones(2, requires_grad=True),
        "nan": torch.tensor([math.inf, -0.0]),
    }
    assert_same(stored(tmp_path, {"model": group}), {"model": group})


def test_state_comes_back_equal(tmp_path: Path):
    state = {
        "step": 3,
        "loss": 0.1 + 0.2,
        "best": math.inf,
        "worst": -math.inf,
        "deep": {"list": [1, None, True, {"x": "é"}], "small": 5e-324},
    }
    _, back = load_checkpoint(save_checkpoint(tmp_path, 1, {}, {**state, "nan": math.nan}))
    assert math.isnan(back.pop("nan"))
    assert back == state
    text = (tmp_path / "step-000001" / "state.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path: Path):
    weight = torch.randn(200, 50)
    tied = {"embed": weight, "head": weight, "same view": weight.view(200, 50)}
    back = stored(tmp_path, {"model": tied})["model"]
    assert_same({"model": back}, {"model": tied})
    assert back["head"].data_ptr() == back["embed"].data_ptr()
    size = (tmp_path / "step-000001" / "model.safetensors").stat().st_size
    assert size < 1.1 * weight.nbytes


def test_a_disk_that_loses_what_was_written_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rename = os.rename

    def forgetful(source: Path, target: Path) -> None:
        rename(source, target)
        flip(target / "model.safetensors", 100, 0)

    monkeypatch.setattr(os, "rename", forgetful)
    with pytest.raises(CheckpointError, match=r"does not read back: model\.safetensors does not"):
        saved(tmp_path, 1)


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"step-000001: cannot be written: .+\(fix that"):
        saved(tmp_path / "checkpoints", 1)


# Finding the newest that is whole


def test_the_newest_is_found_by_its_step_not_by_its_time(tmp_path: Path):
    for step in (2, 10, 1_000_000, 999_999):
        saved(tmp_path, step)
    os.utime(tmp_path / "step-000002", (4e9, 4e9))
    assert_is(find_checkpoint(tmp_path)[0], 1_000_000)


# Whether a run may continue


def test_differences_are_reported_value_by_value():
    same = {"schedule": {"warmup": math.nan, "betas": (0.9, 0.95)}}
    read = json.loads('{"schedule": {"warmup": NaN, "betas": [0.9, 0.95]}}')
    assert state_difference(read, same) == []
    saved_state = {
        "schedule": {"warmup": 100, "name": "cosine"},
        "adapter": {"type": "lora", "modules": ["q", "k"]},
        "data": "a" * 100,
        "objective": {"beta": 0.1},
    }
    now = {
        "schedule": {"warmup": 200, "name": "cosine", "floor": 0.1},
        "adapter": None,
        "data": "b" * 100,
    }
    assert state_difference(saved_state, now) == [
        "schedule.floor: was not set, is 0.1",
        "schedule.warmup: was 100, is 200",
        'adapter: was {"type": "lora", "modules": ["q", "k"]}, is not set',
        f'data: was "{"a" * 58}…, is "{"b" * 58}…',
        'objective: was {"beta": 0.1}, is not set',
    ]
