"""Small checkpoints, ways to harm them, and which of them stay when old ones go."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from expert.core.resources import DiskFull
from expert.training import checkpoint
from expert.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from tests.core.forking import Stages, in_child

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


def in_stages(does: Callable[[], object], kill_before: int | None) -> tuple[int, str]:
    """Save or prune in a forked process that is killed before one of its stages; the number of
    stages."""

    def action() -> int:
        stages = Stages(kill_before)
        stages.hook_system()

        def in_parts(tensors: Any, path: Path, metadata: Any) -> None:
            stages.reached()
            save_file(tensors, path, metadata=metadata)
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            stages.reached()
            path.write_bytes(content)

        setattr(checkpoint, "save_file", in_parts)  # noqa: B010 - a process that ends soon
        does()
        return stages.count

    return in_child(action)


def newest_after(folder: Path) -> Path | None:
    """The newest checkpoint, where no visible one had to be refused."""
    path, rejected = find_checkpoint(folder)
    assert rejected == []
    return path


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "DONE")


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
