"""Finds, checkpoints and compiles the repeated blocks of a model.

Only a block's `forward` is replaced; modules, parameters and their names stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Graphs per block: first layer or not, training or not, masked or not, each kind of layer. Past
# torch's default limit of 8, torch would silently continue uncompiled.
RECOMPILE_LIMIT = 64


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The decoder blocks in order: the longest list of modules of one class that is not nested in
    another such list (as a block's experts are). Empty if there is none."""
    found: list[nn.Module] = []
    waiting = [module]
    while waiting:
        here = waiting.pop(0)
        parts = list(here.children())
        alike = len(parts) > 0 and len({type(part) for part in parts}) == 1
        if isinstance(here, nn.ModuleList) and alike:
            found = parts if len(parts) > len(found) else found
        else:
            waiting.extend(parts)
    return found


def checkpoint_blocks(blocks: Sequence[nn.Module], count: int) -> None:
    """Use activation checkpointing for the first `count` blocks."""
    for block in blocks[:count]:
        _runner_of(block).recomputed = True


def compile_blocks(
    blocks: Sequence[nn.Module],
    mode: str = "default",
    backend: str = "inductor",
    *,
    fullgraph: bool = False,
) -> None:
    """Compile every block for fixed shapes, inside its checkpointing."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    for block in blocks:
        runner = _runner_of(block)
        runner.compiled = torch.compile(
            runner.plain, dynamic=False, mode=mode, backend=backend, fullgraph=fullgraph
        )


def compiled_graphs() -> int:
    """Graphs that this process has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")  # not imported: nothing was compiled
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


class _Runner:
    """Replaces `forward` of a block that is compiled, checkpointed, or both."""

    def __init__(self, block: nn.Module) -> None:
        self.plain: Callable[..., Any] = block.forward
        self.compiled: Callable[..., Any] | None = None
        self.recomputed = False
        self.draws = _draws_numbers(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.compiled or self.plain
        if not (self.recomputed and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        # Saving and restoring the random state costs time: only if the block draws from it.
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=self.draws, **kwargs)


def _runner_of(block: nn.Module) -> _Runner:
    runner = block.__dict__.get("forward")
    if not isinstance(runner, _Runner):
        runner = block.forward = _Runner(block)
    return runner


def _draws_numbers(block: nn.Module) -> bool:
    """Whether a forward pass uses dropout, as a module or as a rate."""
    for module in block.modules():
        rates: list[Any] = []
        for name, value in vars(module).items():
            if "drop" in name:  # PEFT stores the rates of its layers by adapter
                rates += value.values() if isinstance(value, Mapping) else [value]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            return True
    return False
