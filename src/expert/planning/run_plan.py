"""What will happen: every value settled, each with its reason. From here on nobody reads "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from expert.manifest.schema.kinds import Engine
from expert.planning.decisions import Decision, Remark, Source


class Slice(BaseModel):
    """A part of the plan, for the part of the program that needs it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelPlan(Slice):
    name: str
    place: Literal["built-in", "folder", "models folder", "hf cache", "hub"]
    location: str
    revision: str | None
    parameters: int | None
    architecture: dict[str, Any] | None
    quantization: str
    prompt_template: str | None


class AdapterPlan(Slice):
    type: str
    rank: int | None
    alpha: float | None
    dropout: float
    target_modules: list[str] | str | None
    feedforward_modules: list[str]
    soft_prompts: list[dict[str, Any]]
    trainable_parameters: int | None


class KernelPlan(Slice):
    device: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp16", "fp32"]
    loss_scaling: bool
    tf32: bool
    attention: Literal["eager", "sdpa", "flash", "flash4", "flex"]
    fused_loss: bool
    compile: bool
    compile_mode: str
    compile_backend: str
    checkpointing: Literal["none", "selective", "full"]
    recomputed_blocks: int | None
    cudnn_benchmark: bool
    deterministic: bool = False
    cuda_graphs: bool = False
    fused_blocks: bool = False
    loss_chunk: int | None = None
    """Rows of logits that the fused loss holds at once; None: by the vocabulary alone."""


class DataPlan(Slice):
    dataset: dict[str, Any]
    validation: str
    max_seq_length: int
    packing: Literal["best-fit", "concat", "none"]
    group_by_length: bool
    overlong: Literal["cut", "split", "drop"]
    train_on_prompt: bool
    cache: str | None
    tokenize: Literal["ahead", "late"] = "ahead"
    sequence_length: int | None = None
    """Tokens of a packed sequence: max_seq_length, or less. Plans of older runs do not have it."""
    trim: bool = False
    """Batches are as wide as their fullest sequence, not all of one width."""
    flat: bool = False
    """Sequences of a batch lie end to end, without padding between them."""


class BatchPlan(Slice):
    examples_per_update: int
    sequences_per_update: int | None
    micro_batch: int
    accumulation: int | None
    eval_batch: int
    tokens_per_step: int | None = None
    """From batch_tokens: a step has as many rows as hold them."""


class LoaderPlan(Slice):
    workers: int
    prefetch: int
    persistent_workers: bool
    pin_memory: bool


class OptimPlan(Slice):
    optimizer: str
    learning_rate: float
    scheduler: str
    scheduler_options: dict[str, float]
    warmup_steps: int | None
    warmup_ratio: float | None
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    max_grad_norm: float
    seed: int


class LengthPlan(Slice):
    epochs: float
    max_steps: int | None
    rows: int | None
    tokens_per_epoch: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    seconds: float | None
    seconds_at_peak: float | None
    tokens_per_second: float | None = None
    """Measured before for a run like this one; the time is computed from it."""
    flops_per_token: float | None = None
    peak_flops: float | None = None
    expected_seconds: tuple[float, float] | None = None
    """From the command to the end of the run: at best and at worst."""
    expected_parts: dict[str, tuple[float, float]] | None = None
    """What that is the sum of: prepare, start, compile, train, evaluate."""


class WatchPlan(Slice):
    logging_steps: int
    save_strategy: Literal["no", "steps", "epoch"]
    save_steps: int | None
    save_every_epochs: int
    keep_checkpoints: int | None
    evaluation_strategy: Literal["no", "steps", "epoch"]
    eval_steps: int | None
    eval_every_epochs: int
    load_best: bool
    metric: str
    greater_is_better: bool
    early_stopping_patience: int | None
    early_stopping_threshold: float
    trackers: list[str]
    output_dir: str
    packaging_checkpoint: str
    tracker_project: str | None = None
    tracker_run_name: str | None = None
    hang_seconds: float = 600.0
    """Without progress; 0: never."""
    on_sigusr1: Literal["save", "stop"] = "save"


class StabilityPlan(Slice):
    on_not_finite: Literal["stop", "skip", "rollback"]
    max_skipped_updates: int
    on_loss_spike: Literal["rollback", "ignore"]
    max_rollbacks: int


class MemoryPlan(Slice):
    budget_bytes: int
    cap_bytes: int | None = None
    peak_bytes: int | None
    parts: dict[str, int] | None
    fits: bool | None
    workload: dict[str, Any] | None = None
    """What was estimated: memory.calibration makes a Workload of it again."""


class ParallelPlan(Slice):
    """How the processes of a run share its work; `micro_batch`, `accumulation` and memory are those
    of one of them."""

    engine: Engine = "single"
    ranks: int = 1
    """Processes of all machines together, each with a device of its own."""
    nodes: int = 1
    link: str | None = None
    """Between the cards of a machine, where it is known."""
    network: str | None = None
    """Between machines, where it is known."""
    shard_ranks: int = 1
    """Ranks that hold one copy of the weights between them: those of a machine, or all."""
    host_link: str | None = None
    """Between a card and the memory of its machine, where something is offloaded to it."""
    offload: bool = False
    """Shards of weights and optimizer state wait in the memory of the host."""
    host_bytes: int | None = None
    """Memory of each machine that they take there."""
    sent_bytes: int | None = None
    """That a card sends in a step."""
    communication_seconds: float | None = None
    """That sending them takes; part of it while the card computes."""
    rank_tokens_per_second: tuple[float, float] | None = None
    """Of one rank while it computes, from the slowest to the fastest to be expected."""
    alone_tokens_per_second: tuple[float, float] | None = None
    """Of one card that computes whole steps alone, where it can."""
    tokens_per_second: tuple[float, float] | None = None
    """Of all ranks together, communication included."""
    efficiency: tuple[float, float] | None = None
    """Share of what so many single cards would reach."""

    def share_of(self, sequences: int) -> int:
        """Sequences of a step that the busiest rank computes."""
        return -(-sequences // self.ranks)


class DiskPlan(Slice):
    cache_bytes: int | None
    checkpoint_bytes: int | None
    total_bytes: int | None


class RunPlan(BaseModel):
    """The whole plan. It round-trips through JSON and holds no "auto"."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    expert: str
    target: str
    model: ModelPlan
    adapter: AdapterPlan
    kernels: KernelPlan
    data: DataPlan
    batch: BatchPlan
    loader: LoaderPlan
    optim: OptimPlan
    length: LengthPlan
    watch: WatchPlan
    stability: StabilityPlan
    decoding: dict[str, Any]
    memory: MemoryPlan
    disk: DiskPlan
    parallel: ParallelPlan = ParallelPlan()
    """Plans of older runs do not have it."""
    decisions: tuple[Decision, ...]
    remarks: tuple[Remark, ...]

    def with_values(self, values: Mapping[str, Any], because: str, source: Source) -> RunPlan:
        """The plan with other values by path, and the decisions that say why.

        ValueError for a path that the plan does not have."""
        unknown = sorted(values.keys() - plan_paths())
        if unknown:
            raise ValueError(f"the plan has no {', '.join(unknown)}")
        tree = self.model_dump()
        made = {}
        for path, value in values.items():
            slice_name, key = path.split(".")
            tree[slice_name][key] = value
            made[path] = Decision(path=path, value=value, because=because, source=source)
        kept = [made.pop(decision.path, decision) for decision in self.decisions]
        return RunPlan.model_validate({**tree, "decisions": [*kept, *made.values()]})

    @property
    def warnings(self) -> tuple[str, ...]:
        """Its warnings, each with the key that it is about; a max_steps that the epochs end before
        is one, since the run is shorter than asked for."""
        found = (r for r in self.remarks if r.kind == "warning" or r.path == "length.max_steps")
        return tuple(f"{each.path}: {each.text}" for each in found)

    @property
    def fits(self) -> bool:
        """False only where the estimate says that it cannot run; unknown counts as yes."""
        return self.memory.fits is not False


@cache
def plan_paths() -> frozenset[str]:
    """Every value of a plan by its path, such as `batch.micro_batch`."""
    slices = {name: field.annotation for name, field in RunPlan.model_fields.items()}
    return frozenset(
        f"{name}.{key}"
        for name, kind in slices.items()
        if isinstance(kind, type) and issubclass(kind, Slice)
        for key in kind.model_fields
    )
