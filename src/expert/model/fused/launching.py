"""Decides whether to use Triton, and turns functions into Triton kernels on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTERPRETED = False
"""Run kernels on the CPU with Triton's interpreter: for tests."""


def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernel_failure(is_right: Callable[[], bool], wrong: str) -> str:
    """Why a Triton kernel does not work here; `wrong` if its numbers are not right, "" if they are.

    Triton can be importable without a compiler or without support for the card.
    """
    try:
        return "" if is_right() else wrong
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises here is the answer
        return f"{type(error).__name__}: {error}"


def uses_triton(tensor: Tensor) -> bool:
    return (tensor.is_cuda or INTERPRETED) and triton_installed()


@functools.cache
def kernel(function: Any) -> Any:
    """The function as a Triton kernel. Triton and `tl` are imported only here, because CPU builds
    of torch come without Triton."""
    triton = importlib.import_module("triton")
    names, language = function.__globals__, importlib.import_module("triton.language")
    names["tl"] = language
    for name in names.get("INLINED", ()):
        if inspect.isfunction(names[name]):
            names[name].__globals__["tl"] = language
            names[name] = triton.jit(names[name])
    return triton.jit(function)


def with_even_columns(part: Tensor) -> Tensor:
    """The same with columns beside each other, as kernels read them: gradients may be expanded."""
    return part if part.stride(-1) == 1 else part.contiguous()


def wide_of(tensor: Tensor) -> torch.dtype:
    """The dtype that kernels compute in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def power(number: int) -> int:
    """The next power of two, or the number itself."""
    return 1 << (number - 1).bit_length()


def precision_of(tensor: Tensor) -> str:
    """Precision of `tl.dot`: full float32 instead of TF32 for float32 inputs."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
