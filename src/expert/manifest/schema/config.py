"""The keys of `training.config`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from expert.manifest.schema.kinds import (
    DPO_LOSSES,
    AdapterType,
    Method,
    Optimizer,
    PreferenceLoss,
    Scheduler,
    SchedulerOptions,
    Tracker,
)
from expert.manifest.schema.types import (
    AUTO,
    Auto,
    Count,
    Flag,
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveNumber,
    PositiveShare,
    Rank,
    Share,
    Size,
    StrictSection,
    Text,
)

Attention = Literal["eager", "sdpa", "flash", "flash4", "flex"]
Checkpointing = Literal["none", "selective", "full"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Cadence = Literal["no", "steps", "epoch"]
ModuleList = Annotated[list[Text], Field(min_length=1)]
Metric = Literal[
    "eval_loss",
    "eval_perplexity",
    "eval_token_accuracy",
    "eval_rewards/accuracies",
    "eval_rewards/margins",
]
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]


class CheckpointingOptions(StrictSection):
    """Options of activation checkpointing."""

    use_reentrant: Flag = False
    """Superseded: the non-reentrant implementation is always used."""


class TrainingConfig(StrictSection):
    """How the expert is trained. An unknown key here is an error."""

    # --- what is trained ---------------------------------------------------------------------
    method: Method = "sft"
    """Training method: supervised fine-tuning (sft), one that trains on single answers that are
    good or bad (kto), or one on preferred and rejected answers in pairs (the others). grpo learns
    from answers of its own: only `expert improve` trains with it."""
    loss_type: PreferenceLoss | Auto = Field(
        AUTO, description=f"dpo only: {', '.join(DPO_LOSSES)}; auto: that of the method."
    )
    beta: PositiveNumber | Auto = AUTO
    """Preferences: how far the model may move from its start; auto: 0.1, simpo 2. grpo: weight of
    the divergence from its start; auto: none."""
    label_smoothing: LabelSmoothing = 0.0
    """Losses sigmoid and robust: the share of preferences assumed to be wrong."""
    simpo_gamma: NonNegativeFloat = 1.0
    """simpo: the target margin between the answers."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of good answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of bad answers."""
    sft_weight: NonNegativeFloat | Auto = AUTO
    """Preferences: weight of the preferred answer's mean loss per token; auto: orpo and cpo 1."""
    adapter_type: AdapterType = "lora"
    """What is trained: an adapter, `full` for all weights, `none` for soft prompts only."""
    rank: Rank | Auto = AUTO
    """Adapter rank; auto: that of adapters[0], else 16. Not for ia3, full and none."""
    alpha: Count | Auto = AUTO
    """Adapter scale, applied as alpha / rank; auto: that of adapters[0], else twice the rank."""
    dropout: Share | Auto = AUTO
    """Dropout before the adapter; auto: that of adapters[0], else 0."""
    target_modules: ModuleList | Literal["all-linear", "auto"] = AUTO
    """Layers that get an adapter; auto: those of adapters[0], else every linear layer."""
    start_from: Text | None = None
    """Adapter whose weights training starts from, and which preferences are compared with: a run,
    or a folder in PEFT's format; null: an untrained one."""
    adapter_init: Literal["default", "pissa"] = "default"
    """lora: how it starts; `pissa`: as the largest singular values of the base's weights."""
    modules_to_save: list[Literal["embed_tokens", "lm_head"]] = []
    """Parts of the base to train whole beside the adapter, as new tokens need it."""
    feedforward_modules: list[Text] = []
    """IA3 only: target modules whose input is scaled instead of their output."""

    # --- length, batch, optimizer ------------------------------------------------------------
    epochs: PositiveNumber = 3.0
    """Passes over the training rows; may be fractional, except with streaming. char-gpt: 25;
    preferences: 1."""
    max_steps: NonNegativeInt | None = None
    """Stop after this many steps; null or 0: no limit."""
    learning_rate: PositiveShare | Auto = AUTO
    """Peak rate; auto: 2e-4, full 2e-5, ia3 and soft prompts 5e-3, from scratch 1e-3; preferences:
    full 5e-7, adapters 5e-6, orpo ten times as much; grpo: full 3e-6, adapters 3e-5."""
    loraplus_lr_ratio: PositiveNumber = 1.0
    """lora, dora: learning rate of the second factor over that of the first (LoRA+: 16)."""
    batch_size: Count | Auto = AUTO
    """Rows per step, before gradient_accumulation_steps; auto: 16; for char-gpt by the GPU."""
    batch_tokens: Count | None = None
    """Tokens per step instead of batch_size; converted to rows by their mean length."""
    gradient_accumulation_steps: Count = 1
    """Multiplies batch_size; the micro-batch size does not change the rows per step."""
    micro_batch_size: Count | Auto = AUTO
    """Micro-batch size, in rows or packed sequences; auto: as large as fits."""
    eval_batch_size: Count | Auto = AUTO
    """Batch size in evaluation, in rows (about so many if packed); auto: as large as fits."""
    eval_max_rows: Count | Auto | None = AUTO
    """Validation rows evaluated at most, the same ones each time; auto: as many as take up to a
    tenth of the time between evaluations; null: all."""
    warmup_steps: NonNegativeInt | None = None
    """Warm-up steps; warmup_ratio takes precedence."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; with neither key: 0.03."""
    lr_scheduler: Scheduler = "cosine"
    """How the learning rate decays after warm-up."""
    lr_scheduler_kwargs: SchedulerOptions = SchedulerOptions()
    """Options of the schedule, listed below."""
    optim: Optimizer | Auto = AUTO
    """Optimizer; auto: fused AdamW on a GPU, plain AdamW on a CPU."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay on matrices."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of AdamW's moving averages."""
    adam_epsilon: PositiveNumber = 1e-8
    """Added to AdamW's denominator against division by zero."""
    max_grad_norm: NonNegativeFloat | None = 1.0
    """Gradients are scaled down to this norm; 0 or null: no clipping."""
    seed: NonNegativeInt = 42
    """Random seed of shuffling, splits, initial adapters and dropout."""

    # --- rows to sequences -------------------------------------------------------------------
    max_seq_length: Count | Auto = AUTO
    """Tokens per sequence; auto: 2048, or the model's context if shorter. Preferences: tokens of a
    prompt and all its answers together."""
    packing: Flag | Literal["best-fit", "concat", "auto"] = AUTO
    """Pack rows into sequences: true (best-fit), concat (join and cut), false; auto: true."""
    group_by_length: Flag | Auto = AUTO
    """Without packing: put rows of similar length into one micro-batch."""
    overlong: Literal["cut", "split", "drop", "auto"] = AUTO
    """Rows longer than max_seq_length: cut off the end, split into parts, or drop; auto: split for
    plain text, cut for rows with answers. All are counted."""
    train_on_prompt: Flag = False
    """Train on the prompt too; false: only answers count in the loss."""
    tokenize: Literal["ahead", "late"] = "ahead"
    """ahead: tokenise once, before training; late: for each batch, to measure what that costs."""
    pretokenized_cache: Text | None = None
    """Folder of prepared tokens, or of `input_ids` that another tool saved; null:
    datasets_optimized/<expert>, keyed by content."""

    # --- hardware and kernels ----------------------------------------------------------------
    bf16: Flag | Auto = AUTO
    """bfloat16 arithmetic; auto: from compute capability 8.0."""
    fp16: Flag | Auto = AUTO
    """float16 arithmetic with loss scaling; auto: on cards without bfloat16."""
    use_tf32: Flag | Auto = AUTO
    """TF32 for the remaining float32 matrix products; auto: from compute capability 8.0."""
    attention: Attention | Auto = AUTO
    """Attention kernel; auto: flash (on Hopper compiled: flex, long rows: flash4) when packed,
    otherwise SDPA, never eager."""
    use_sdpa: Flag | Auto = AUTO
    """Torch's SDPA; true without packing sets attention: sdpa."""
    flash_attention_2: Flag | None = None
    """Superseded: flash kernels run, no flash-attn package is needed."""
    memory_efficient_attention: Flag | None = None
    """Superseded: all kernels except eager are memory-efficient."""
    fused_loss: Flag | Auto = AUTO
    """Compute the cross-entropy in chunks, without the full logits; auto: on."""
    fused_blocks: Flag | Auto = AUTO
    """Fused kernels for blocks with LoRA or DoRA, without torch.compile; auto: on a GPU with
    bf16, where `expert machine --models` says so."""
    torch_compile: Flag | Auto = AUTO
    """Compile each block; auto: on a GPU, if it pays off including the compile time."""
    torch_compile_backend: Literal["inductor"] = "inductor"
    """Backend of torch.compile."""
    torch_compile_mode: CompileMode | Auto = AUTO
    """Mode of torch.compile; auto: default."""
    use_cuda_graphs: Flag | Auto = AUTO
    """Capture forward and backward as CUDA graphs; auto: if kernel launches limit the speed."""
    cuda_graph_warmup_steps: NonNegativeInt | None = None
    """Superseded: graphs are captured after two warm-up passes."""
    gradient_checkpointing: Flag | Checkpointing | Auto = AUTO
    """Activation checkpointing: none, selective, full (= true); auto: none if that fits."""
    gradient_checkpointing_kwargs: CheckpointingOptions = CheckpointingOptions()
    """Options of gradient_checkpointing."""
    activation_checkpointing: Literal["attention_only", "none", "full"] | None = None
    """Superseded by gradient_checkpointing."""
    cudnn_benchmark: Flag | Auto = AUTO
    """Let cuDNN benchmark its algorithms; auto: on a GPU, unless deterministic."""
    deterministic: Flag = False
    """Use only deterministic kernels: a resumed run on a GPU ends bit-identical, but is slower. CPU
    runs are always deterministic."""
    use_unsloth: Flag | None = None
    """Superseded: the built-in kernels replace Unsloth."""
    memory_clear_every: NonNegativeInt | None = None
    """Superseded: shapes are fixed, so there is no cache to clear."""
    vram_limit: Size | None = None
    """Use at most this much GPU memory, such as "16GB"."""
    device: Literal["cuda", "cpu"] | Auto = AUTO
    """Where to train; auto: on a GPU if there is one."""
    distributed: Literal["replicated", "sharded"] | Auto = AUTO
    """How several GPUs share a run: replicated (the model on each, gradients are summed) or
    sharded (weights, gradients and optimizer state are split, as in FSDP and ZeRO-3); auto:
    replicated if everything fits on each GPU."""

    # --- data loading ------------------------------------------------------------------------
    dataloader_num_workers: NonNegativeInt | Auto = AUTO
    """Worker processes; auto: none, a thread reads the memory-mapped tokens."""
    dataloader_prefetch_factor: Count | Auto = AUTO
    """Batches kept ready ahead of the device (per worker, if there are workers)."""
    dataloader_persistent_workers: Flag | Auto = AUTO
    """Keep workers between epochs; no effect without workers."""
    dataloader_pin_memory: Flag | Auto = AUTO
    """Page-locked buffers for faster copies; auto: on a GPU."""

    # --- evaluating, saving, stopping --------------------------------------------------------
    logging_steps: Count = 10
    """Steps between log lines; the last steps of a run get a line as well."""
    save_strategy: Cadence | Auto = AUTO
    """When checkpoints are written; auto: steps if save_steps is set, else epoch."""
    save_steps: Count | None = None
    """Steps between checkpoints."""
    save_every_epochs: Count = 1
    """Epochs between checkpoints with save_strategy epoch; above 1 all are kept by default.
    char-gpt: 5."""
    save_total_limit: Count | None = 3
    """Checkpoints kept; null: all. The best one is kept in addition."""
    evaluation_strategy: Cadence | Auto = AUTO
    """When the validation rows are evaluated; auto: steps if eval_steps is set, else epoch."""
    eval_steps: Count | None = None
    """Steps between evaluations."""
    eval_every_epochs: Count = 1
    """Epochs between evaluations with evaluation_strategy epoch."""
    load_best_model_at_end: Flag | Auto = AUTO
    """Finish with the best checkpoint; auto: if there is an evaluation."""
    metric_for_best_model: Metric = "eval_loss"
    """Metric that decides which checkpoint is best."""
    greater_is_better: Flag | Auto = AUTO
    """Whether higher is better; auto: not for loss and perplexity."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without improvement."""
    early_stopping_threshold: NonNegativeFloat = 0.0
    """Smaller improvements do not count."""
    on_not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """When a gradient is NaN or infinite (the step is never applied): stop, skip the step, or roll
    back to the last checkpoint and skip these rows."""
    max_skipped_updates: Count = 5
    """Consecutive steps skipped because of a non-finite gradient before the run stops."""
    on_loss_spike: Literal["rollback", "ignore"] = "rollback"
    """When the loss spikes far above its noise and stays there: roll back to the last checkpoint
    before it, skip the rows and continue with half the learning rate after a new warm-up; or only
    report it."""
    max_rollbacks: NonNegativeInt = 3
    """Automatic rollbacks to a checkpoint before the run stops."""
    hang_timeout: NonNegativeFloat | Auto = AUTO
    """Seconds without progress, beyond twice the longest step so far, after which a run counts as
    hanging: stack traces are written to the run folder, and it ends with exit code 70. The first
    steps may take ten times as long. auto: 60, or 600 if steps may compile or rows are
    streamed; 0: never."""
    on_sigusr1: Literal["save", "stop"] = "save"
    """On SIGUSR1, which Slurm can send before a job's time limit: save and continue, or save and
    stop."""
    output_dir: Text | None = None
    """Where run folders are created; null: runs/ beside the manifest."""
    trackers: list[Tracker] = ["tensorboard"]
    """Metrics for other tools; events.jsonl is always written."""
    tracker_project: Text | None = None
    """Project (or experiment) of the run in trackers; null: the name of the expert."""
    tracker_run_name: Text | None = None
    """Name of the run in trackers; null: the name of its folder."""

    def runs_beside(self, folder: Path) -> Path:
        """Where the run folders of a manifest in `folder` are created."""
        runs = Path(self.output_dir or "runs")
        with suppress(RuntimeError):  # ~user of an unknown user
            runs = runs.expanduser()
        return folder / runs
