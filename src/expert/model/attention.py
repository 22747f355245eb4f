"""Attention restricted to each document of packed rows: kernels for transformers models.

`attention_kwargs` builds what a kernel needs to know about a batch once per forward pass; the model
passes it to every layer's attention function as keyword arguments. These functions read nothing
from the module: reading the layer index would recompile them for every layer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
import os
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.model.fused.document_attention import WIDEST, attend_in_documents, tiles_of
from expert.model.fused.launching import kernel_failure, triton_installed
from expert.model.inputs import ModelInput, documents_of
from expert.planning.models.resolve import expert_home

# Imported here because the calls are inside compiled graphs.
_VARLEN_ATTN: Any = None
_VARLEN_TAKES: frozenset[str] = frozenset()
with contextlib.suppress(ImportError):  # before torch 2.10
    _VARLEN_ATTN = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    _VARLEN_TAKES = frozenset(inspect.signature(_VARLEN_ATTN).parameters)

CUDNN_FAILED = "mha_graph"
"""Part of torch's error message when cuDNN's kernel fails."""

FLASH4_WARNS = "Argument .* cannot be converted to a JitArgument"
"""A warning of FlashAttention 4 about its own arguments while it compiles."""

AttentionKind = Literal["eager", "sdpa", "flash", "flash4", "flex"]

# Their names in transformers. No mask function is registered under these names, so transformers
# builds no mask. A name with "flash" would make transformers import the flash-attn package.
IMPLEMENTATIONS: dict[AttentionKind, str] = {
    "eager": "expert_eager",
    "sdpa": "expert_sdpa",
    "flash": "expert_varlen",
    "flash4": "expert_varlen4",
    "flex": "expert_flex",
}


class AttentionUnavailable(ExpertError):
    """A kernel cannot do what is requested; the message names an alternative."""

    def __init__(self, kind: str, what: str, instead: str) -> None:
        self.kind = kind
        super().__init__(f"attention '{kind}': {what}  ({instead})")


def disable_failed_cudnn(error: BaseException) -> str:
    """If `error` is a failure of cuDNN's kernel, one of those behind SDPA on Hopper cards, disable
    that kernel and return a message for the user; otherwise return "".

    Seen once on an H200 shared by six runs, and not when the same run was alone on it.
    """
    switches: Any = torch.backends.cuda
    if CUDNN_FAILED not in str(error) or not switches.cudnn_sdp_enabled():
        return ""
    switches.enable_cudnn_sdp(False)
    return "cuDNN's attention kernel failed to run: torch's own kernels were used instead"


def register_attention() -> None:
    """Register the kernels with transformers under the names in IMPLEMENTATIONS."""
    interface = importlib.import_module("transformers").AttentionInterface
    for kind, name in IMPLEMENTATIONS.items():
        interface.register(name, _FUNCTIONS[kind])


def attention_kwargs(kind: AttentionKind, batch: ModelInput) -> dict[str, Any]:
    """What the kernel must know about the batch, as keyword arguments of the model."""
    branch = getattr(batch, "branch", None)
    if kind in ("flash", "flash4"):
        known = {"boundaries": batch.boundaries, "longest": batch.longest}
        device, ours = batch.tokens.device, kind == "flash" and branch is None
        if ours and _prefers_own_kernels(device) and not own_kernels_failure(device):
            known["tiles"] = tiles_of(batch.boundaries, batch.tokens.numel())
        if branch is not None:
            names = ("key_places", "key_boundaries", "key_copies")
            known |= {name: getattr(batch, name) for name in names}
        return known
    if kind == "flex":
        return {"block_mask": document_block_mask(batch.positions, branch), "branch": branch}
    if kind == "sdpa" and batch.whole_rows and branch is None:
        return {"document_mask": None}
    # In a branch, neighbouring places may be further apart or closer than their positions.
    positions = None if branch is None else batch.positions
    return {"document_mask": document_mask(batch.positions, branch), "positions": positions}


def _prefers_own_kernels(device: torch.device) -> bool:
    """Whether flash attention is by document_attention.py, which was measured on Hopper alone."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and triton_installed()


@functools.cache
def own_kernels_failure(device: torch.device) -> str:
    """Why these kernels do not work here, tried once per process; empty if they do, or are not
    used. Triton needs a C compiler, which torch's kernels do not."""

    def two_tokens_are_right() -> bool:
        parts = torch.eye(2, 16, device=device, dtype=torch.bfloat16)[:, None]
        boundaries = torch.zeros(1, device=device, dtype=torch.int32)
        made = attend_in_documents(parts, parts, parts, tiles_of(boundaries, 2), 1.0)
        share = torch.tensor([1.0, math.e], device=device) / (1 + math.e)
        return torch.allclose(made[1, 0, :2].float(), share, atol=1e-2)

    if not _prefers_own_kernels(device):
        return ""
    return kernel_failure(two_tokens_are_right, "a kernel gives wrong numbers")


def document_mask(positions: Tensor, branch: Tensor | None = None) -> Tensor:
    """Bool [rows, 1, length, length]: True for earlier positions of the same document that are in
    the same `branch` of it or shared by all."""
    documents = documents_of(positions)
    places = torch.arange(positions.shape[1], device=positions.device)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    visible = same & (places[:, None] >= places)
    if branch is None:
        return visible
    of_key = branch[:, None, None, :]
    return visible & ((of_key == 0) | (of_key == branch[:, None, :, None]))


def document_block_mask(positions: Tensor, branch: Tensor | None = None) -> Any:
    """The same mask for FlexAttention, which skips fully masked blocks."""
    documents = documents_of(positions)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (documents[row, query] == documents[row, key])
        if branch is not None:
            of_key = branch[row, key]
            seen = seen & ((of_key == 0) | (of_key == branch[row, query]))
        return seen

    rows, length = positions.shape
    build = _compiled(create_block_mask) if positions.is_cuda else create_block_mask
    return build(visible, rows, None, length, length, device=positions.device)


class KernelRequest(NamedTuple):
    """What a model asks of a kernel, as transformers names it, and what `attention_kwargs` adds."""

    scaling: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    """Attention sinks: for each head a score of no token."""
    document_mask: Any = None
    boundaries: Any = None
    longest: int = 0
    tiles: Any = None
    block_mask: Any = None
    branch: Any = None
    positions: Any = None
    key_places: Any = None
    key_boundaries: Any = None
    key_copies: Any = None


def _eager(query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest) -> Tensor:
    """Reference attention: materialises all scores, softmax in float32."""
    key, value = _repeated(key, query), _repeated(value, query)
    scaling = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if asked.softcap is not None:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    hidden = ~_windowed(asked.document_mask, asked, query)
    wide = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(hidden, float("-inf"))
    if asked.s_aux is not None:
        sinks = asked.s_aux.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1, dtype=wide)[..., : key.shape[2]]
    weights = F.dropout(weights.to(value.dtype), asked.dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def _sdpa(query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest) -> Tensor:
    """torch's scaled_dot_product_attention: causal if rows are single documents, else masked."""
    mask, length, window = asked.document_mask, query.shape[2], asked.sliding_window
    if window is not None and window < length:
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        mask = _windowed(mask, asked, query)
    options: dict[str, Any] = {"is_causal": True} if mask is None else {"attn_mask": mask}
    if query.shape[1] != key.shape[1]:
        # CUDA kernels with a mask do not support grouped heads and fall back to the math one.
        if mask is None or not query.is_cuda:
            options["enable_gqa"] = True
        else:
            key, value = _repeated(key, query), _repeated(value, query)
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 after rope under autocast
    output = F.scaled_dot_product_attention(
        query, key, value, dropout_p=asked.dropout, scale=asked.scaling, **options
    )
    return output.transpose(1, 2).contiguous()


def _flash(query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest) -> Tensor:
    """Our kernels for documents over all rows concatenated; torch's varlen_attn for what they do
    not do: windows, wide heads, several answers to a prompt, compiled layers."""
    flat, left = _flattened("flash", query, key, value, asked)
    tiles = asked.tiles if left is None and not torch.compiler.is_compiling() else None
    if tiles is not None and query.shape[-1] <= WIDEST:
        made = attend_in_documents(flat[0], flat[1], flat[2], tiles, asked.scaling)
        return made.view(query.transpose(1, 2).shape)
    options = _varlen_options(-1 if left is None else left)
    ends = (asked.boundaries, _key_boundaries(asked), asked.longest, asked.longest)
    output: Tensor = _VARLEN_ATTN(*flat, *ends, scale=asked.scaling, **options)
    return output.view(query.transpose(1, 2).shape)


def _flash_4(query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest) -> Tensor:
    """FlashAttention 4 instead of torch's kernels, for Hopper and Blackwell."""
    flat, left = _flattened("flash4", query, key, value, asked)
    output: Tensor = _flash4()(
        *flat,
        cu_seqlens_q=asked.boundaries,
        cu_seqlens_k=_key_boundaries(asked),
        max_seqlen_q=asked.longest,
        max_seqlen_k=asked.longest,
        softmax_scale=asked.scaling,
        causal=True,
        window_size=(left, None if left is None else 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]
    return output.view(query.transpose(1, 2).shape)


def _flattened(
    kind: str, query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest
) -> tuple[list[Tensor], int | None]:
    """Queries, keys and values of all rows, [tokens, heads, width], and the window to the left
    (None: unlimited)."""
    if not value.is_cuda or value.dtype not in (torch.bfloat16, torch.float16):
        what = f"needs bf16 or fp16 on a CUDA card, not {value.dtype} on {value.device.type}"
        raise AttentionUnavailable(kind, what, "set attention: sdpa")
    rows, _, length, width = query.shape
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 after rope under autocast
    flat = [t.transpose(1, 2).reshape(rows * length, -1, width) for t in (query, key, value)]
    if asked.key_places is not None:
        gathered = (GatherKeys.apply(t, asked.key_places, asked.key_copies) for t in flat[1:])  # type: ignore[no-untyped-call]
        flat[1:] = gathered
    window = asked.sliding_window
    return flat, window - 1 if window is not None and window < asked.longest else None


def _key_boundaries(asked: KernelRequest) -> Any:
    """Where the keys of each sequence begin: where it begins itself, unless keys were gathered."""
    return asked.boundaries if asked.key_places is None else asked.key_boundaries


class GatherKeys(torch.autograd.Function):
    """Keys or values in the order of the sequences that see them, shared ones several times.

    The gradient of a shared key is the sum over its copies, in the order of the branches: adding
    them with atomics would give other bits in every run.
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, places: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies)
        return keys.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (copies,) = ctx.saved_tensors
        total = gradients[0].index_select(0, copies[0])
        for copy in copies[1:]:
            # Rows of keys that no sequence sees are undefined: they must not be added.
            other = gradients[0].index_select(0, copy.clamp(min=0))
            total = total + torch.where((copy >= 0)[:, None, None], other, 0.0)
        return total, None, None


@functools.cache
def _flash4() -> Callable[..., Any]:
    """The package's function. Its compiled kernels are cached in Expert's folder unless the
    environment says otherwise: the default is a folder that other users may write to."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    cache = expert_home() / "flash4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))
    warnings.filterwarnings("ignore", message=FLASH4_WARNS)
    try:
        package: Any = importlib.import_module("flash_attn.cute")
    except ImportError as error:
        instead = f"{pip_install('flash4')}, or attention: flash"
        raise AttentionUnavailable("flash4", f"FlashAttention 4: {error}", instead) from error
    function: Callable[..., Any] = package.flash_attn_varlen_func
    return function


def _flex(query: Tensor, key: Tensor, value: Tensor, asked: KernelRequest) -> Tensor:
    """torch's FlexAttention, with soft cap and sliding window compiled into the kernel."""
    if not query.is_cuda and torch.is_grad_enabled() and query.requires_grad:
        raise AttentionUnavailable("flex", "cannot train on a CPU", "set attention: sdpa")
    softcap, window = asked.softcap, asked.sliding_window
    if window is not None and window >= query.shape[2]:
        window = None
    if window is not None and asked.branch is not None:
        what = "counts the places between two tokens, which several answers to a prompt share"
        raise AttentionUnavailable("flex", what, "set attention: sdpa")
    score = _score_rule(window, softcap) if window is not None or softcap is not None else None
    query, key = query.to(value.dtype), key.to(value.dtype)  # float32 after rope under autocast
    grouped = query.shape[1] != key.shape[1]
    options: dict[str, Any] = {"scale": asked.scaling, "enable_gqa": grouped}
    if asked.s_aux is not None:
        options["return_lse"] = True
    output: Any = _flex_of_torch(query)(query, key, value, score, asked.block_mask, **options)
    if asked.s_aux is not None:  # what the sink leaves of the sum of all scores
        attended, log_sum = output
        left = torch.sigmoid(log_sum - asked.s_aux.to(log_sum.dtype)[:, None])
        output = attended * left[..., None].to(attended.dtype)
    whole: Tensor = output.transpose(1, 2).contiguous()
    return whole


def _for_transformers(
    kind: AttentionKind, kernel: Callable[..., Tensor], *lacks: str
) -> Callable[..., tuple[Tensor, None]]:
    """A kernel as transformers calls it; `lacks`: what it does not support."""

    def attend(
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **known: Any,
    ) -> tuple[Tensor, None]:
        asked = KernelRequest(
            **{name: known[name] for name in KernelRequest._fields if name in known}
        )
        _refuse(kind, attention_mask, asked, lacks, known)
        return kernel(query, key, value, asked), None

    return attend


_FUNCTIONS: dict[AttentionKind, Callable[..., tuple[Tensor, None]]] = {
    "eager": _for_transformers("eager", _eager),
    "sdpa": _for_transformers("sdpa", _sdpa, "softcap", "sinks"),
    "flash": _for_transformers("flash", _flash, "dropout", "softcap", "sinks"),
    "flash4": _for_transformers("flash4", _flash_4, "dropout", "softcap", "sinks"),
    "flex": _for_transformers("flex", _flex, "dropout"),
}


def _refuse(
    kind: str,
    mask: Tensor | None,
    asked: KernelRequest,
    lacks: Sequence[str],
    known: dict[str, Any],
) -> None:
    """Raise if the model requests something that would silently be ignored."""
    if mask is not None:
        what = "the model builds its own attention mask, which packed rows cannot use"
        raise AttentionUnavailable(kind, what, "train a model without one")
    if known.get("position_bias") is not None:
        what = "does not support a position bias (position_bias)"
        raise AttentionUnavailable(kind, what, "use another model")
    if asked.s_aux is not None and "sinks" in lacks:
        what = "does not support attention sinks (s_aux)"
        raise AttentionUnavailable(kind, what, "set attention: flex or eager")
    if asked.dropout > 0 and "dropout" in lacks:
        what = "has no dropout and the model asks for attention_dropout"
        raise AttentionUnavailable(kind, what, "set attention: sdpa, or attention_dropout: 0")
    if asked.softcap is not None and "softcap" in lacks:
        raise AttentionUnavailable(
            kind, "cannot cap scores (softcap)", "set attention: flex or eager"
        )


def _repeated(keys: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, 1)


def _windowed(mask: Tensor, asked: KernelRequest, query: Tensor) -> Tensor:
    """The mask without positions that are further back than the window."""
    length, window = query.shape[2], asked.sliding_window
    if window is None or window >= length:
        return mask
    if asked.positions is not None:
        of_rows: Tensor = asked.positions[:, None]
        return mask & (of_rows[..., :, None] - of_rows[..., None, :] < window)
    places = torch.arange(length, device=query.device)
    return mask & (places[:, None] - places < window)


def _score_rule(window: int | None, softcap: float | None) -> Callable[..., Tensor]:
    def ruled(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if window is not None:
            score = torch.where(query - key < window, score, float("-inf"))
        return score

    return ruled


def _varlen_options(left: int) -> dict[str, Any]:
    """Arguments for this version of varlen_attn: causal, window to the left, grouped heads."""
    if _VARLEN_ATTN is None:
        raise AttentionUnavailable("flash", "needs torch 2.10 or newer", "set attention: flex")
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _VARLEN_TAKES else {}
    if "window_size" in _VARLEN_TAKES:
        return {**options, "window_size": (left, 0)}
    if left >= 0:
        what = f"torch {torch.__version__} has no sliding window here"
        raise AttentionUnavailable("flash", what, "set attention: flex")
    return {**options, "is_causal": True}


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _flex_of_torch(query: Tensor) -> Callable[..., Tensor]:
    """flex_attention: inside the current graph, compiled by itself, or (CPU) uncompiled."""
    if torch.compiler.is_compiling():
        return torch_flex_attention
    if query.is_cuda:
        return _compiled(torch_flex_attention)

    def plain(*args: Any, **options: Any) -> Tensor:
        with warnings.catch_warnings():  # it warns once per process that this is slow
            warnings.filterwarnings("ignore", message="flex_attention called without")
            output: Tensor = torch_flex_attention(*args, **options)
            return output

    return plain


# Allowed relative error of a kernel against eager attention, over all outputs and gradients. bf16
# rounds at 2^-9, fp16 at 2^-12, TF32 (fp32 on a GPU) at 2^-11; the rest is margin for their sums.
# A wrong mask or head order gives errors near 1.
_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 4e-3}
_PROBED = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def attention_failure(
    kind: AttentionKind, device: torch.device, dtype: torch.dtype, *heads: int
) -> str:
    """Why the kernel fails here, forward or backward, or differs from eager attention in float32;
    empty if it works. `heads`: their width, those of queries and those of keys."""
    tolerance = _TOLERANCES.get(dtype, 1e-5)
    try:
        ours = _probe(kind, device, dtype, dtype, *heads)
        reference = _probe("eager", device, dtype, torch.float32, *heads)
        for name, actual, expected in zip(_PROBED, ours, reference, strict=True):
            error_size = float((actual.float() - expected).norm() / expected.norm())
            if not error_size <= tolerance:  # also if it is NaN
                return f"{name} is off by {error_size:.2g} (tolerance {tolerance:.2g} for {dtype})"
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises here is the answer
        return f"{type(error).__name__}: {error}"
    return ""


def _probe(
    kind: AttentionKind,
    device: torch.device,
    dtype: torch.dtype,
    computed_in: torch.dtype,
    *sizes: int,
) -> list[Tensor]:
    """Output and gradients for two rows of three documents, with fixed random numbers."""
    head_dim, heads, kv_heads = sizes
    generator = torch.Generator().manual_seed(0)
    length, starts = 256, (0, 100, 170)
    positions = torch.cat([torch.arange(size) for size in (100, 70, 86)])

    def draw(count: int) -> Tensor:
        numbers = torch.randn(2, length, count, head_dim, generator=generator).to(device, dtype)
        return numbers.to(computed_in).transpose(1, 2)

    parts = [draw(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    weights = draw(heads).transpose(1, 2)
    flat = [*starts, *(length + start for start in starts), 2 * length, 2 * length]
    rows = positions.to(device, torch.int32).expand(2, length).contiguous()
    boundaries = torch.tensor(flat, dtype=torch.int32, device=device)
    batch: Any = SimpleNamespace(
        tokens=rows, positions=rows, boundaries=boundaries, longest=length, whole_rows=False
    )
    output, _ = _FUNCTIONS[kind](None, *parts, None, **attention_kwargs(kind, batch))
    return [output.detach(), *torch.autograd.grad(output, parts, weights)]
