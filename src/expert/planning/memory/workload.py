"""What a step computes: the model, what is trained and how; and the FLOPs per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from expert.manifest.schema.kinds import ADAPTERS, QUANTISED, SPLITS_WEIGHTS
from expert.planning.models.shapes import OF_ATTENTION, ModelShape
from expert.planning.run_plan import RunPlan

CAPTURED_WIDTHS = 7
"""Widths of batches without padding that are captured as CUDA graphs; more pad little less."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, as far as memory and arithmetic are concerned."""

    shape: ModelShape
    rows: int
    row_tokens: int
    """Positions in a row or packed sequence, including soft prompts."""
    adapter: str = "lora"
    rank: int = 16
    targets: frozenset[str] = frozenset()
    """Projections with an adapter, by their Llama-like names; empty: all."""
    quantization: str = "none"
    precision: str = "bf16"
    optimizer: str = "adamw_torch_fused"
    recomputed_blocks: int = 0
    """Checkpointed blocks, which keep only their input and are recomputed in the backward."""
    compiled: bool = True
    fused_blocks: bool = False
    """Blocks use Expert's fused kernels, which keep little."""
    fused_loss: bool = True
    attention: str = "flash"
    branches: int = 0
    """Answers of a document that share its prompt: their keys and values are gathered for flash
    attention, with room for each place once per answer."""
    soft_tokens: int = 0
    """Rows of the trainable table of soft prompts."""
    whole: frozenset[str] = frozenset()
    """Of embedding and head, what is trained whole beside the adapter."""
    prefetch: int = 4
    accumulates: bool = True
    """Several micro-batches make a step: all gradients exist while the next one runs."""
    engine: str = "single"
    shards: int = 1
    """Ranks that hold one copy of the weights together."""
    offload: bool = False
    """The shards are kept in host memory."""
    loss_rows: int | None = None
    """Rows of logits per chunk of the fused loss; None: by the vocabulary alone."""
    captured: bool = False
    """Passes are CUDA graphs, which keep their memory: an evaluation needs its own in addition."""
    widths: int = 1
    """Widths of batches that are captured, each with its own gradients."""
    evaluated_rows: int | None = None
    """Evaluation batch size; None: as in training, 0: nothing is evaluated."""
    evaluated_row_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    @property
    def evaluated_tokens(self) -> int:
        """Tokens of an evaluation batch."""
        rows = self.rows if self.evaluated_rows is None else self.evaluated_rows
        return rows * (self.evaluated_row_tokens or self.row_tokens)

    @cached_property
    def target_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of the adapted layers of a block."""
        sizes = self.shape.linear_sizes
        chosen = self.targets or frozenset(sizes)
        return {name: size for name, size in sizes.items() if name in chosen}

    @cached_property
    def expert_sizes(self) -> Mapping[str, tuple[int, int]]:
        """(in, out) of the adapted weights of an expert."""
        s = self.shape
        if self.adapter != "lora" or not s.experts:
            return {}
        sizes = {
            "gate_up_proj": (s.hidden, 2 * s.expert_ffn),
            "down_proj": (s.expert_ffn, s.hidden),
        }
        # Without an MLP beside them, its names mean theirs.
        parts = {
            "gate_up_proj": {"gate_up_proj", *(() if s.shared_ffn else ("gate_proj", "up_proj"))}
        }
        return {
            name: size
            for name, size in sizes.items()
            if not self.targets or self.targets & parts.get(name, {name})
        }

    def expert_parameters(self, experts: int) -> int:
        """Weights of the adapters of so many experts in every layer."""
        if not self.expert_sizes:
            return 0
        of_layer = ADAPTERS[self.adapter].weights
        each = sum(of_layer(self.rank, *size) for size in self.expert_sizes.values())
        return self.shape.layers * experts * each

    @property
    def is_sharded(self) -> bool:
        return self.engine in SPLITS_WEIGHTS

    @property
    def is_fused(self) -> bool:
        """Fused blocks need all weights on one device."""
        return self.fused_blocks and not self.is_sharded

    @property
    def is_full_finetune(self) -> bool:
        return self.adapter == "full"

    @property
    def computes_in_float32(self) -> bool:
        """Whether the residual stream is float32: if the masters compute directly. Shards are
        gathered in the precision of the run."""
        return self.is_full_finetune and not self.is_sharded

    @cached_property
    def trainable_parameters(self) -> int:
        """Trainable weights: all, or those of the adapter and the soft prompts."""
        shape = self.shape
        soft = self.soft_tokens * shape.hidden
        if self.is_full_finetune:
            return shape.parameters + soft
        if self.adapter == "none":
            return soft
        of_layer = ADAPTERS[self.adapter].weights
        each = {name: of_layer(self.rank, *size) for name, size in self.target_sizes.items()}
        low_rank = shape.layers * sum(each.values()) + self.expert_parameters(shape.experts)
        if shape.recurrent_layers:
            other = shape.recurrent_sizes.items()
            chosen = [size for name, size in other if not self.targets or name in self.targets]
            more = sum(of_layer(self.rank, *size) for size in chosen)
            less = sum(each.get(name, 0) for name in OF_ATTENTION)
            low_rank += shape.recurrent_layers * (more - less)
        return low_rank + self.whole_parameters + soft

    @property
    def whole_parameters(self) -> int:
        """Weights of the embedding and the head that are trained beside the adapter."""
        tables = min(1, len(self.whole)) if self.shape.tied_head else len(self.whole)
        return tables * self.shape.vocab * self.shape.hidden

    @property
    def trains_head(self) -> bool:
        return "lm_head" in self.whole or bool(self.whole and self.shape.tied_head)


def flops_per_token(work: Workload, mean_document: float) -> float:
    """FLOPs per trained token that no implementation can avoid.

    A matrix costs 2 per weight forward and 2 backward for the gradient of its input; trained
    weights cost 2 more. Causal attention inside a document reads half of it on average, forward
    twice (scores, values) and backward 2.5 times as much. Checkpointing repeats the blocks'
    forward.
    """
    s = work.shape
    blocks = s.linear_parameters + s.layers * s.experts_per_token * 3 * s.hidden * s.expert_ffn
    head = s.vocab * s.hidden
    attention = s.layers * 4 * s.q_width * mean_document / 2
    total = 4.0 * (blocks + head) + 3.5 * attention
    if work.is_full_finetune:
        total += 2.0 * (blocks + head)
    else:
        idle = work.expert_parameters(s.experts - s.experts_per_token) if s.experts else 0
        total += 6.0 * (work.trainable_parameters - work.whole_parameters - idle)
        total += 2.0 * head * work.trains_head
    return total + (2.0 * blocks + attention) * work.recomputed_blocks / s.layers


def workload_of(plan: RunPlan) -> Workload | None:
    """The workload of the plan as it is now; None if the model's sizes are unknown."""
    stored = plan.memory.workload
    if stored is None:
        return None
    sets = {name: frozenset(stored[name]) for name in ("targets", "whole")}
    base = Workload(**{**stored, "shape": ModelShape(**stored["shape"]), **sets})
    kernels, quantization, micro = plan.kernels, plan.model.quantization, plan.batch.micro_batch
    sequences, parallel = plan.batch.sequences_per_update, plan.parallel
    evaluated = plan.batch.eval_batch
    if base.evaluated_rows is not None:
        evaluated = min(evaluated, base.evaluated_rows)
    return replace(
        base,
        rows=min(micro, parallel.share_of(sequences)) if sequences else micro,
        row_tokens=plan.data.sequence_length or base.row_tokens,
        quantization=quantization if quantization in QUANTISED else "none",
        precision=kernels.precision,
        attention=kernels.attention,
        compiled=kernels.compile,
        fused_blocks=kernels.fused_blocks,
        fused_loss=kernels.fused_loss,
        recomputed_blocks=kernels.recomputed_blocks or 0,
        optimizer=plan.optim.optimizer,
        accumulates=plan.batch.accumulation != 1,
        captured=kernels.cuda_graphs,
        widths=CAPTURED_WIDTHS if kernels.cuda_graphs and plan.data.flat else 1,
        evaluated_rows=evaluated if kernels.cuda_graphs else None,
        evaluated_row_tokens=plan.data.max_seq_length if kernels.cuda_graphs else None,
    )
