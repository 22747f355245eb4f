"""The plan of a run: every value settled with its reason. From here on there is no "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from expert.manifest.schema.kinds import WITHOUT_REFERENCE, Engine, Method, PreferenceLoss
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.decisions import Decision, Remark, Source


class Slice(BaseModel):
    """A section of the plan."""

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


class ObjectivePlan(Slice):
    """What the model learns: to predict answers (sft), or which of two is preferred."""

    method: Method = "sft"
    loss: PreferenceLoss | None = None
    """None: next-token loss, which has none of the values below."""
    beta: float = 0.0
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.0
    sft_weight: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    @property
    def branches(self) -> int:
        """Answers of every document; 0: documents are not divided. KTO's third is the answer of
        another row, which measures how far the model is from its start."""
        return {None: 0, "kto": 3}.get(self.loss, 2)

    @property
    def needs_reference(self) -> bool:
        return self.loss is not None and self.loss not in WITHOUT_REFERENCE


class AdapterPlan(Slice):
    type: str
    rank: int | None
    alpha: float | None
    dropout: float
    target_modules: list[str] | str | None
    feedforward_modules: list[str]
    soft_prompts: list[dict[str, Any]]
    trainable_parameters: int | None
    start: str | None = None
    """Folder of the adapter that training starts from."""
    init: str = "default"
    modules_to_save: list[str] = []
    """Parts of the base that are trained whole, beside the adapter."""

    @property
    def changes_base(self) -> bool:
        """Whether the base that it is trained in is not the one that others share."""
        return self.type == "full" or bool(self.modules_to_save) or self.init == "pissa"


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
    """Rows of logits per chunk of the fused loss; None: by the vocabulary alone."""


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
    """Length of a packed sequence: max_seq_length or less. Not in plans of older runs."""
    trim: bool = False
    """Batches are trimmed to their fullest sequence instead of having one width."""
    flat: bool = False
    """Sequences of a batch lie end to end, without padding."""


class BatchPlan(Slice):
    examples_per_update: int
    sequences_per_update: int | None
    micro_batch: int
    accumulation: int | None
    eval_batch: int
    tokens_per_step: int | None = None
    """From batch_tokens: a step has as many rows as hold this many tokens."""


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
    loraplus_lr_ratio: float = 1.0


class LengthPlan(Slice):
    epochs: float
    max_steps: int | None
    rows: int | None
    tokens_per_epoch: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    expected_seconds: tuple[float, float] | None = None
    """From the start to the end of the run, at best and at worst; None where nothing like it was
    measured."""

    @property
    def epochs_reached(self) -> float | None:
        """How many epochs a run makes that max_steps ends before its last; None if nothing does, or
        if unknown."""
        total, per_epoch = self.total_steps, self.steps_per_epoch
        if not self.max_steps or total is None or not per_epoch or total < self.max_steps:
            return None
        return total / per_epoch if total < self.epochs * per_epoch else None


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
    """Time without progress before the run is stopped; 0: never."""
    on_sigusr1: Literal["save", "stop"] = "save"
    eval_rows: int | None = None
    """Validation rows evaluated at most; None: all."""


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
    """The estimated workload; memory.workload restores a Workload from it."""


class ParallelPlan(Slice):
    """How the processes of a run share its work; `micro_batch`, `accumulation` and memory are per
    process."""

    engine: Engine = "single"
    ranks: int = 1
    """Processes on all machines together, each with its own device."""
    nodes: int = 1
    shard_ranks: int = 1
    """Ranks that hold one copy of the weights together: those of a machine, or all."""
    offload: bool = False
    """Shards of weights and optimizer state are kept in host memory."""
    host_bytes: int | None = None
    """Host memory for them on each machine."""

    def share_of(self, sequences: int) -> int:
        """Sequences of a step that the busiest rank computes."""
        return -(-sequences // self.ranks)


class DiskPlan(Slice):
    cache_bytes: int | None
    checkpoint_bytes: int | None
    total_bytes: int | None


class RunPlan(Slice):
    """The whole plan. It round-trips through JSON and holds no "auto"."""

    expert: str
    target: str
    model: ModelPlan
    objective: ObjectivePlan
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
    """Not in plans of older runs."""
    decisions: tuple[Decision, ...]
    remarks: tuple[Remark, ...]

    def with_values(self, values: Mapping[str, Any], because: str, source: Source) -> RunPlan:
        """The plan with other values by path, and a decision with the reason for each.

        ValueError for a path that the plan does not have."""
        unknown = sorted(values.keys() - plan_paths())
        if unknown:
            raise ValueError(f"the plan has no {', '.join(unknown)}")
        tree = self.model_dump()
        changed = {}
        for path, value in values.items():
            slice_name, key = path.split(".")
            tree[slice_name][key] = value
            changed[path] = Decision(path=path, value=value, because=because, source=source)
        decisions = [changed.pop(decision.path, decision) for decision in self.decisions]
        return RunPlan.model_validate({**tree, "decisions": [*decisions, *changed.values()]})

    @property
    def soft_tokens(self) -> int:
        """Positions that soft prompts take before every row."""
        return sum(prompt["tokens"] for prompt in self.adapter.soft_prompts)

    @property
    def is_padded(self) -> bool:
        """Whether each row is padded to the longest; blocks of a corpus need no padding."""
        return self.data.packing == "none" and self.model.name != CHAR_GPT

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings, each with its key; including a max_steps that the epochs do not reach,
        since the run is shorter than requested."""
        remarks = (r for r in self.remarks if r.kind == "warning" or r.path == "length.max_steps")
        return tuple(f"{remark.path}: {remark.text}" for remark in remarks)

    @property
    def fits(self) -> bool:
        """False only if the estimate says that it cannot run; unknown counts as True."""
        return self.memory.fits is not False


@cache
def plan_paths() -> frozenset[str]:
    """The path of every plan value, such as `batch.micro_batch`."""
    slices = {name: field.annotation for name, field in RunPlan.model_fields.items()}
    return frozenset(
        f"{name}.{key}"
        for name, kind in slices.items()
        if isinstance(kind, type) and issubclass(kind, Slice)
        for key in kind.model_fields
    )
