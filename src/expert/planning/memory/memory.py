"""Estimates the GPU memory of a training step from the shapes alone.

Everything is in bytes. The peak of a step is

    resident                      base weights, quantisation tables, adapter, gradients, optimizer
    + activations                 kept from the forward for the backward, all layers
    + one block's workspace       gradients in flight inside the block in the backward
    + loss                        logits, or one chunk of them
    + data buffers
    + CUDA context                kernels and library handles, outside the allocator
    + allocator slack             blocks the caching allocator holds unused

Passes captured as CUDA graphs keep all of that between steps. What runs in between needs its own
memory in addition:

    + captured gradients          those that leave the graphs' pool, and those of further graphs
    + evaluation                  one block's tensors and a chunk of logits, with a float32 copy

What a block keeps per token is counted tensor by tensor in `saved_per_token`; constants that cannot
be counted (context, slack, how much more an uncompiled block keeps) stand with their measurement.
`benchmarks/memory_peaks.py` takes those measurements, `docs/benchmarks/memory-h200.json` holds them
and a test compares this file with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from expert.manifest.schema.kinds import ADAPTERS, OPTIMIZERS, QUANTISED
from expert.planning.memory.shards import COMMUNICATOR_BYTES, shared_parts, slack_bytes
from expert.planning.memory.workload import Workload, workload_of
from expert.planning.run_plan import RunPlan

GIB = 2**30
MIB = 2**20

DORA_OUTPUTS = 0.25
"""Copies of each adapted output that a compiled DoRA block keeps, from one run (8B on NF4, r=14,
docs/benchmarks/training-speed-h200.json). Uncompiled it is 1, by counting: each output before
scaling."""
INT8_INPUTS = 1.4
"""bitsandbytes keeps an 8-bit copy of each input, and scales, which checkpointing cannot free."""

# cuBLAS workspaces, inside the allocator: 68 MB with LoRA, 69 MB with a full model.
LIBRARY_BYTES = 66 * MIB
# On a CPU: resident after importing torch (227 MiB), transformers and PEFT (175) and Expert (53);
# torch 2.13 for aarch64 without CUDA. A run of `tiny` used 684 MiB where 690 were planned.
IMPORTED_BYTES = 455 * MIB
LOGIT_BYTES = 2**30  # of one chunk of the fused loss, at two bytes per logit
LOGIT_SHARE = 1 / 32
"""Of the memory of a small card: 256 MiB of 8 GiB."""
SMALL_VOCABULARY = 512
EVALUATED_ROWS = 512
"""Rows of logits per chunk of an evaluation, at most."""

PRECISION_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# NF4 with double quantisation: 4 bits per weight, an 8-bit scale per 64 weights, and a float32
# scale per 256 of those: 0.5 + 1/64 + 4/(64*256).
NF4_BYTES_PER_WEIGHT = 0.5 + 1 / 64 + 4 / (64 * 256)


# What cannot be counted, for H200 and torch 2.11 (docs/benchmarks/memory-h200.json).
CONTEXT_BYTES = 840 * MIB
"""CUDA context, library handles and loaded kernels: 751-843 MiB, median 835."""
ALLOCATOR_SLACK = 0.05
"""What the caching allocator holds beyond the peak: median 2.7 %, 90 % below 7 %."""

_NOT_ALWAYS = ("gathered_weights", "gradient_sum", "captured_gradients", "evaluation")
"""Of several cards: blocks of sharded weights, gathered while they compute, and buffers that reduce
gradients. Of captured passes: gradients of further graphs and those copied out, and what an
evaluation needs beside passes that keep their memory."""


class MemoryEstimate(dict[str, int]):
    """Bytes by purpose; `total` is what must be free on the card."""

    @property
    def allocated(self) -> int:
        """What torch's allocator hands out at the peak: max_memory_allocated."""
        return self.total - self["cuda_context"] - self["allocator_slack"]

    @property
    def total(self) -> int:
        return sum(self.values())

    def on(self, device: str) -> MemoryEstimate:
        """The same for this device: a CPU has no CUDA context, but holds the imported modules."""
        if device == "cuda":
            return self
        return MemoryEstimate({**self, "cuda_context": 0, "libraries": IMPORTED_BYTES})


@lru_cache(maxsize=1024)  # the search for what fits repeats workloads
def estimate(work: Workload) -> MemoryEstimate:
    """The peak of a training step, by purpose."""
    weights, tables = base_bytes(work)
    trainable = work.trainable_parameters
    loss = loss_bytes(work)
    # Trainable weights beside the base: bfloat16 with float32 masters, whose gradients are kept
    # between steps, or float32 alone. A full model's masters are its base weights.
    each = 0 if work.is_full_finetune else (2 + 4 + 4 if work.precision == "bf16" else 4)
    parts: dict[str, float] = {
        "base_weights": weights,
        "quantisation_tables": tables,
        "adapter": each * trainable + expert_room_bytes(work),
        "gradients": gradient_bytes(work),
        "optimizer": OPTIMIZERS[work.optimizer].state_bytes * trainable,
        "activations": activation_bytes(work),
        # The loss is freed before the last block's backward: only the larger of the two counts.
        "workspace": max(0, workspace_bytes(work) - loss),
        "loss": loss,
        "data_buffers": 4 * 4 * work.tokens * (2 + work.prefetch),
        "libraries": LIBRARY_BYTES,
        "cuda_context": 0,  # the last two are known once the others are
        "allocator_slack": 0,
    }
    parts = shared_parts(parts, work, PRECISION_BYTES[work.precision])
    if work.captured:
        parts |= {
            "captured_gradients": captured_gradient_bytes(work),
            "evaluation": evaluation_bytes(work),
        }
    sizes = {name: int(size) for name, size in parts.items()}
    shape = work.shape
    if work.is_full_finetune and work.precision != "fp32" and not work.is_sharded:
        # 16-bit copies that autocast makes of float32 matrices; shards are gathered in 16 bits.
        matrices = shape.linear_parameters + shape.vocab * shape.hidden
        sizes["base_weights"] += PRECISION_BYTES[work.precision] * matrices
    slack = int(ALLOCATOR_SLACK * sum(sizes.values()))
    if work.is_sharded:
        slack = max(slack, slack_bytes(work, PRECISION_BYTES[work.precision]))
    context = CONTEXT_BYTES + (0 if work.engine == "single" else COMMUNICATOR_BYTES)
    sizes |= {"cuda_context": context, "allocator_slack": slack}
    return MemoryEstimate({n: size for n, size in sizes.items() if size or n not in _NOT_ALWAYS})


def base_bytes(work: Workload) -> tuple[int, int]:
    """Bytes of the base weights, and of the quantisation scales.

    Only the blocks' matrices are quantised, in FP8 all but the last block's; embeddings, norms and
    the head are not. A fully trained model keeps float32 master weights.
    """
    shape = work.shape
    layers = shape.layers - (work.quantization == "fp8")
    matrices = shape.linear_parameters * layers // shape.layers
    rest = shape.parameters - matrices
    width = PRECISION_BYTES[work.precision]
    if work.is_full_finetune:
        return 4 * shape.parameters, 0
    if work.quantization == "int4":
        half = matrices // 2
        return half + width * rest, int(NF4_BYTES_PER_WEIGHT * matrices) - half
    if work.quantization in ("int8", "fp8"):
        outputs = sum(columns for _, columns in shape.linear_sizes.values())
        return matrices + width * rest, 4 * layers * outputs
    return width * shape.parameters, 0


def expert_room_bytes(work: Workload) -> int:
    """Room beside the weights of experts, where their adapters are copied to."""
    spare = _spare(work.rank)
    each = sum(spare * (sum(size) + spare) for size in work.expert_sizes.values())
    return PRECISION_BYTES[work.precision] * work.shape.layers * work.shape.experts * each


def _spare(rank: int) -> int:
    """Columns that grouped products need for an adapter: a multiple of eight."""
    return -(-rank // 8) * 8


def gradient_bytes(work: Workload) -> int:
    """Gradients within a step. Without accumulation they grow only while activations shrink: at the
    peak a full model has just that of its embedding table."""
    if work.is_full_finetune and not work.accumulates:
        return 4 * work.shape.vocab * work.shape.hidden
    narrow = work.precision == "bf16" and not work.is_full_finetune
    return (2 if narrow else 4) * work.trainable_parameters


def captured_gradient_bytes(work: Workload) -> int:
    """Gradients of a second captured pass, for batches with more targets, and of two passes for
    every further width; and the accumulated ones outside the graphs, unless counted with the
    masters of an adapter."""
    narrow = work.precision == "bf16" and not work.is_full_finetune
    passes = 1 + 2 * (work.widths - 1)
    return ((2 if narrow else 4) * passes + (0 if narrow else 4)) * work.trainable_parameters


def evaluation_bytes(work: Workload) -> int:
    """One block's tensors, the hidden states and a chunk of logits, also in float32."""
    s, tokens = work.shape, work.evaluated_tokens
    width = PRECISION_BYTES[work.precision]
    block = saved_per_token(work) + 2 * width * s.hidden + s.recurrent_bytes
    rows = min(tokens, evaluated_chunk_rows(s.vocab, work.loss_rows))
    return tokens * block + rows * s.vocab * (width if width == 4 else width + 4)


def saved_per_token(work: Workload) -> int:
    """Bytes one block keeps per token for its backward, tensor by tensor.

    h hidden, f feed-forward, q and k the widths of queries and of keys or values.

        x                   h   block input: residual and first norm
        norm(x)             h   input of q, k, v: only if one of them is trained
        q, k before norm  q+k   only with query/key norm
        q, k, v          q+2k   what attention reads
        attention out       q   also the input of o
        x + attention       h   residual and second norm
        norm                h   input of gate and up: only if one of them is trained
        gate, up           2f   silu(gate) * up needs both (one alone without a gate)
        silu(gate) * up     f   input of down: only if down is trained
    """
    s = work.shape
    width = PRECISION_BYTES[work.precision]
    q, k, h, f = s.q_width, s.kv_width, s.hidden, s.ffn
    if work.is_fused:
        # Norms and silu(gate) * up are computed again; q and k are also kept before their norm, and
        # together with v before scaling.
        dora = work.adapter == "dora"
        elements = 2.0 * h + q + 2 * k + q + 2 * f + (q + k if s.qk_norm or dora else 0)
        elements += k if dora else 0
        elements += work.rank * len(work.target_sizes)
        elements += 2 * h if dora else 0  # the outputs of o and down before scaling
        elements += 2 * h if s.after_norms else 0  # and before their norm
        # A mask makes SDPA repeat keys and values for grouped queries; padded rows have no mask,
        # and packed rows in 16 bits use flash attention.
        masked = work.attention == "eager" or (work.attention == "sdpa" and width == 4)
        elements += 2 * q if masked and q != k else 0
        elements += _gathered_elements(work)
        return int(width * elements + 4 * s.heads + 8 + _expert_bytes(work))
    # Layers whose input is kept for the gradient of trained weights; IA3 scales one at its input.
    trained = set(s.linear_sizes) if work.is_full_finetune else set(work.target_sizes)
    trained = set() if work.adapter == "none" else trained
    trained = trained & {"down_proj"} if work.adapter == "ia3" else trained
    elements = 2.0 * h + q + 2 * k + q
    elements += h if trained & {"q_proj", "k_proj", "v_proj", "qkv_proj"} else 0
    elements += h if trained & {"gate_proj", "up_proj", "gate_up_proj"} else 0
    elements += q + k if s.qk_norm else 0
    elements += (2 if s.gated_mlp else 1) * f
    elements += f if "down_proj" in trained else 0
    elements += _adapter_elements(work) + _gathered_elements(work)
    if work.attention in ("sdpa", "eager") and not work.compiled:
        elements += 4 * (q - k)  # a mask makes SDPA repeat keys and values for grouped queries
    kept = width * elements + 4 * s.heads  # the softmax normaliser of every head is float32
    return int(kept + _float32_copies(work) + _expert_bytes(work))


def _expert_bytes(work: Workload) -> int:
    """What experts keep beside gate and up: their normed input, the products of their adapters, the
    weights and places of the chosen, and the router's probabilities."""
    s, chosen, width = work.shape, work.shape.experts_per_token, PRECISION_BYTES[work.precision]
    if not s.experts:
        return 0
    if work.is_full_finetune:  # transformers' own, whose inputs are sorted copies
        return chosen * (2 * s.hidden + 35) + 4 * s.experts + 4 * s.hidden
    low = len(work.expert_sizes) * _spare(work.rank)
    return width * (s.hidden + chosen * low) + 4 * s.experts + 30 * chosen


def _gathered_elements(work: Workload) -> int:
    """Keys and values gathered for several answers to a prompt, instead of both as they were; fused
    blocks keep these values anyway, together with queries and keys."""
    if not work.branches or work.attention not in ("flash", "flash4"):
        return 0
    return (2 * work.branches - (1 if work.is_fused else 2)) * work.shape.kv_width


def _adapter_elements(work: Workload) -> float:
    """What adapters add: the rank-sized product of each, and the rescaled outputs."""
    if work.adapter not in ADAPTERS:
        return 0.0
    sizes = work.target_sizes
    if work.adapter == "ia3":
        return float(sum(out for name, (_, out) in sizes.items() if name != "down_proj"))
    elements = float(work.rank * len(sizes))
    if work.adapter == "dora":
        copies = DORA_OUTPUTS if work.compiled else 1
        elements += copies * sum(out for _, out in sizes.values())
    return elements


def _float32_copies(work: Workload) -> float:
    """Float32 copies beside the 16-bit tensors.

    Uncompiled norms keep their input in float32 instead of 16 bits, and silu(gate) is kept beside
    gate. A model with float32 masters has a float32 residual stream: uncompiled, both residuals
    are 2 bytes wider and both norm outputs exist in float32 too; compiled, about 1.5 h remain.
    """
    s = work.shape
    width = PRECISION_BYTES[work.precision]
    wider = 4 - width
    norms = s.norms_per_layer * s.hidden + (s.q_width + s.kv_width if s.qk_norm else 0)
    extra = 0.0
    if not work.compiled:
        plain = s.gated_mlp and not (s.experts and not work.is_full_finetune)
        extra += wider * norms + (width * s.ffn if plain else 0)
    if work.computes_in_float32 and wider:
        query_key = 2 * (s.q_width + s.kv_width) if s.qk_norm else 0
        extra += 1.5 * s.hidden if work.compiled else 13.5 * s.hidden + query_key
    return extra


def activation_bytes(work: Workload) -> int:
    """What all blocks keep when the backward starts; a checkpointed block keeps only its input."""
    s = work.shape
    width = PRECISION_BYTES[work.precision]
    whole = saved_per_token(work)
    kept_blocks = s.layers - work.recomputed_blocks
    input_width = 4 if work.computes_in_float32 else width
    per_token = kept_blocks * whole + work.recomputed_blocks * input_width * s.hidden
    per_token += s.other_bytes + s.recurrent_bytes * s.recurrent_layers * kept_blocks // s.layers
    if work.recomputed_blocks and work.quantization in ("int8", "fp8"):
        inputs = sum(rows for rows, _ in s.linear_sizes.values())
        per_token += int(work.recomputed_blocks * INT8_INPUTS * inputs)
    if work.attention == "eager":
        # Scores and their float32 softmax, for every head and pair of tokens.
        scores = s.heads * work.row_tokens * (width + 4)
        per_token += max(kept_blocks, 1) * scores
    return work.tokens * per_token


def workspace_bytes(work: Workload) -> int:
    """Gradients in flight in the block of the backward, and unpacked weights.

    The feed-forward part is the widest: the gradients of silu(gate)*up, gate and up, and those of
    the block's input and output. A quantised layer is unpacked whole while in use. If all blocks
    are checkpointed, the recomputed tensors of one block are added: as many as a compiled block
    keeps even if it is not compiled (measured), unless float32 weights keep float32 copies in it.
    """
    s = work.shape
    width = PRECISION_BYTES[work.precision]
    in_flight = (3 if s.gated_mlp else 2) * s.ffn + 2 * s.hidden
    if s.experts:  # of every chosen expert the inputs and outputs of both products
        widest = max(s.hidden + 4 * s.expert_ffn, 2 * s.hidden + 2 * s.expert_ffn)
        in_flight = max(in_flight, s.experts_per_token * widest)
    unpacked = 0
    if work.quantization in QUANTISED:
        weights = {name: rows * columns for name, (rows, columns) in s.linear_sizes.items()}
        # In fused blocks those with the same input are unpacked together.
        together: Iterable[tuple[str, ...]] = ((name,) for name in weights)
        if work.is_fused:
            together = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
            together = (*together, ("qkv_proj",), ("gate_up_proj",), ("down_proj",))
        unpacked = width * max(sum(weights.get(name, 0) for name in names) for names in together)
    if work.adapter == "dora":
        # The norm of W + BA is computed over the whole product, in float32.
        sizes = work.target_sizes.values()
        unpacked += 4 * max((rows * columns for rows, columns in sizes), default=0)
    again = 0
    if work.recomputed_blocks == s.layers:
        plain = work.compiled or not work.computes_in_float32
        again = saved_per_token(replace(work, compiled=plain)) + width * s.hidden
        again += s.recurrent_bytes
    return work.tokens * (width * in_flight + again) + unpacked


def loss_bytes(work: Workload) -> int:
    """The last hidden states and their gradient, and the logits: all, or one chunk at a time."""
    s = work.shape
    width = PRECISION_BYTES[work.precision]
    hidden = 2 * width * work.tokens * s.hidden
    hidden += 4 * s.vocab * s.hidden * work.trains_head  # the sum of the head's gradient
    if work.fused_loss:
        rows = min(work.tokens, loss_chunk_rows(s.vocab, work.loss_rows))
        return hidden + width * rows * s.vocab
    # Logits and their gradient in 16 bits, and both in float32.
    return hidden + work.tokens * s.vocab * (2 * width + 8)


def loss_chunk_rows(vocabulary: int, planned: int | None = None) -> int:
    """Rows of logits per chunk of the fused loss: a power of two from 256 to 4096, up to 1 GiB.

    Chunks of 2048 to 8192 rows were equally fast on an H200 (46 ms for 32k rows of 152k words).
    `planned`: the plan's choice for a small card.
    """
    if vocabulary <= SMALL_VOCABULARY:
        return 1 << 20  # logits of characters are smaller than the hidden states: no chunks
    return planned or _power_of_two(LOGIT_BYTES // (2 * vocabulary))


def evaluated_chunk_rows(vocabulary: int, planned: int | None = None) -> int:
    """The same for an evaluation, whose logits also exist in float32, beside captured passes: with
    152k words 2048 rows take 1.9 GB, 512 rows a quarter of that."""
    rows = loss_chunk_rows(vocabulary, planned)
    return rows if vocabulary <= SMALL_VOCABULARY else min(rows, EVALUATED_ROWS)


def loss_chunk_for_budget(vocabulary: int, budget: int) -> int | None:
    """Rows per chunk on a card with little memory, where logits should take a small part of it;
    None if the usual chunk fits."""
    if vocabulary <= SMALL_VOCABULARY:
        return None
    rows = _power_of_two(int(LOGIT_SHARE * budget) // (2 * vocabulary))
    return rows if rows < loss_chunk_rows(vocabulary) else None


def _power_of_two(rows: int) -> int:
    return max(256, min(4096, 1 << max(0, rows.bit_length() - 1)))


def with_new_estimate(plan: RunPlan) -> RunPlan:
    """The plan with its memory estimated again, after a fallback changed batches or kernels."""
    work = workload_of(plan)
    if work is None:
        return plan
    parts = dict(estimate(work).on(plan.kernels.device))
    peak = sum(parts.values())
    values = {
        "memory.peak_bytes": peak,
        "memory.parts": parts,
        "memory.fits": peak <= plan.memory.budget_bytes,
    }
    return plan.with_values(values, "estimate for the current plan", "machine")
