"""The identity of a run: every setting that affects weights, and the weights of its base.

A test compares the identity for two values of every key that `NO_EFFECT_ON_WEIGHTS` does not list,
so that no new key is forgotten.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from expert.core.files import sha256_of
from expert.core.publish import content_hash
from expert.manifest.schema.kinds import OPTIMIZERS
from expert.model.base_folder import fetched
from expert.planning.models.resolve import snapshot_in_cache, weight_files

if TYPE_CHECKING:
    from expert.data.feed.run_data import RunData
    from expert.planning.run_plan import AdapterPlan, ModelPlan, RunPlan

UNQUANTIZED = ("none", "bf16", "fp16")
"""Kinds of `quantization` that leave the base unchanged."""

KERNELS = {
    "use_tf32": "kernels.tf32",
    "attention": "kernels.attention",
    "use_sdpa": "kernels.attention",
    "flash_attention_2": "kernels.attention",
    "fused_blocks": "kernels.fused_blocks",
}
"""Manifest keys of kernels, with their paths in a checkpoint."""

NO_EFFECT_ON_WEIGHTS = frozenset(
    {
        # The same function: only the order of summation differs, not the rows of a step.
        *("micro_batch_size", "fused_loss", "torch_compile", "torch_compile_backend"),
        *("torch_compile_mode", "use_cuda_graphs", "gradient_checkpointing"),
        *("gradient_checkpointing_kwargs", "cudnn_benchmark", "deterministic"),
        *("vram_limit", "device", "distributed"),
        # Reads or stores weights between steps.
        *("eval_batch_size", "eval_max_rows", "logging_steps", "save_strategy", "save_steps"),
        *("save_every_epochs", "save_total_limit", "evaluation_strategy", "eval_steps"),
        *("eval_every_epochs", "load_best_model_at_end", "metric_for_best_model"),
        *("greater_is_better", "early_stopping_patience", "early_stopping_threshold"),
        *("output_dir", "trackers", "tracker_project", "tracker_run_name"),
        # What to do about failures; a run that had one may be resumed with another choice.
        *("on_not_finite", "max_skipped_updates", "on_loss_spike", "max_rollbacks"),
        *("hang_timeout", "on_sigusr1"),
        # How the same rows reach the device.
        *("dataloader_num_workers", "dataloader_prefetch_factor", "tokenize"),
        *("dataloader_persistent_workers", "dataloader_pin_memory", "pretokenized_cache"),
        # Superseded: without effect.
        *("memory_efficient_attention", "cuda_graph_warmup_steps", "activation_checkpointing"),
        *("use_unsloth", "memory_clear_every"),
        # Describes the model without computing anything.
        *("base_models.sha256", "base_models.rope_scaling", "adapters.type"),
        *("adapters.scaling", "adapters.use_dora", "adapters.path"),
        *("adapters.checkpoint_step", "adapters.size_bytes", "adapters.sha256"),
        "base_models.adapters",  # its keys are listed one by one
    }
)
"""Keys of training.config, base_models and their adapters on which weights do not depend, and why;
they do on all others."""


def identity(plan: RunPlan, data: RunData, base: dict[str, Any]) -> dict[str, Any]:
    """What identifies a run: another run's checkpoint cannot resume it. `base`: from
    BaseWeights."""
    from expert.data.pack.pack_index import FITTED

    tokens = [prepared.key for prepared in data.train.folders] if data.train else None
    optim, kernels, quantization = plan.optim, plan.kernels, plan.model.quantization
    adapter = plan.adapter.model_dump(mode="json", exclude={"trainable_parameters", "start"})
    if plan.adapter.start is not None:  # by its bytes, wherever they are
        adapter["start"] = start_of(plan.adapter)
    # What decides the rows of a step and is not part of the names of prepared files.
    order: dict[str, Any] = {}
    if plan.is_padded:
        order["group_by_length"] = plan.data.group_by_length
    if data.stream is not None:
        keys = ("max_seq_length", "packing", "overlong", "train_on_prompt")
        order |= {key: getattr(plan.data, key) for key in keys}
        order["prompt_template"] = plan.model.prompt_template
        if plan.data.packing == "best-fit":
            order["fitted"] = FITTED
    return {
        "model": {"name": plan.model.name, "revision": plan.model.revision},
        "base": {
            **base,
            "quantization": "none" if quantization in UNQUANTIZED else quantization,
            "architecture": plan.model.architecture,
        },
        **({"objective": plan.objective.model_dump()} if plan.objective.loss else {}),
        "adapter": adapter,
        "data": {
            "tokens": tokens or plan.data.dataset,
            "index": data.train.index_file.name if data.train else None,
            **order,
        },
        "tokenizer": data.encoder.fingerprint,
        "batch": {
            "examples_per_update": plan.batch.examples_per_update,
            "sequences_per_update": plan.batch.sequences_per_update,
        },
        "schedule": {
            "scheduler": optim.scheduler,
            "learning_rate": optim.learning_rate,
            "loraplus_lr_ratio": optim.loraplus_lr_ratio,
            "options": dict(optim.scheduler_options),
            "warmup_steps": optim.warmup_steps,
            "warmup_ratio": optim.warmup_ratio,
            "total_steps": plan.length.total_steps,
        },
        "optimizer": {
            "kind": OPTIMIZERS[optim.optimizer].update,
            "weight_decay": optim.weight_decay,
            "betas": list(optim.betas),
            "epsilon": optim.epsilon,
            "max_grad_norm": optim.max_grad_norm,
        },
        "precision": kernels.precision,
        "kernels": {
            "attention": kernels.attention,
            "tf32": kernels.tf32,
            "fused_blocks": kernels.fused_blocks,
        },
        "seed": optim.seed,
    }


def start_of(adapter: AdapterPlan) -> str | None:
    """The hash of the weights that training starts from, if it starts from a trained adapter."""
    file = Path(adapter.start or "", "adapter_model.safetensors")
    return sha256_of(file) if adapter.start and file.is_file() else None


class BaseWeights:
    """Identifies the base weights of a session, once: the files may be replaced during training.

    For a folder this is a hash of the bytes, at 1.2 GB/s per file with up to four in parallel,
    computed while the model loads. It is not cached across processes: sizes and times do not prove
    equal bytes. In the hub's cache the commit identifies the bytes.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._model, self._whole = plan.model, plan.adapter.type == "full"
        self._lock = Lock()
        self._found: dict[str, Any] | None = None

    def begin(self, *, first: bool) -> None:
        """Start hashing a folder in the background, on the first rank only."""
        if first and self._found is None and self._model.place in ("folder", "models folder"):
            Thread(target=self, name="hash of the base", daemon=True).start()

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            if self._found is None:
                # A fully trained model has all its weights in the checkpoint.
                weights = None if self._whole else weights_of(self._model)
                self._found = {"weights": weights, "config": config_of(self._model)}
            return self._found


def weights_of(model: ModelPlan) -> str | None:
    """Identifies the base weights; None if the revision already does, or nothing is there."""
    if model.place == "built-in":
        return None
    if model.place in ("hf cache", "hub"):
        there = Path(model.location) if model.place == "hf cache" else None
        there = there or snapshot_in_cache(model.location, model.revision) or fetched(model)
        return f"commit {there.name}"
    try:
        return f"sha256 {content_hash(Path(model.location), weight_files(Path(model.location)))}"
    except (OSError, ValueError):  # loading the model reports the problem
        return None


def config_of(model: ModelPlan) -> str | None:
    """The hash of a folder's config.json, which also decides what its weights compute."""
    try:
        file = Path(model.location) / "config.json"
        return sha256_of(file) if model.place in ("folder", "models folder") else None
    except OSError:
        return None
