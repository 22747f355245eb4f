"""`training.config`: what every key means, and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from expert.manifest.schema.kinds import (
    AdapterType,
    Optimizer,
    Scheduler,
    SchedulerOptions,
    Tracker,
)
from expert.manifest.schema.types import (
    AUTO,
    Auto,
    Count,
    CountFromZero,
    Flag,
    Momentum,
    NumberFromZero,
    PositiveNumber,
    Rank,
    Share,
    SharePastZero,
    Size,
    StrictSection,
    Text,
)

Attention = Literal["eager", "sdpa", "flash", "flash4", "flex"]
Checkpointing = Literal["none", "selective", "full"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Cadence = Literal["no", "steps", "epoch"]
ModuleList = Annotated[list[Text], Field(min_length=1)]
Metric = Literal["eval_loss", "eval_perplexity", "eval_token_accuracy"]


class CheckpointingOptions(StrictSection):
    """Options of activation checkpointing."""

    use_reentrant: Flag = False
    """Superseded: the non-reentrant implementation is always used."""


class TrainingConfig(StrictSection):
    """How the expert is trained. An unknown key here is an error."""

    # --- what is trained ---------------------------------------------------------------------
    method: Literal["sft"] = "sft"
    """Kind of training; supervised fine-tuning is the one there is."""
    adapter_type: AdapterType = "lora"
    """What is trained: an adapter kind, `full` for all weights, `none` for soft prompts alone."""
    rank: Rank | Auto = AUTO
    """Adapter rank; auto: that of adapters[0], else 16. Not for ia3, full and none."""
    alpha: Count | Auto = AUTO
    """Adapter scale, applied as alpha / rank; auto: that of adapters[0], else twice the rank."""
    dropout: Share | Auto = AUTO
    """Dropout before the adapter; auto: that of adapters[0], else 0."""
    target_modules: ModuleList | Literal["all-linear", "auto"] = AUTO
    """Layers that get an adapter; auto: those of adapters[0], else every linear layer."""
    feedforward_modules: list[Text] = []
    """IA3 only: those of the target modules that are scaled at their input."""

    # --- how long, how fast ------------------------------------------------------------------
    epochs: PositiveNumber = 3.0
    """Passes over the training rows; may be fractional, but not of a stream."""
    max_steps: CountFromZero | None = None
    """Stop after this many steps; null or 0: no limit."""
    learning_rate: SharePastZero | Auto = AUTO
    """Peak rate; auto: 2e-4, full 2e-5, ia3 and soft prompts 5e-3, from scratch 1e-3."""
    batch_size: Count | Auto = AUTO
    """Rows per step, before gradient_accumulation_steps; auto: 16, for char-gpt by the card."""
    batch_tokens: Count | None = None
    """Tokens per step instead of batch_size; converted to rows by their mean length."""
    gradient_accumulation_steps: Count = 1
    """Multiplies batch_size; the rows per step stay the same whatever micro-batch fits."""
    micro_batch_size: Count | Auto = AUTO
    """Micro-batch size, in rows or packed sequences; auto: as large as fits."""
    eval_batch_size: Count | Auto = AUTO
    """Batch size in evaluation, in rows or packed sequences; auto: as large as fits."""
    warmup_steps: CountFromZero | None = None
    """Warm-up steps; warmup_ratio takes precedence."""
    warmup_ratio: Share | None = None
    """Warm-up as a share of all steps; with neither key: 0.03."""
    lr_scheduler: Scheduler = "cosine"
    """How the learning rate decays after warm-up."""
    lr_scheduler_kwargs: SchedulerOptions = SchedulerOptions()
    """num_cycles, power, lr_end or min_lr of the schedule."""
    optim: Optimizer | Auto = AUTO
    """Optimizer; auto: fused AdamW on a GPU, plain AdamW on a CPU."""
    weight_decay: NumberFromZero = 0.0
    """Decoupled weight decay on matrices."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """AdamW's averaging factors."""
    adam_epsilon: PositiveNumber = 1e-8
    """AdamW's guard against division by zero."""
    max_grad_norm: NumberFromZero | None = 1.0
    """Gradients are scaled down to this norm; 0 or null: no clipping."""
    seed: CountFromZero = 42
    """Decides shuffling, splits, initial adapters and dropout."""

    # --- rows to sequences -------------------------------------------------------------------
    max_seq_length: Count | Auto = AUTO
    """Tokens per sequence; auto: 2048, or the model's context where that is shorter."""
    packing: Flag | Literal["best-fit", "concat", "auto"] = AUTO
    """Several rows in a sequence: true (best-fit), concat (join and cut), false; auto: true."""
    group_by_length: Flag | Auto = AUTO
    """Without packing: put rows of similar length into one micro-batch."""
    overlong: Literal["cut", "split", "drop", "auto"] = AUTO
    """What happens to a row longer than max_seq_length: its end is cut off, it is split into parts,
    or it is dropped; auto: split for plain text, cut for rows with answers. All are counted."""
    train_on_prompt: Flag = False
    """Train on the prompt too; false: only answers count in the loss."""
    tokenize: Literal["ahead", "late"] = "ahead"
    """ahead: tokens are prepared once; late: again for each batch, only to measure that cost."""
    pretokenized_cache: Text | None = None
    """Folder of prepared tokens, or of `input_ids` that another tool saved; null:
    datasets_optimized/<expert>, keyed by content."""

    # --- the card ----------------------------------------------------------------------------
    bf16: Flag | Auto = AUTO
    """bfloat16 arithmetic; auto: from compute capability 8.0 on."""
    fp16: Flag | Auto = AUTO
    """float16 arithmetic with loss scaling; auto: on cards without bfloat16."""
    use_tf32: Flag | Auto = AUTO
    """TF32 for the float32 products that are left; auto: from compute capability 8.0 on."""
    attention: Attention | Auto = AUTO
    """Attention kernel; auto: flash4, flex or flash when packed, SDPA otherwise, eager never."""
    use_sdpa: Flag | Auto = AUTO
    """Torch's fused attention; true without packing sets attention: sdpa."""
    flash_attention_2: Flag | None = None
    """Superseded: torch's own flash kernels run, no flash-attn package is needed."""
    memory_efficient_attention: Flag | None = None
    """Superseded: all kernels except eager are memory-efficient."""
    fused_loss: Flag | Auto = AUTO
    """Cross-entropy in chunks, without the full logits; auto: on."""
    fused_blocks: Flag | Auto = AUTO
    """Blocks with LoRA or DoRA as a few kernels of their own, which need no compiling; auto: on a
    GPU, for LoRA on models of Llama's, Mistral's and Qwen's kind."""
    torch_compile: Flag | Auto = AUTO
    """Compile each block; auto: on a GPU where the run ends sooner, compiling included."""
    torch_compile_backend: Literal["inductor"] = "inductor"
    """Compiler behind torch_compile."""
    torch_compile_mode: CompileMode | Auto = AUTO
    """Effort of the compiler; auto: default."""
    use_cuda_graphs: Flag | Auto = AUTO
    """Capture forward and backward as CUDA graphs; auto: where kernel launches take longer."""
    cuda_graph_warmup_steps: CountFromZero | None = None
    """Superseded: graphs are captured after two warm-up passes."""
    gradient_checkpointing: Flag | Checkpointing | Auto = AUTO
    """Activation checkpointing: none, selective, full (= true); auto: none if that fits."""
    gradient_checkpointing_kwargs: CheckpointingOptions = CheckpointingOptions()
    """Options of gradient_checkpointing."""
    activation_checkpointing: Literal["attention_only", "none", "full"] | None = None
    """Superseded by gradient_checkpointing."""
    cudnn_benchmark: Flag | Auto = AUTO
    """cuDNN tries its algorithms first; auto: on a GPU, unless deterministic."""
    deterministic: Flag = False
    """Use only deterministic kernels: a resumed run on a GPU ends bit-identical, but is slower. CPU
    runs are always deterministic."""
    use_unsloth: Flag | None = None
    """Superseded: the kernels here need no Unsloth."""
    memory_clear_every: CountFromZero | None = None
    """Superseded: shapes are fixed, so there is no cache to clear."""
    vram_limit: Size | None = None
    """Use at most this much GPU memory, such as "16GB"."""
    device: Literal["cuda", "cpu"] | Auto = AUTO
    """Where to train; auto: on the GPU where there is one."""
    distributed: Literal["replicated", "sharded"] | Auto = AUTO
    """How several GPUs share a run: replicated (each holds the model, gradients are summed) or
    sharded (weights, gradients and optimizer state are divided, as FSDP and ZeRO-3 do); auto:
    replicated where everything fits each GPU."""

    # --- feeding it --------------------------------------------------------------------------
    dataloader_num_workers: CountFromZero | Auto = AUTO
    """Worker processes; auto: none, prepared tokens are memory-mapped and fed by a thread."""
    dataloader_prefetch_factor: Count | Auto = AUTO
    """Batches kept ready ahead of the device (per worker, if there are workers)."""
    dataloader_persistent_workers: Flag | Auto = AUTO
    """Keep workers between epochs; means nothing without workers."""
    dataloader_pin_memory: Flag | Auto = AUTO
    """Page-locked buffers for faster copies; auto: on a GPU."""

    # --- looking, saving, stopping -----------------------------------------------------------
    logging_steps: Count = 10
    """Steps between log lines; the last steps of a run get a line as well."""
    save_strategy: Cadence | Auto = AUTO
    """When checkpoints are written; auto: steps where save_steps is given, else epoch."""
    save_steps: Count | None = None
    """Steps between checkpoints."""
    save_every_epochs: Count = 1
    """Epochs between checkpoints with save_strategy epoch; above 1 all are kept by default."""
    save_total_limit: Count | None = 3
    """Checkpoints kept; null: all. The best one is kept in addition."""
    evaluation_strategy: Cadence | Auto = AUTO
    """When the validation rows are evaluated; auto: steps where eval_steps is given, else epoch."""
    eval_steps: Count | None = None
    """Steps between evaluations."""
    eval_every_epochs: Count = 1
    """Epochs between evaluations with evaluation_strategy epoch."""
    load_best_model_at_end: Flag | Auto = AUTO
    """Finish with the best checkpoint; auto: whenever there is an evaluation."""
    metric_for_best_model: Metric = "eval_loss"
    """Metric that decides which checkpoint is best."""
    greater_is_better: Flag | Auto = AUTO
    """Whether higher is better; auto: not for loss and perplexity."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without improvement."""
    early_stopping_threshold: NumberFromZero = 0.0
    """Improvement smaller than this does not count."""
    on_not_finite: Literal["stop", "skip", "rollback"] = "stop"
    """When a gradient is NaN or infinite (the step is never applied): stop, skip the step, or roll
    back to the last checkpoint and skip these rows."""
    max_skipped_updates: Count = 5
    """Consecutive steps that may be skipped because of a non-finite gradient, before stopping."""
    on_loss_spike: Literal["rollback", "ignore"] = "rollback"
    """When the loss spikes far above its noise and stays there: roll back to the last checkpoint
    before it, skip the rows and continue with half the learning rate after a new warm-up; or only
    report it."""
    max_rollbacks: CountFromZero = 3
    """Times a run may roll back to a checkpoint by itself, before stopping."""
    hang_timeout: NumberFromZero | Auto = AUTO
    """Seconds without progress, beyond twice the longest step before, after which a run counts as
    hanging: what it was in is written to the run folder, and it ends with exit code 70. What is
    done for the first time has ten times as long. auto: 60, or 600 where steps may compile or rows
    are streamed; 0: never."""
    on_sigusr1: Literal["save", "stop"] = "save"
    """When SIGUSR1 comes, as from Slurm before a job's time is over: save and continue, or save and
    stop."""
    output_dir: Text | None = None
    """Where run folders are created; null: runs/ beside the manifest."""
    trackers: list[Tracker] = ["tensorboard"]
    """Metrics for other tools; events.jsonl is always written."""
    tracker_project: Text | None = None
    """Project, or experiment, that trackers file the run under; null: the name of the expert."""
    tracker_run_name: Text | None = None
    """Name of the run in trackers; null: that of its folder."""

    def runs_beside(self, folder: Path) -> Path:
        """Where the run folders of a manifest in `folder` are created."""
        return folder / (self.output_dir or "runs")
