"""Base weights in 4 or 8 bits: NF4 with double quantisation, int8 or FP8 with a scale per row."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expert.core.install import pip_install
from expert.model.errors import ModelError
from expert.model.lora import nf4
from expert.model.lora.added_product import computed_in, gradients_of_low, start

_WHERE = "base_models[].quantization"
_FLOAT8 = torch.float8_e4m3fn
_BLOCK = 64
"""NF4 weights that share a scale."""
_NO_KERNEL = "Failed to load CPU gemm_4bit_forward from kernels-community"


def quiet_bitsandbytes() -> None:
    """Drop the warning about a kernel that bitsandbytes would fetch from the hub on some CPUs. Call
    it before bitsandbytes is imported, which PEFT does."""
    ops = logging.getLogger("bitsandbytes.backends.cpu.ops")
    if _is_wanted not in ops.filters:
        ops.addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NO_KERNEL)


@contextmanager
def bitsandbytes_as_needed(quantization: str) -> Iterator[None]:
    """Hide bitsandbytes from PEFT unless it is needed: PEFT imports it wherever it is installed,
    and with it torch's compiler, which costs 2 s before the first step."""
    if quantization in ("int4", "int8") or "bitsandbytes" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["bitsandbytes"] = None  # makes Python treat it as not installed
    try:
        yield
    finally:
        del sys.modules["bitsandbytes"]
        peft: Any = importlib.import_module("peft.import_utils")
        transformers: Any = importlib.import_module("transformers.utils.import_utils")
        for check in (
            peft.is_bnb_available,
            peft.is_bnb_4bit_available,
            transformers.is_bitsandbytes_available,
        ):
            check.cache_clear()


def quantization_config(quantization: str, compute_dtype: torch.dtype) -> Any | None:
    """The config for transformers to quantise all linear layers except the head while loading; None
    if bitsandbytes is not used."""
    if quantization not in ("int4", "int8"):
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        what = f"{quantization} needs the package bitsandbytes"
        raise ModelError(_WHERE, what, f"{pip_install('quant')}, or quantization: none")
    make: Any = importlib.import_module("transformers").BitsAndBytesConfig
    if quantization == "int4":
        return make(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
        )
    return make(load_in_8bit=True, llm_int8_threshold=0.0)


def prepare_quantised_layers(model: nn.Module, quantization: str) -> None:
    """Make quantised layers compute the same in training and evaluation."""
    if quantization not in ("int4", "int8"):
        return
    bnb: Any = importlib.import_module("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            # On a CPU with AVX512-BF16 the layer would repack its weight during evaluation into a
            # form without gradients, and training would continue with that.
            layer.support_avx512bf16_for_cpu = False
            # bitsandbytes 0.50 dequantises NF4 wrongly on a CPU if rows are not whole blocks: the
            # error of a 32 x 32 matrix is 20 to 37 % of its standard deviation instead of 9 %.
            if layer.weight.device.type == "cpu" and layer.in_features % _BLOCK:
                what = f"int4 on a CPU needs rows of whole {_BLOCK}s; {name} has rows of"
                raise ModelError(
                    _WHERE, f"{what} {layer.in_features}", "use int8, or quantization: none"
                )
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            model.set_submodule(name, _weight_only(layer))


# Custom operators, opaque to torch.compile: otherwise it would save every dequantised weight from
# the forward for the backward (8B, 2 bytes a weight: 13.8 GB more than NF4 on an H200).
@torch.library.custom_op("expert::int8_linear", mutates_args=())
def int8_linear(x: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    """x @ W.T with an 8-bit W, which is dequantised only during the product."""
    return F.linear(x, dequantised(rows_int8, scales, x.dtype))


@torch.library.custom_op("expert::int8_linear_input", mutates_args=())
def _gradient_of_input(gradient: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    return gradient @ dequantised(rows_int8, scales, gradient.dtype)


@torch.library.custom_op("expert::int8_added", mutates_args=())
def int8_added(
    low: Tensor, second: Tensor, x: Tensor, rows_int8: Tensor, scales: Tensor, factor: float
) -> Tensor:
    """x @ W.T + factor * low @ second.T, rounded once; all inputs are matrices."""
    weight = dequantised(rows_int8, scales, x.dtype)
    return start(low, second).addmm_(x, weight.t(), beta=factor)


@int8_linear.register_fake
def _(x: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows_int8.shape[0])


@int8_added.register_fake
def _(
    low: Tensor, second: Tensor, x: Tensor, rows_int8: Tensor, scales: Tensor, factor: float
) -> Tensor:
    return low.new_empty(low.shape[0], second.shape[0])


@_gradient_of_input.register_fake
def _(gradient: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    return gradient.new_empty(*gradient.shape[:-1], rows_int8.shape[1])


def _keep_weight(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _int8_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _gradient_of_input(gradient, *ctx.saved_tensors), None, None


int8_linear.register_autograd(_int8_backward, setup_context=_keep_weight)


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    low, second, _, rows_int8, scales, ctx.factor = inputs
    ctx.save_for_backward(low, second, rows_int8, scales)


def _added_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    low, second, *weight = ctx.saved_tensors
    of_low = gradients_of_low(gradient, low, second, ctx.factor, ctx.needs_input_grad)
    of_x = _gradient_of_input(gradient, *weight) if ctx.needs_input_grad[2] else None
    return *of_low, of_x, None, None, None


int8_added.register_autograd(_added_backward, setup_context=_keep_factors)


def dequantised(rows_int8: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] from int8 rows and the absmax of each row, or from FP8 codes and
    scales."""
    if rows_int8.dtype == torch.uint8:
        return rows_int8.view(_FLOAT8).to(dtype).mul_(scales[:, None])
    # The integers are exact in bfloat16; multiplying in place rounds once and needs no float32 copy
    # of the weight.
    return rows_int8.to(dtype).mul_(scales.float().div(127.0)[:, None])


def _weight_only(layer: Any) -> nn.Module:
    """The same layer, quantising its weights only.

    bitsandbytes' layer also quantises activations: through float16, where bfloat16 activations can
    overflow; with a device synchronisation for outliers; and on a CPU only in evaluation, so that
    training and evaluation would see different models.
    """
    make, bias = weight_only_class(), layer.bias is not None
    with torch.device("meta"):
        new: nn.Module = make(layer.in_features, layer.out_features, bias=bias)
    new.weight, new.bias, new.state = layer.weight, layer.bias, layer.state
    new.requires_grad_(False)
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    return new


def int8_parts(layer: Any) -> tuple[Tensor, Tensor]:
    """The 8-bit rows of a layer's weight, and the absmax or scale of each row."""
    if isinstance(layer, Float8Linear):
        codes = layer.weight.data
        return (codes.view(torch.uint8) if codes.dtype == nf4.AS_FLOATS else codes), layer.scales
    rows = layer.weight.data.view(torch.int8) if layer.state.CB is None else layer.state.CB
    return rows, layer.state.SCB


def _int8_forward(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer with 8-bit weights, in the dtype of autocast if that is on."""
    out: Tensor = int8_linear(x.to(computed_in(x)), *int8_parts(layer))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def to_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """Store quantised weights as plain tensors, which can be sharded, with their scales on
    `device`."""
    bnb: Any = sys.modules.get("bitsandbytes")
    layers: Any = model.modules()
    for layer in layers:
        if isinstance(layer, Float8Linear):
            layer.weight = nn.Parameter(layer.weight.data.view(nf4.AS_FLOATS), requires_grad=False)
            layer.scales = layer.scales.to(device)
        elif bnb is None:
            continue
        elif isinstance(layer, bnb.nn.Linear4bit):
            nf4.to_plain_tensors(layer)
            layer.quant_state.to(device)
        elif type(layer) is weight_only_class():
            layer.weight = nn.Parameter(layer.state.CB.view(nf4.AS_FLOATS), requires_grad=False)
            layer.state.CB, layer.state.SCB = None, layer.state.SCB.to(device)


class Float8Linear(nn.Linear):
    """A frozen linear layer with FP8 (e4m3) weights and a scale per row. The codes are stored as
    bytes, because PEFT creates adapters in the dtype of floating-point weights."""

    scales: Tensor

    def __init__(self, layer: nn.Linear, device: torch.device | str) -> None:
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        weight = layer.weight.detach().to(device).float()
        scales = weight.abs().amax(1).clamp(min=1e-12) / torch.finfo(_FLOAT8).max
        codes = (weight / scales[:, None]).to(_FLOAT8).view(torch.uint8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().to(device), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return _int8_forward(self, input)


def to_float8(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | str) -> None:
    """Move a model to the device, converting the linear layers of its blocks to FP8 one by one, so
    that the full-precision model is never on it. The last block stays as it is: on SmolLM2-135M it
    alone makes up 27 % of what rounding all 30 changes (fp8-rounding-cpu.json)."""
    for block in blocks[:-1]:
        for name, layer in list(block.named_modules()):
            if type(layer) is nn.Linear:
                block.set_submodule(name, Float8Linear(layer, device))
    model.to(device)


@functools.cache
def weight_only_class() -> type[Any]:
    """A subclass of bitsandbytes' int8 layer, so that PEFT knows it; created on first use."""
    parent: Any = importlib.import_module("bitsandbytes").nn.Linear8bitLt

    class WeightOnlyInt8(parent):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
            super().__init__(inputs, outputs, bias=bias, has_fp16_weights=False)

        def forward(self, x: Tensor) -> Tensor:
            return _int8_forward(self, x)

    return WeightOnlyInt8
