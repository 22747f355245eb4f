"""A decoder block with LoRA or DoRA, as three autograd functions around attention: norm, q/k/v and
rotary embedding; output projection and residual; norm, gated MLP and residual. Where a model norms
what it adds to the residual, too (Gemma 2 and 3), one more for each; where it has experts instead
of an MLP, their norm, and experts.py.

For the backward only the inputs of the norms, the q/k/v and gate/up outputs and the low-rank
products are saved; the rest is recomputed, which takes less time than saving it. The residual's
gradient also goes through these functions, so that every addition happens inside a kernel.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from expert.model.fused.dropout import seeds_of
from expert.model.fused.kernels import (
    Norm,
    norm,
    norm_backward,
    swiglu,
    swiglu_backward,
)
from expert.model.fused.packing import base_of, has_adapter, is_quantised, pack
from expert.model.fused.product import Product, SavedForBackward, with_spare_columns
from expert.model.fused.rotation import rotate, rotate_backward
from expert.model.lora.dora import fast_dora_class
from expert.planning.models.architectures import ARCHITECTURES, FUSED_TYPES


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockParts:
    qkv: Product
    out: Product
    mlp: tuple[Product, Product] | None
    """gate and up, and down. None: the block has experts."""
    first_norm: Norm | None
    second_norm: Norm | None
    """Of what attention and MLP read."""
    after_norms: tuple[Norm, Norm] | None
    """Of what attention and MLP add to the residual."""
    head_norms: tuple[Norm, Norm] | None
    factor: float
    """Of what attention and MLP add to the residual (Granite)."""
    gelu: bool
    """The activation of the gate; else SiLU."""
    rotates: bool
    """Whether queries and keys know their positions."""
    pairs: bool
    """Neighbouring columns rotate together."""
    turned_once: bool
    """Cosines and sines come for one half of the columns."""
    heads: tuple[int, int]
    """Of queries, of keys."""
    width: int
    """Of a head."""

    def changed(self, change: Callable[[Product], Product]) -> BlockParts:
        return replace(
            self,
            qkv=change(self.qkv),
            out=change(self.out),
            mlp=None if self.mlp is None else (change(self.mlp[0]), change(self.mlp[1])),
        )


class QueriesKeysValues(torch.autograd.Function):
    """hidden -> queries, keys, values [sequences, heads, length, width], and hidden again, so that
    the residual's gradient is added in the norm's backward kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        parts: BlockParts,
        seeds: Tensor | None,
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        rows, product = hidden.view(-1, hidden.shape[-1]), parts.qkv
        both = product.input_buffer(rows)
        inverse = _normed(rows, parts.first_norm, both[:, : product.inputs])
        projected, kept = product.forward(both, seeds)
        finish = product.finish(kept)
        # Without head norms, scale and bias, nothing reads q/k/v before the rotation again.
        in_place = parts.head_norms is None and not finish.is_needed
        head_args = (parts.head_norms, parts.heads, finish)
        turned = rotate(projected, cos, sin, *head_args, pairs=parts.pairs, in_place=in_place)
        ctx.save_for_backward(rows, inverse, projected, cos, sin, *kept)
        ctx.parts, ctx.shape = parts, hidden.shape
        queries, keys = parts.heads
        if finish.is_needed:
            values = turned[:, queries + keys :]
        else:
            values = projected[:, (queries + keys) * parts.width :].view(-1, keys, parts.width)
        split = (turned[:, :queries], turned[:, queries : queries + keys], values)
        shape = (*hidden.shape[:-1], -1, parts.width)
        return *(part.view(shape).transpose(1, 2) for part in split), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, inverse, projected, cos, sin, *all_kept = ctx.saved_tensors
        parts, kept = ctx.parts, SavedForBackward(*all_kept)
        product: Product = parts.qkv
        of_projected = torch.empty_like(projected)
        of_queries, of_keys, of_values, residual = gradients
        rotate_backward(
            (of_queries, of_keys, of_values), projected, cos, sin, parts.head_norms, parts.heads,
            of_projected, product.finish(kept), pairs=parts.pairs,
        )  # fmt: skip
        x = torch.empty_like(rows)
        _normed(rows, parts.first_norm, x)
        back = product.gradients(of_projected, projected, kept, wide=True)
        of_hidden = None
        if ctx.needs_input_grad[0]:
            # The previous block's backward uses the columns.
            room = with_spare_columns(rows, parts.mlp[1].ranks if parts.mlp else 0)
            _normed_back(back.of_input(), rows, parts.first_norm, inverse, _flat(residual), room)
            of_hidden = _shaped(room, ctx.shape)
        return of_hidden, None, None, None, None, *back.of_trained(x)


class AttentionOutput(torch.autograd.Function):
    """hidden + the output projection of attention; that alone if `hidden` is not given."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: Tensor,
        hidden: Tensor | None,
        parts: BlockParts,
        seeds: Tensor | None,
        *trained: Tensor,
    ) -> Tensor:
        both = parts.out.input_buffer(attended)
        both[:, : parts.out.inputs] = attended
        residual = None if hidden is None else hidden.view(-1, hidden.shape[-1])
        summed, kept = parts.out.onto(residual, both, seeds, parts.factor)
        ctx.save_for_backward(attended, *kept)
        ctx.parts, ctx.added = parts, hidden is not None
        return summed if hidden is None else summed.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        attended, *all_kept = ctx.saved_tensors
        kept = SavedForBackward(*all_kept)
        gradient = _times(_flat(gradients[0]), ctx.parts.factor)
        back = ctx.parts.out.gradients(gradient, kept.unscaled, kept, wide=False)
        of_hidden = gradients[0] if ctx.added else None
        return back.of_input(), of_hidden, None, None, *back.of_trained(attended)


class NormedSum(torch.autograd.Function):
    """hidden + the norm of what is added to it; `columns`: spare ones beside its gradient."""

    @staticmethod
    def forward(ctx: Any, added: Tensor, hidden: Tensor, by: Norm, columns: int) -> Tensor:
        summed = torch.empty_like(added)
        inverse = norm(added, by, summed, hidden.view(-1, hidden.shape[-1]))
        ctx.save_for_backward(added, inverse)
        ctx.by, ctx.columns = by, columns
        return summed.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        added, inverse = ctx.saved_tensors
        room = with_spare_columns(added, ctx.columns)  # the product's backward uses it
        norm_backward(_flat(gradients[0]), added, ctx.by, inverse, None, room)
        return room, gradients[0], None, None


class ExpertsInput(torch.autograd.Function):
    """The normed hidden, and hidden again, so that the residual's gradient is added in the norm's
    backward kernel; `columns`: spare ones beside its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, by: Norm, columns: int) -> tuple[Tensor, Tensor]:
        rows = hidden.view(-1, hidden.shape[-1])
        normed = torch.empty_like(rows)
        ctx.save_for_backward(rows, norm(rows, by, normed))
        ctx.by, ctx.columns = by, columns
        return normed.view(hidden.shape), hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, inverse = ctx.saved_tensors
        room = with_spare_columns(rows, ctx.columns)
        norm_backward(_flat(gradients[0]), rows, ctx.by, inverse, _flat(gradients[1]), room)
        return _shaped(room, gradients[1].shape), None, None


class GatedMlp(torch.autograd.Function):
    """hidden + down(silu(gate) * up), with gate and up of the normed hidden; without `hidden +` if
    that is normed before it is added, and then a view of hidden is returned, too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        parts: BlockParts,
        seeds: tuple[Tensor | None, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, Tensor] | Tensor:
        assert parts.mlp is not None
        rows, (product, after) = hidden.view(-1, hidden.shape[-1]), parts.mlp
        both = product.input_buffer(rows)
        inverse = _normed(rows, parts.second_norm, both[:, : product.inputs])
        gate_up, kept = product.forward(both, seeds[0])
        gated = after.input_buffer(rows)
        finish, adds = product.finish(kept), parts.after_norms is None
        swiglu(gate_up, gated[:, : after.inputs], finish, gelu=parts.gelu)
        out, kept_down = after.onto(rows if adds else None, gated, seeds[1], parts.factor)
        ctx.save_for_backward(rows, inverse, gate_up, *kept, *kept_down)
        ctx.parts = parts
        return out.view(hidden.shape) if adds else (out, hidden.view_as(hidden))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        rows, inverse, gate_up, *all_kept = ctx.saved_tensors
        parts: BlockParts = ctx.parts
        assert parts.mlp is not None
        gradient = _times(_flat(gradients[0]), parts.factor)
        count = len(SavedForBackward._fields)
        kept, kept_down = SavedForBackward(*all_kept[:count]), SavedForBackward(*all_kept[count:])
        down = parts.mlp[1].gradients(gradient, kept_down.unscaled, kept_down, wide=False)
        finish = parts.mlp[0].finish(kept)
        gated, rest = down.sum_of_input(complete=finish.rest is None)
        # Replaces the gradient in `gated` with SwiGLU's output, recomputed.
        of_gate_up = swiglu_backward(gate_up, gated, finish, rest, gelu=parts.gelu)
        trained_down = down.of_trained(gated)
        x = torch.empty_like(rows)
        _normed(rows, parts.second_norm, x)
        back = parts.mlp[0].gradients(of_gate_up, gate_up, kept, wide=True)
        room = with_spare_columns(rows, parts.out.ranks)
        residual = _flat(gradients[-1])
        _normed_back(back.of_input(), rows, parts.second_norm, inverse, residual, room)
        of_hidden = _shaped(room, gradients[-1].shape)
        return of_hidden, None, None, *back.of_trained(x), *trained_down


def _normed(rows: Tensor, by: Norm | None, out: Tensor) -> Tensor:
    if by is not None:
        return norm(rows, by, out)
    out.copy_(rows)
    return rows.new_empty(0)


def _normed_back(
    gradient: Tensor, rows: Tensor, by: Norm | None, inverse: Tensor, added: Tensor, out: Tensor
) -> None:
    if by is not None:
        norm_backward(gradient, rows, by, inverse, added, out)
    else:
        out.copy_(gradient + added)


def _shaped(matrix: Tensor, shape: torch.Size) -> Tensor:
    """Reshape a matrix and keep its spare columns (`with_spare_columns`)."""
    shaped = matrix.view(shape)
    shaped.whole = matrix.whole  # type: ignore[attr-defined]
    return shaped


def _flat(gradient: Tensor) -> Tensor:
    """Flatten to a matrix and keep its spare columns (`with_spare_columns`)."""
    flat = gradient.reshape(-1, gradient.shape[-1])
    flat.whole = getattr(gradient, "whole", None)  # type: ignore[attr-defined]
    return flat


def _times(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1.0 else gradient * factor


class FusedForward:
    """The fused `forward` of a block; falls back to the original for calls it does not cover."""

    def __init__(self, block: Any, adapter: str, *, to_answer: bool = False) -> None:
        self.plain: Callable[..., Any] = block.forward
        self._attention, self._mlp = block.self_attn, block.mlp
        self._window = window_of(block)
        self._cap = getattr(block.self_attn, "attn_logit_softcapping", None)
        rope = getattr(block.self_attn.config, "rope_parameters", None) or {}
        self._growth = rope.get("llama_4_scaling_beta")
        self._before: int = rope.get("original_max_position_embeddings") or 0
        adapted = (layer for layer in layers_of(block) if has_adapter(layer, adapter))
        self._adapted: Any = next(adapted, None)
        self.parts = parts_of(block, adapter)
        if to_answer:
            self.parts = self.parts.changed(Product.for_answers)
        # Evaluation should predict how the expert answers: it generates with FP8 weights but 16-bit
        # activations. Rounding them too makes the loss of SmolLM2-135M 1 % higher.
        self._evaluated = self.parts.changed(lambda product: replace(product, float8=None))

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Any:
        layer = self._adapted
        switched_off = layer is not None and (layer.disable_adapters or layer.merged)
        contiguous = hidden_states.is_contiguous()
        if args or position_embeddings is None or switched_off or not contiguous:
            more |= {"position_embeddings": position_embeddings, "past_key_values": past_key_values}
            return self.plain(hidden_states, *args, **more)
        parts = self.parts if self._attention.training else self._evaluated
        shape = hidden_states.shape
        cos, sin = (
            part.expand(*shape[:-1], -1).reshape(-1, part.shape[-1]) for part in position_embeddings
        )
        if parts.turned_once:
            cos, sin = (part.repeat(1, 2) for part in (cos, sin))
        if not parts.rotates:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        of_qkv, of_out, *of_mlp = self._seeds(hidden_states.device)
        run: Any = QueriesKeysValues.apply
        inputs = (hidden_states, cos, sin, parts, of_qkv)
        queries, keys, values, hidden = run(*inputs, *parts.qkv.trained())
        if self._growth and (past_key_values is not None or shape[1] > self._before):
            # Ministral 3: queries grow with every so many positions.
            times = torch.log(1 + torch.floor(more["position_ids"] / self._before))
            queries = queries * (1 + self._growth * times)[:, None, :, None].to(queries.dtype)
        if past_key_values is not None:
            index = self._attention.layer_idx
            keys, values = past_key_values.update(keys, values, index)
        attended = self._attended(queries, keys, values, more).reshape(-1, parts.out.inputs)
        after, sums = parts.after_norms, cast(Any, NormedSum.apply)
        run = AttentionOutput.apply
        made = run(attended, hidden if after is None else None, parts, of_out, *parts.out.trained())
        if parts.mlp is None:
            run = ExpertsInput.apply
            normed, hidden = run(made, parts.second_norm, parts.out.ranks)
            made = self._mlp(normed)
            return hidden + (made[0] if isinstance(made, tuple) else made)
        run = GatedMlp.apply
        trained = tuple(each for product in parts.mlp for each in product.trained())
        if after is None:
            return run(made, parts, tuple(of_mlp), *trained)
        hidden = sums(made, hidden, after[0], parts.out.ranks)
        made, hidden = run(hidden, parts, tuple(of_mlp), *trained)
        return sums(made, hidden, after[1], parts.mlp[1].ranks)

    def _seeds(self, device: torch.device) -> list[Tensor | None]:
        parts = self.parts
        products = (parts.qkv, parts.out, *(parts.mlp or ()))
        if not self._attention.training or not any(product.dropout for product in products):
            return [None] * len(products)
        counts = [len(product.firsts) for product in products]
        drawn = seeds_of(sum(counts), device)
        return list(torch.split_with_sizes(drawn, counts))

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, more: Any) -> Tensor:
        attention = self._attention
        functions: Any = importlib.import_module("transformers.modeling_utils")
        asked = attention.config._attn_implementation
        own: Any = importlib.import_module(type(attention).__module__)  # for "eager"
        attend = functions.ALL_ATTENTION_FUNCTIONS.get_interface(asked, own.eager_attention_forward)
        kwargs = {name: value for name, value in more.items() if name not in _UNREAD}
        if self._cap is not None:
            kwargs["softcap"] = self._cap
        if (sinks := getattr(attention, "sinks", None)) is not None:
            kwargs["s_aux"] = sinks
        attended: Tensor = attend(
            attention,
            queries,
            keys,
            values,
            kwargs.pop("attention_mask", None),
            dropout=attention.attention_dropout if attention.training else 0.0,
            scaling=attention.scaling,
            sliding_window=self._window,
            **kwargs,
        )[0]
        return attended


_UNREAD = ("position_ids", "use_cache", "cache_position")


def fuse_blocks(blocks: Sequence[nn.Module], adapter: str, *, to_answer: bool = False) -> str:
    """Replace `forward` of all blocks by the fused one; or of none, and return the reason.

    `to_answer`: not to train, so that blocks need no adapter. Quantised weights are then refused:
    they would be dequantised for every token."""
    for block in blocks:
        reason = fusion_obstacle(block, adapter, to_answer=to_answer)
        if reason:
            return reason
    for block in blocks:
        fused: Any = FusedForward(block, adapter, to_answer=to_answer)
        block.forward = fused
    return ""


def parts_of(block: Any, adapter: str) -> BlockParts:
    """Pack the block's weights; its parameters become views of the packed matrices."""
    attention, known = block.self_attn, ARCHITECTURES[kind_of(block)]
    qkv, out, *of_mlp = products_of(block)
    width, like = attention.head_dim, block.post_attention_layernorm.weight
    queries = base_of(out[0]).in_features // width
    keys = (sum(base_of(layer).out_features for layer in qkv) // width - queries) // 2

    def norm_of(module: Any) -> Norm:
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        return Norm(module.weight, epsilon, known.norm == "rms 1+w")

    reads = ("input_layernorm", "post_attention_layernorm")
    adds = ("post_attention_layernorm", "post_feedforward_layernorm")
    if hasattr(block, "post_self_attn_layernorm"):  # GLM 4
        adds = ("post_self_attn_layernorm", "post_mlp_layernorm")
    elif known.norms == "around":
        reads = ("input_layernorm", "pre_feedforward_layernorm")
    first, second = (
        None if known.norms == "after" else norm_of(getattr(block, name)) for name in reads
    )
    after = None if known.norms == "before" else tuple(norm_of(getattr(block, n)) for n in adds)
    head_norms = (attention.q_norm, attention.k_norm) if known.head_norms else ()
    mlp = None
    if of_mlp:
        mlp = pack(of_mlp[0], adapter, like, for_swiglu=True), pack(of_mlp[1], adapter, like)
    return BlockParts(
        qkv=pack(qkv, adapter, like),
        out=pack(out, adapter, like),
        mlp=mlp,
        first_norm=first,
        second_norm=second,
        after_norms=after,  # type: ignore[arg-type]
        head_norms=tuple(  # type: ignore[arg-type]
            norm_of(each)._replace(across=known.head_norms == "width") for each in head_norms
        )
        or None,
        factor=getattr(block, "residual_multiplier", 1.0),
        gelu=known.mlp == "gelu",
        rotates=getattr(attention, "use_rope", True),
        pairs=known.rotation == "pairs",
        turned_once=known.rotation == "halves once",
        heads=(queries, keys),
        width=width,
    )


def kind_of(block: Any) -> str:
    """The model_type of a block of transformers; "" of one that came with a model."""
    own = type(block).__module__.startswith("transformers.models.")
    return str(block.self_attn.config.model_type) if own and hasattr(block, "self_attn") else ""


def window_of(block: Any) -> int | None:
    """The sliding window of the layer, or for Mistral of the model. None: full attention."""
    attention = block.self_attn
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    everywhere = ARCHITECTURES[kind_of(block)].window_everywhere
    return getattr(attention.config, "sliding_window", None) if everywhere else None


def fusion_obstacle(block: Any, adapter: str, *, to_answer: bool = False) -> str:
    """Why a block cannot be fused; empty if it can."""
    kind, name = kind_of(block), type(block).__name__
    if kind not in FUSED_TYPES:
        slow = ARCHITECTURES[kind].slow_because if kind in ARCHITECTURES else ""
        return f"{name} has {slow}" if slow else f"{name} is not of {', '.join(FUSED_TYPES)}"
    mlp = block.mlp
    function = type(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)).__name__
    usual = ("GELUTanh",) if ARCHITECTURES[kind].mlp == "gelu" else ("SiLU", "SiLUActivation")
    if function not in usual and not has_experts(block):
        return f"the activation is {function}, not {usual[0]}"
    layers = layers_of(block)
    adapted = [layer for layer in layers if has_adapter(layer, adapter)]
    if not adapted and not to_answer:
        return "no linear layer of the block has an adapter"
    like = block.post_attention_layernorm.weight.dtype
    for layer in layers if to_answer else ():
        base = base_of(layer)
        if type(base) is not nn.Linear or base.weight.dtype != like:
            return f"a base layer is {type(base).__name__} in {base.weight.dtype}"
        if layer is not base and layer not in adapted:
            return f"the adapter is {type(layer).__name__}"
    reason = next((reason for layer in adapted if (reason := _layer_obstacle(layer, adapter))), "")
    if reason:
        return reason
    alike = {
        "scaled differently": {layer.scaling[adapter] for layer in adapted},
        "of several ranks": {layer.lora_A[adapter].weight.shape[0] for layer in adapted},
        "dropped differently": {str(layer.lora_dropout[adapter]) for layer in adapted},
    }
    reason = next((name for name, values in alike.items() if len(values) > 1), "")
    if reason:
        return f"the layers are {reason}"
    kinds = {type(base_of(layer)).__name__ for layer in layers}
    return f"base layers are of several kinds: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def layers_of(block: Any) -> list[Any]:
    return [layer for layers in products_of(block) for layer in layers]


def products_of(block: Any) -> tuple[tuple[Any, ...], ...]:
    """The layers of q/k/v, of the output, of gate and up, and of down; without experts."""
    attention, mlp, merged = block.self_attn, block.mlp, ARCHITECTURES[kind_of(block)].merged
    names = ("qkv_proj",) if merged == "all" else ("q_proj", "k_proj", "v_proj")
    qkv = tuple(getattr(attention, name) for name in names)
    if has_experts(block):
        return qkv, (attention.o_proj,)
    gate_up = (mlp.gate_up_proj,) if merged else (mlp.gate_proj, mlp.up_proj)
    return qkv, (attention.o_proj,), gate_up, (mlp.down_proj,)


def has_experts(block: Any) -> bool:
    """Whether the block has experts instead of an MLP."""
    return hasattr(block.mlp, "experts")


def _layer_obstacle(layer: Any, adapter: str) -> str:
    """Why a layer cannot be fused; empty if it can."""
    base, first, second = layer.get_base_layer(), layer.lora_A[adapter], layer.lora_B[adapter]
    plain, dtype = type(base) is nn.Linear, first.weight.dtype
    if not (plain or is_quantised(base)) or base.weight.device != first.weight.device:
        return f"a base layer is {type(base).__name__}"
    if second.weight.dtype != dtype or (plain and base.weight.dtype != dtype):
        return f"the adapter is {dtype} beside {base.weight.dtype}"
    if not isinstance(layer.lora_dropout[adapter], (nn.Identity, nn.Dropout)):
        return f"dropout is {type(layer.lora_dropout[adapter]).__name__}"
    vectors = layer.lora_magnitude_vector
    dora = adapter not in vectors or isinstance(vectors[adapter], fast_dora_class())
    if not dora or second.bias is not None:
        return "the adapter is neither LoRA nor DoRA"
    return ""
