"""Small checkpoints, and ways to harm them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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


def saved(folder: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(folder, step, groups_of(step), {"step": step, "loss": 0.1}, **options)


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


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as stream:  # in place: ext4 flushes a file that is written anew
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ (1 << bit)]))


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
    found = find_checkpoint(folder)
    assert found.rejected == []
    return found.path
