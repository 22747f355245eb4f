"""A decoder block of Llama's kind with LoRA or DoRA, as three functions around its attention.

norm, q k v and rotary embedding; the output of attention, added to the residual; norm, gate and up,
SwiGLU and down, added to the residual. Little is kept for the backward: the inputs of norms, what
q k v and gate up gave, and the narrow products of the adapters. The rest is computed again from
those by passes over memory that cost less than to keep them. Gradients of the residual go through
the functions, so that nothing is added up outside of a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expert.model.fused.kernels import (
    norm,
    norm_backward,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward,
)
from expert.model.fused.packing import is_quantised, pack
from expert.model.fused.product import Product, make_room
from expert.model.lora.dora import faster_class

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Blocks that are computed as this file does it; others of the same names of parts may not be."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Parts:
    """What a block is made of."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    first_norm: Tensor
    second_norm: Tensor
    epsilon: float
    head_norms: tuple[Tensor, Tensor] | None
    heads: tuple[int, int]
    """Of queries, and of keys."""
    width: int
    """Of a head."""


class QueriesKeysValues(torch.autograd.Function):
    """hidden -> queries, keys, values [sequences, heads, length, width], and hidden itself, whose
    gradient is added where that of the norm is made."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, cos: Tensor, sin: Tensor, parts: Parts, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        rows, product = hidden.view(-1, hidden.shape[-1]), parts.qkv
        both = product.with_room(rows)
        inverse = norm(rows, parts.first_norm, parts.epsilon, both[:, : product.inputs])
        made, kept = product.forward(both)
        # What is neither normed nor scaled is not read again before it is turned.
        in_place = parts.head_norms is None and product.magnitudes is None
        turned = rotate(
            made, cos, sin, parts.head_norms, parts.epsilon, parts.heads, in_place=in_place
        )
        ctx.save_for_backward(rows, inverse, made, cos, sin, *kept)
        ctx.parts, ctx.shape = parts, hidden.shape
        queries, keys = parts.heads
        values = made[:, (queries + keys) * parts.width :].view(-1, keys, parts.width)
        split = (turned[:, :queries], turned[:, queries:], values)
        shape = (*hidden.shape[:-1], -1, parts.width)
        return *(part.view(shape).transpose(1, 2) for part in split), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, inverse, made, cos, sin, *kept = ctx.saved_tensors
        parts: Parts = ctx.parts
        of_made = torch.empty_like(made)
        of_queries, of_keys, of_values, residual = gradients
        rotate_backward(
            (of_queries, of_keys, of_values), made, cos, sin,
            parts.head_norms, parts.epsilon, parts.heads, of_made,
        )  # fmt: skip
        x = torch.empty_like(rows)
        norm(rows, parts.first_norm, parts.epsilon, x)
        back = parts.qkv.gradients(of_made, made, tuple(kept), wide=True)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            room = make_room(rows, parts.down.ranks)  # for the block before this one
            norm_backward(back.of_input(), rows, parts.first_norm, inverse, _flat(residual), room)
            of_hidden = _shaped(room, ctx.shape)
        return of_hidden, None, None, None, *back.of_trained(x)


class AttentionOutput(torch.autograd.Function):
    """hidden + the output projection of what attention gave."""

    @staticmethod
    def forward(
        ctx: Any, attended: Tensor, hidden: Tensor, parts: Parts, *trained: Tensor
    ) -> Tensor:
        both = parts.out.with_room(attended)
        both[:, : parts.out.inputs] = attended
        made, kept = parts.out.forward(both, hidden.view(-1, hidden.shape[-1]))
        ctx.save_for_backward(attended, *kept)
        ctx.parts = parts
        return made.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        attended, *kept = ctx.saved_tensors
        back = ctx.parts.out.gradients(_flat(gradients[0]), None, tuple(kept), wide=False)
        return back.of_input(), gradients[0], None, *back.of_trained(attended)


class GatedMlp(torch.autograd.Function):
    """hidden + down(silu(gate) * up) of its norm."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: Parts, *trained: Tensor) -> Tensor:
        rows, product = hidden.view(-1, hidden.shape[-1]), parts.gate_up
        both = product.with_room(rows)
        inverse = norm(rows, parts.second_norm, parts.epsilon, both[:, : product.inputs])
        made, kept = product.forward(both)
        gated = parts.down.with_room(rows)
        swiglu(made, gated[:, : parts.down.inputs])
        out, kept_down = parts.down.forward(gated, rows)
        ctx.save_for_backward(rows, inverse, made, *kept, *kept_down)
        ctx.parts, ctx.kept = parts, len(kept)
        return out.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, inverse, made, *all_kept = ctx.saved_tensors
        parts: Parts = ctx.parts
        gradient = _flat(gradients[0])
        kept, kept_down = tuple(all_kept[: ctx.kept]), tuple(all_kept[ctx.kept :])
        down = parts.down.gradients(gradient, None, kept_down, wide=False)
        gated = down.of_input()
        of_made = swiglu_backward(made, gated)  # leaves in `gated` what it was the gradient of
        trained_down = down.of_trained(gated)
        x = torch.empty_like(rows)
        norm(rows, parts.second_norm, parts.epsilon, x)
        back = parts.gate_up.gradients(of_made, made, kept, wide=True)
        room = make_room(rows, parts.out.ranks)
        norm_backward(back.of_input(), rows, parts.second_norm, inverse, gradient, room)
        of_hidden = _shaped(room, gradients[0].shape)
        return of_hidden, None, *back.of_trained(x), *trained_down


def _shaped(made: Tensor, shape: torch.Size) -> Tensor:
    """The matrix in another shape, with the room that it has."""
    shaped = made.view(shape)
    shaped.whole = made.whole  # type: ignore[attr-defined]
    return shaped


def _flat(gradient: Tensor) -> Tensor:
    """As a matrix, with the room that it has."""
    flat = gradient.reshape(-1, gradient.shape[-1])
    flat.whole = getattr(gradient, "whole", None)  # type: ignore[attr-defined]
    return flat


class FusedForward:
    """What a block's `forward` is; the block's own where it is used in another way."""

    def __init__(self, block: Any, adapter: str) -> None:
        self.plain: Callable[..., Any] = block.forward
        self._attention = block.self_attn
        self._window = window_of(block)
        self.parts = parts_of(block, adapter)

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        layer = self._attention.q_proj
        if args or position_embeddings is None or past_key_values is not None:
            return self._as_it_was(
                hidden_states, *args, position_embeddings, past_key_values, **more
            )
        if layer.disable_adapters or layer.merged or not hidden_states.is_contiguous():
            return self._as_it_was(hidden_states, position_embeddings, past_key_values, **more)
        parts, shape = self.parts, hidden_states.shape
        cos, sin = (
            part.expand(*shape[:-1], -1).reshape(-1, parts.width) for part in position_embeddings
        )
        run: Any = QueriesKeysValues.apply
        queries, keys, values, hidden = run(hidden_states, cos, sin, parts, *parts.qkv.trained())
        attended = self._attended(queries, keys, values, more).reshape(-1, parts.out.inputs)
        run = AttentionOutput.apply
        hidden = run(attended, hidden, parts, *parts.out.trained())
        run = GatedMlp.apply
        return run(hidden, parts, *parts.gate_up.trained(), *parts.down.trained())

    def _as_it_was(self, hidden: Tensor, *args: Any, **more: Any) -> Any:
        *first, embeddings, past = args
        return self.plain(
            hidden, *first, position_embeddings=embeddings, past_key_values=past, **more
        )

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, more: Any) -> Tensor:
        attention = self._attention
        functions: Any = importlib.import_module("transformers.modeling_utils")
        known = functions.ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        given = {name: value for name, value in more.items() if name not in _UNREAD}
        made: Tensor = known(
            attention,
            queries,
            keys,
            values,
            given.pop("attention_mask", None),
            dropout=attention.attention_dropout if attention.training else 0.0,
            scaling=attention.scaling,
            sliding_window=self._window,
            **given,
        )[0]
        return made


_UNREAD = ("position_ids", "use_cache", "cache_position")


def fuse_blocks(blocks: Sequence[nn.Module], adapter: str) -> str:
    """Compute every block by these functions; why not, where one of them cannot be, and then none
    is."""
    for block in blocks:
        reason = why_not(block, adapter)
        if reason:
            return reason
    for block in blocks:
        made: Any = FusedForward(block, adapter)
        block.forward = made
    return ""


def parts_of(block: Any, adapter: str) -> Parts:
    """The block's weights, put together; its own become views of them."""
    attention, mlp = block.self_attn, block.mlp
    width = attention.head_dim
    queries = attention.q_proj.get_base_layer().out_features // width
    keys = attention.k_proj.get_base_layer().out_features // width
    norms = None
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm.weight, attention.k_norm.weight
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Parts(
        qkv=pack(qkv, adapter),
        out=pack((attention.o_proj,), adapter),
        gate_up=pack((mlp.gate_proj, mlp.up_proj), adapter),
        down=pack((mlp.down_proj,), adapter),
        first_norm=block.input_layernorm.weight,
        second_norm=block.post_attention_layernorm.weight,
        epsilon=block.input_layernorm.variance_epsilon,
        head_norms=norms,
        heads=(queries, keys),
        width=width,
    )


def window_of(block: Any) -> int | None:
    """How far back attention looks: of the layer, or for Mistral, whose layers are alike, of the
    model. None of a layer of Qwen means that it looks at everything."""
    attention = block.self_attn
    if hasattr(attention, "sliding_window"):
        found: int | None = attention.sliding_window
        return found
    alike = type(block).__name__ == "MistralDecoderLayer"
    return getattr(attention.config, "sliding_window", None) if alike else None


def why_not(block: Any, adapter: str) -> str:
    """Why a block cannot be computed by these functions; empty where it can."""
    if type(block).__name__ not in KNOWN:
        return f"{type(block).__name__} is not one of {', '.join(KNOWN)}"
    attention, mlp = block.self_attn, block.mlp
    width = attention.head_dim
    if width & (width - 1):
        return f"heads of {width} are not a power of two"
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        return f"the activation is {type(mlp.act_fn).__name__}, not SiLU"
    layers = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    layers += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    reason = next((reason for layer in layers if (reason := _layer(layer, adapter))), "")
    if reason:
        return reason
    if len({layer.scaling[adapter] for layer in layers}) > 1:
        return "the layers are scaled differently"
    kinds = {type(layer.get_base_layer()).__name__ for layer in layers}
    return f"base layers are of several kinds: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def _layer(layer: Any, adapter: str) -> str:
    """A plain base of the adapter's own dtype, and no dropout, which differs between layers."""
    if adapter not in getattr(layer, "lora_A", {}):
        return "not every linear layer of the block has an adapter"
    base, first, second = layer.get_base_layer(), layer.lora_A[adapter], layer.lora_B[adapter]
    plain, dtype = type(base) is nn.Linear, first.weight.dtype
    if not (plain or is_quantised(base)) or base.weight.device != first.weight.device:
        return f"a base layer is {type(base).__name__}"
    if second.weight.dtype != dtype or (plain and base.weight.dtype != dtype):
        return f"the adapter is {dtype} beside {base.weight.dtype}"
    if not isinstance(layer.lora_dropout[adapter], nn.Identity):
        return "the adapter has dropout"
    vectors = layer.lora_magnitude_vector
    dora = adapter not in vectors or isinstance(vectors[adapter], faster_class())
    if not dora or second.bias is not None:
        return "the adapter is neither LoRA nor DoRA"
    return ""
