"""Layers that carry a state from token to token (Qwen3.5, LFM2), kept within each document of
packed rows. transformers' own functions do so only with packages that need a CUDA compiler.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expert.planning.machine.host import linear_kernels_lacking
from expert.planning.models.architectures import ARCHITECTURES

FORGOTTEN = -40.0
"""Log of what a document's first token leaves of the state before it: 4e-18, nothing beside values
in float32; a larger number would cost digits of the sums of logs within a chunk."""


def recurrent_kind(config: Any) -> str:
    """The kind of a model's layers that carry a state, as in its layer_types; "" if it has none."""
    known = ARCHITECTURES.get(getattr(config, "model_type", ""))
    return known.recurrent if known else ""


def keep_documents_apart(model: nn.Module) -> None:
    """Make the functions that this model's layers call heed `seq_idx`."""
    own = importlib.import_module(type(model).__module__)
    # The plan says which package would be faster.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for name, aware in (
        ("causal_conv1d_fn", _aware_convolution),
        ("torch_chunk_gated_delta_rule", _aware_delta_rule),
    ):
        plain = getattr(own, name, None)
        if plain is not None and not hasattr(plain, "keeps_documents_apart"):
            if aware is _aware_delta_rule and _kernels_lacking():
                plain = inspect.unwrap(plain)  # torch's, beneath the package's
            function: Any = aware(plain)
            function.keeps_documents_apart = True
            setattr(own, name, function)


def _kernels_lacking() -> str:
    there = torch.cuda.is_available()
    return linear_kernels_lacking(torch.cuda.get_device_capability() if there else None)


def _aware_convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolve(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """[rows, channels, length] by [channels, width]: a weighted sum of each token and the ones
        before it in its document."""
        if seq_idx is None:
            return plain(hidden, weight, bias, activation=activation)
        given = hidden.to(weight.dtype)
        total = given * weight[:, -1, None]
        for back in range(1, min(weight.shape[1], hidden.shape[2])):
            same = (seq_idx[:, back:] == seq_idx[:, :-back])[:, None]
            earlier = (given[..., :-back] * same) * weight[:, -1 - back, None]
            total = total + nn.functional.pad(earlier, (back, 0))
        if bias is not None:
            total = total + bias[:, None]
        if activation is not None:
            total = importlib.import_module("transformers.activations").ACT2FN[activation](total)
        return total.to(hidden.dtype)

    return convolve


def _aware_delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    def rule(
        *args: Any, g: Tensor, seq_idx: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        """`g`: [rows, length, heads], the log of the share of the state that each token keeps."""
        if seq_idx is not None:
            first = torch.ones_like(seq_idx, dtype=torch.bool)
            first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
            g = g.masked_fill(first[..., None], FORGOTTEN)
        result: tuple[Tensor, Tensor | None] = plain(*args, g=g, **more)
        return result

    return rule
