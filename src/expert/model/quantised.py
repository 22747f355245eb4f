"""Base weights in 4 or 8 bits: NF4 with double quantisation, and int8 or FP8 by rows."""

from __future__ import annotations

import importlib
import importlib.util
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
from expert.model.lora.added_product import gradients_of_low, start

QUANTISED = ("int4", "int8", "fp8")
_WHERE = "base_models[].quantization"
_FLOAT8 = torch.float8_e4m3fn
_BLOCK = 64
"""NF4 weights that share a scale."""


@contextmanager
def bitsandbytes_as_needed(quantization: str) -> Iterator[None]:
    """PEFT imports bitsandbytes wherever it is installed, and with it torch's compiler: 2 s of a
    core before the first step. Where no layer is quantised by it, it is out of sight meanwhile."""
    if quantization in ("int4", "int8") or "bitsandbytes" in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules["bitsandbytes"] = None  # how Python marks what is not there
    try:
        yield
    finally:
        del sys.modules["bitsandbytes"]
        peft: Any = importlib.import_module("peft.import_utils")
        transformers: Any = importlib.import_module("transformers.utils.import_utils")
        for known in (
            peft.is_bnb_available,
            peft.is_bnb_4bit_available,
            transformers.is_bitsandbytes_available,
        ):
            known.cache_clear()


def quantization_config(quantization: str, compute_dtype: torch.dtype) -> Any | None:
    """What makes transformers quantise every linear layer but the head while it loads;
    None where the base stays as it is."""
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


def settle_quantised(model: nn.Module, quantization: str) -> None:
    """Make the quantised layers fit for training: the same arithmetic whether they train or not."""
    if quantization not in ("int4", "int8"):
        return
    bnb: Any = importlib.import_module("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, bnb.nn.Linear4bit):
            # In evaluation on a CPU with AVX512-BF16 the layer would repack its weight into a form
            # that has no gradient, and training would continue with it.
            layer.support_avx512bf16_for_cpu = False
            _refuse_uneven_rows(name, layer)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            model.set_submodule(name, _weight_only(layer))


def _refuse_uneven_rows(name: str, layer: Any) -> None:
    """bitsandbytes 0.50 reads NF4 back wrongly on a CPU where rows are not whole blocks: the error
    of a 32 x 32 matrix is 20 to 37 % of its spread instead of 9 %."""
    if layer.weight.device.type == "cpu" and layer.in_features % _BLOCK:
        what = f"int4 on a CPU needs rows of whole {_BLOCK}s; {name} has rows of"
        raise ModelError(_WHERE, f"{what} {layer.in_features}", "use int8, or quantization: none")


# Operators of their own, which the compiler does not look into: it would keep every unpacked weight
# from the forward for the backward (8B, 2 bytes a weight: 13.8 GB more than NF4 on an H200).
@torch.library.custom_op("expert::int8_linear", mutates_args=())
def int8_linear(x: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    """x @ W.T with W kept in 8 bits; the full W lives only while it is multiplied."""
    return F.linear(x, dequantised(rows_int8, scales, x.dtype))


@torch.library.custom_op("expert::int8_linear_input", mutates_args=())
def _gradient_of_input(gradient: Tensor, rows_int8: Tensor, scales: Tensor) -> Tensor:
    return gradient @ dequantised(rows_int8, scales, gradient.dtype)


@torch.library.custom_op("expert::int8_added", mutates_args=())
def int8_added(
    low: Tensor, second: Tensor, x: Tensor, rows_int8: Tensor, scales: Tensor, factor: float
) -> Tensor:
    """x @ W.T + factor * low @ second.T, rounded once; all of them matrices."""
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
    """The weight [out, in] of int8 rows and the largest magnitude of every row; or of FP8 codes and
    their scales."""
    if rows_int8.dtype == torch.uint8:
        return rows_int8.view(_FLOAT8).to(dtype).mul_(scales[:, None])
    # The integers are exact in bfloat16; multiplied in place the product is rounded once, and no
    # float32 copy of the weight is made.
    return rows_int8.to(dtype).mul_(scales.float().div(127.0)[:, None])


def _weight_only(layer: Any) -> nn.Module:
    """An int8 layer that quantises weights alone, with the weights of `layer`.

    The layer of bitsandbytes quantises activations too: through float16, where bfloat16
    activations can overflow; with a wait for the device where outliers are kept apart; and on a
    CPU only in evaluation, so that training and evaluation would see different models.
    """
    layer_class = weight_only_class()
    with torch.device("meta"):
        new: nn.Module = layer_class(
            layer.in_features, layer.out_features, bias=layer.bias is not None
        )
    new.weight, new.bias, new.state = layer.weight, layer.bias, layer.state
    new.requires_grad_(False)
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    return new


def int8_parts(layer: Any) -> tuple[Tensor, Tensor]:
    """The rows of a layer's weight in 8 bits, and the largest magnitude or the scale of each."""
    if isinstance(layer, Float8Linear):
        codes = layer.weight.data
        return (codes.view(torch.uint8) if codes.dtype == nf4.AS_FLOATS else codes), layer.scales
    rows = layer.weight.data.view(torch.int8) if layer.state.CB is None else layer.state.CB
    return rows, layer.state.SCB


def make_plain(model: nn.Module, device: torch.device) -> None:
    """Keep quantised weights as plain tensors, which can be spread over ranks, and the scales of
    all of them on `device`."""
    bnb: Any = sys.modules.get("bitsandbytes")
    layers: Any = model.modules()
    for layer in layers:
        if isinstance(layer, Float8Linear):
            layer.weight = nn.Parameter(layer.weight.data.view(nf4.AS_FLOATS), requires_grad=False)
            layer.scales = layer.scales.to(device)
        elif bnb is None:
            continue
        elif isinstance(layer, bnb.nn.Linear4bit):
            nf4.make_plain(layer)
            layer.quant_state.to(device)
        elif type(layer) is _layer_class:
            layer.weight = nn.Parameter(layer.state.CB.view(nf4.AS_FLOATS), requires_grad=False)
            layer.state.CB, layer.state.SCB = None, layer.state.SCB.to(device)


class Float8Linear(nn.Linear):
    """A frozen linear layer with weights in FP8 (e4m3) and a scale for every row. The codes are
    kept as bytes: PEFT makes adapters of the dtype of weights that are floating-point numbers."""

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
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        out: Tensor = int8_linear(input, *int8_parts(self))
        return out if self.bias is None else out + self.bias.to(out.dtype)


def to_float8(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device | str) -> None:
    """Bring a model to the device with the linear layers of its blocks in FP8, layer by layer: it
    never has to be there as it was."""
    for block in blocks:
        for name, layer in list(block.named_modules()):
            if type(layer) is nn.Linear:
                block.set_submodule(name, Float8Linear(layer, device))
    model.to(device)


def weight_only_class() -> type[Any]:
    """The layer's class: one of bitsandbytes', so that PEFT knows it; made once, when asked for."""
    global _layer_class
    if _layer_class is None:
        parent: Any = importlib.import_module("bitsandbytes").nn.Linear8bitLt

        class WeightOnlyInt8(parent):  # type: ignore[misc]
            def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
                super().__init__(inputs, outputs, bias=bias, has_fp16_weights=False)

            def forward(self, x: Tensor) -> Tensor:
                if torch.is_autocast_enabled(x.device.type):
                    x = x.to(torch.get_autocast_dtype(x.device.type))
                out: Tensor = int8_linear(x, *int8_parts(self))
                return out if self.bias is None else out + self.bias.to(out.dtype)

        _layer_class = WeightOnlyInt8
    return _layer_class


_layer_class: type[Any] | None = None
