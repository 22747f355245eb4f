"""When kernels are Triton's, and how a function of ours becomes one."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from expert.model.loss_kernel import triton_installed

INTERPRETED = False
"""Run the kernels without a card, by Triton's interpreter: for tests."""


def uses_triton(tensor: Tensor) -> bool:
    return (tensor.is_cuda or INTERPRETED) and triton_installed()


@functools.cache
def kernel(function: Any) -> Any:
    """The function as a kernel. Triton reads its source, which knows the module `tl`: imported only
    now, because CPU builds of torch come without Triton."""
    triton = importlib.import_module("triton")
    names = function.__globals__
    names["tl"] = importlib.import_module("triton.language")
    for name in names.get("INLINED", ()):
        if inspect.isfunction(names[name]):
            names[name] = triton.jit(names[name])
    return triton.jit(function)


def wide_of(tensor: Tensor) -> torch.dtype:
    """What kernels compute in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def power(number: int) -> int:
    """The power of two that is not less."""
    return 1 << (number - 1).bit_length()


def precision_of(tensor: Tensor) -> str:
    """How matrix units multiply numbers of its dtype: float32 as such, not shortened to TF32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
