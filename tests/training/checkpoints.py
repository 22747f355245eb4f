"""Small checkpoints, ways to harm them, and which of them stay when old ones go."""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from expert.core.resources import DiskFull
from expert.training import checkpoint
from expert.training.checkpoint import find_checkpoint, load_checkpoint, prune, save_checkpoint
from tests.core.forking import Stages, in_child
from tests.core.test_publish import flip

Groups = dict[str, dict[str, torch.Tensor]]


def groups_of(step: int) -> Groups:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"a": torch.randn(3, 4, generator=generator), "b": torch.tensor(float(step))},
        "optimizer": {"a.exp_avg": torch.randn(12, generator=generator)},
    }


def saved(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, step, groups_of(step), {"step": step, "loss": 0.1})


def assert_same(found: Groups, expected: Groups) -> None:
    assert {group: set(named) for group, named in found.items()} == {
        group: set(named) for group, named in expected.items()
    }
    for group, named in expected.items():
        for name, tensor in named.items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name], tensor.cpu())


def assert_is(path: Path | None, step: int) -> None:
    """The folder is the checkpoint of that step, to the last bit."""
    assert path is not None
    assert path.name == f"step-{step:06d}"
    groups, state = load_checkpoint(path)
    assert state == {"step": step, "loss": 0.1}
    assert_same(groups, groups_of(step))


def save_in_stages(folder: Path, step: int, kill_before: int | None) -> tuple[int, str]:
    """Save in a forked process that is killed before one of its stages; the number of stages."""

    def action() -> int:
        stages = Stages(kill_before)
        stages.hook_system()
        write = save_file

        def in_parts(tensors: Any, path: Path, metadata: Any) -> None:
            stages.reached()
            write(tensors, path, metadata=metadata)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            stages.reached()
            path.write_bytes(content)

        setattr(checkpoint, "save_file", in_parts)  # noqa: B010 - a process that ends soon
        saved(folder, step)
        return stages.count

    return in_child(action)


def prune_in_stages(folder: Path, keep: int, kill_before: int | None) -> tuple[int, str]:
    """Prune in a forked process that is killed before one of its stages; the number of stages."""

    def action() -> int:
        stages = Stages(kill_before)
        stages.hook_system()
        checkpoint.prune(folder, keep, set())
        return stages.count

    return in_child(action)


def newest_after(folder: Path) -> Path | None:
    """The newest checkpoint, where no visible one had to be refused."""
    path, rejected = find_checkpoint(folder)
    assert rejected == []
    return path


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "DONE")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(folder: Path, limit: int) -> tuple[int, str]:
    """Save step 2 in a process that may write no file larger than `limit`."""

    def action() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            saved(folder, 2)
        except DiskFull as error:
            return str(error)
        return "saved"

    return in_child(action)


KINDS = ("whole", "whole", "whole", "unfinished", "short", "flipped", "misnamed", "file")


@functools.cache
def store() -> tempfile.TemporaryDirectory[str]:
    """Checkpoints to copy: saving them again in every case takes 2.3 ms each, copying 0.4 ms."""
    place = tempfile.TemporaryDirectory()
    for step in range(14):
        saved(Path(place.name), step)
    return place


def make(folder: Path, step: int, kind: str) -> None:
    path = folder / f"step-{step:06d}"
    if kind == "file":
        path.write_text("")
    else:
        source = step + 1 if kind == "misnamed" else step
        shutil.copytree(Path(store().name) / f"step-{source:06d}", path)
        if kind == "unfinished":
            (path / "DONE").unlink()
        elif kind == "short":
            os.truncate(path / "model.safetensors", 3)
        elif kind == "flipped":
            flip(path / "model.safetensors", 100, 0)


def survivors(kinds: dict[int, str], keep: int | None, protect: set[int]) -> set[int]:
    """The specification, in its own words."""
    whole = sorted(step for step, kind in kinds.items() if kind in ("whole", "flipped"))
    if keep is None or not whole or kinds[whole[-1]] == "flipped":
        return set(kinds)
    return set(kinds) - (set(whole[:-keep]) - protect)


def check_pruning(kinds: dict[int, str], keep: int | None, protect: set[int], seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # only the rule is tested here
        folder = Path(place)
        for step, kind in kinds.items():
            make(folder, step, kind)
            time = chance.randrange(2**31)
            os.utime(folder / f"step-{step:06d}", (time, time))
        (folder / ".bad-step-000001").mkdir()
        gone = prune(folder, keep, protect)
        left = {int(path.name[5:]) for path in folder.glob("step-*")}
        assert left == survivors(kinds, keep, protect)
        assert {int(path.name[5:]) for path in gone} == set(kinds) - left
        assert not list(folder.glob(".tmp-*"))
        assert (folder / ".bad-step-000001").is_dir()


def pruning_cases(test: Callable[..., None]) -> Any:
    return given(
        kinds=st.dictionaries(st.integers(0, 12), st.sampled_from(KINDS), min_size=2, max_size=7),
        keep=st.none() | st.integers(1, 4),
        protect=st.sets(st.integers(0, 12), max_size=3),
        seed=st.integers(0, 1000),
    )(test)
