"""What is trained and how: model, adapter, rate, schedule, evaluation and checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.decisions import Ledger
from expert.planning.models.resolve import basename
from expert.planning.models.shapes import PROJECTIONS
from expert.planning.situation import Situation

DEFAULT_RANK = 16
# Layers that some Llama-like models have in place of, or besides, the usual seven.
FUSED_PROJECTIONS = {"qkv_proj", "gate_up_proj", "embed_tokens", "lm_head"}
_CADENCES = ("optim.warmup_steps", "watch.eval_steps", "watch.save_steps")
DEFAULT_RATES = {"full": 2e-5, "ia3": 5e-3, "none": 5e-3}
ADAPTER_RATE = 2e-4
SCRATCH_RATE = 1e-3
DEFAULT_WARMUP_RATIO = 0.03
STREAMED_SAVE_STEPS = 500
# On the last part of a model's name; "yi" and "phi" are short, so they must begin it.
_TEMPLATES = (
    (r"qwen|^yi-", "chatml"),
    (r"mistral|mixtral|ministral", "mistral"),
    (r"llama", "llama"),
    (r"^phi-?[234]", "phi"),
    (r"deepseek", "deepseek"),
    (r"gemma", "gemma"),
    (r"smollm", "chatml"),
)


def settle_model(now: Situation, ledger: Ledger) -> None:
    """Where the model is and how its prompts are written."""
    found = now.resolved
    ledger.settle("model.name", now.model.name, "base_models of the manifest", "manifest")
    ledger.settle("model.place", found.place, found.because, "machine")
    ledger.settle("model.location", found.location, found.because, "machine")
    if found.weights is not None:
        # The name stays when another version of the package brings other weights.
        because = "sha256 of the weights that come with the package"
        ledger.settle("model.revision", found.weights, because, "machine")
    else:
        because = "set in the manifest" if now.model.revision else "the newest"
        ledger.settle("model.revision", now.model.revision, because, "manifest")
    if found.shape is None:
        ledger.unknown("model.parameters", found.shape_from)
    else:
        ledger.settle("model.parameters", found.shape.parameters, found.shape_from, "machine")
    shape = now.model.architecture
    if now.is_char_model and shape is None:
        built_in = CharGptShape().model_dump()
        ledger.settle("model.architecture", built_in, "the built-in size", "preset")
    else:
        because = "set in the manifest" if shape else "only char-gpt has one"
        asked = shape.model_dump() if shape else None
        ledger.settle("model.architecture", asked, because, "manifest")
    _settle_template(now, ledger)


def _settle_template(now: Situation, ledger: Ledger) -> None:
    path = "model.prompt_template"
    if now.is_char_model:
        ledger.settle(path, None, "plain text has no turns", "machine")
    elif now.model.prompt_template != "auto":
        ledger.settle(path, now.model.prompt_template, "set in the manifest", "manifest")
    elif _has_chat_template(Path(now.resolved.location)):
        ledger.settle(path, "tokenizer", "the tokenizer carries a chat template", "machine")
    elif now.resolved.place in ("hub", "hf cache"):
        # The same before and after it was fetched: data prepared for one plan serves the other.
        because = "the tokenizer's own template, once it is fetched; chatml where it has none"
        if now.resolved.place == "hf cache":
            because = "the tokenizer has no template of its own: chatml"
        ledger.settle(path, "tokenizer", because, "machine")
    else:
        name = basename(now.model.name).lower()
        found = next((to for pattern, to in _TEMPLATES if re.search(pattern, name)), "alpaca")
        because = f"by the model's name; no tokenizer with a template of its own in {name} yet"
        ledger.settle(path, found, because, "preset")


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def settle_adapter(now: Situation, ledger: Ledger) -> tuple[int, frozenset[str]]:
    """Rank, scale, dropout and targets; returns the rank and the plain names of the targets."""
    config, released = now.config, now.released_adapter
    kind = config.adapter_type
    now.pass_on(ledger, "adapter.type", "adapter_type")
    has_rank = kind in ("lora", "dora", "lokr", "adalora")
    rank = 0
    if not has_rank:
        for key in ("rank", "alpha"):
            ledger.settle(f"adapter.{key}", None, f"{kind} has none", "manifest")
    else:
        rank = _or_released(now, ledger, "rank", released.r, DEFAULT_RANK, "the usual rank")
        twice = 2 * rank
        _or_released(now, ledger, "alpha", released.alpha, twice, "twice the rank")
    if kind in ("full", "none"):
        ledger.settle("adapter.dropout", 0.0, f"{kind}: no adapter", "manifest")
        ledger.settle("adapter.target_modules", None, f"{kind}: no adapter", "manifest")
    else:
        _or_released(now, ledger, "dropout", released.dropout, 0.0, "the fast paths have none")
        modules = released.target_modules or None
        because = "adapters on every linear layer learn best"
        _or_released(now, ledger, "target_modules", modules, "all-linear", because)
    feedforward = config.feedforward_modules or released.feedforward_modules or []
    because = "ia3 layers scaled at their input" if kind == "ia3" else f"{kind} has none"
    ledger.settle(
        "adapter.feedforward_modules", feedforward if kind == "ia3" else [], because, "manifest"
    )
    prompts = [
        prompt.model_dump(include={"name", "tokens", "init_method", "init_text"})
        for prompt in now.manifest.soft_prompts
    ]
    because = "soft_prompts of the manifest" if prompts else "none asked for"
    ledger.settle("adapter.soft_prompts", prompts, because, "manifest")
    targets = ledger.decisions["adapter.target_modules"].value
    names = frozenset(t.rsplit(".", 1)[-1] for t in targets) if isinstance(targets, list) else None
    _warn_of_strange_targets(now, ledger, names or frozenset())
    return rank, names or frozenset()


def _warn_of_strange_targets(now: Situation, ledger: Ledger, names: frozenset[str]) -> None:
    """A misspelt layer gets no adapter. Only Llama-like models have these layer names for sure."""
    shape = now.resolved.shape
    if shape is None or not shape.gated_mlp:
        return
    strange = sorted(names - set(PROJECTIONS) - FUSED_PROJECTIONS)
    if strange:
        usual = ", ".join(PROJECTIONS)
        text = f"{', '.join(strange)}: no layer of such a name is known; usual are {usual}"
        ledger.warn("adapter.target_modules", text)


def _or_released(
    now: Situation, ledger: Ledger, key: str, released: Any, default: Any, because: str
) -> Any:
    """Settle an adapter key: as asked, else as released with the base model, else the default."""
    asked = getattr(now.config, key)
    path = f"adapter.{key}"
    if asked != "auto":
        ledger.settle(path, asked, "set in the manifest", "manifest")
        return asked
    if released is not None:
        ledger.settle(path, released, "adapters[0] of the base model", "manifest")
        return released
    ledger.settle(path, default, because, "preset")
    return default


def settle_optimisation(now: Situation, ledger: Ledger) -> None:
    """Rate, schedule, decay, clipping and seed; the optimizer itself is chosen elsewhere."""
    config = now.config
    if config.learning_rate == "auto":
        kind = config.adapter_type
        rate = SCRATCH_RATE if now.is_char_model else DEFAULT_RATES.get(kind, ADAPTER_RATE)
        because = "usual from scratch" if now.is_char_model else f"usual for {kind}"
        ledger.settle("optim.learning_rate", rate, because, "preset")
    else:
        now.pass_on(ledger, "optim.learning_rate", "learning_rate")
    now.pass_on(ledger, "optim.scheduler", "lr_scheduler")
    options = config.lr_scheduler_kwargs.model_dump(exclude_none=True)
    now.pass_on(ledger, "optim.scheduler_options", "lr_scheduler_kwargs", options)
    if config.warmup_ratio is not None:
        ledger.settle("optim.warmup_steps", None, "warmup_ratio counts", "manifest")
        now.pass_on(ledger, "optim.warmup_ratio", "warmup_ratio")
    elif config.warmup_steps is not None:
        now.pass_on(ledger, "optim.warmup_steps", "warmup_steps")
        ledger.settle("optim.warmup_ratio", None, "warmup_steps counts", "manifest")
    else:
        ledger.settle("optim.warmup_steps", None, "warmup_ratio counts", "preset")
        because = "a short rise steadies the first updates"
        ledger.settle("optim.warmup_ratio", DEFAULT_WARMUP_RATIO, because, "preset")
    for key in ("weight_decay", "betas", "seed"):
        now.pass_on(ledger, f"optim.{key}", key)
    now.pass_on(ledger, "optim.epsilon", "adam_epsilon")
    norm = config.max_grad_norm or 0.0
    now.pass_on(ledger, "optim.max_grad_norm", "max_grad_norm", norm)


def settle_watching(now: Situation, ledger: Ledger) -> None:
    """Logging, evaluation, checkpoints, early stopping, output."""
    config, data = now.config, now.manifest.training.dataset
    now.pass_on(ledger, "watch.logging_steps", "logging_steps")
    splits = data.validation_split > 0 and not data.streaming
    has_file = bool(data.validation_path) or any(t.valid for t in (data.tasks or {}).values())
    has_validation = has_file or splits
    evaluation = config.evaluation_strategy
    if evaluation != "auto":
        now.pass_on(ledger, "watch.evaluation_strategy", "evaluation_strategy")
        if evaluation != "no" and not has_validation:
            ledger.warn("watch.evaluation_strategy", "there are no validation rows to evaluate")
    else:
        evaluation = "steps" if config.eval_steps else "epoch"
        because = "eval_steps is given" if config.eval_steps else "once an epoch"
        if not has_validation:
            evaluation, because = "no", "there are no validation rows"
        ledger.settle("watch.evaluation_strategy", evaluation, because, "preset")
    now.pass_on(ledger, "watch.eval_steps", "eval_steps")
    now.pass_on(ledger, "watch.eval_every_epochs", "eval_every_epochs")
    _settle_saving(now, ledger)
    evaluates = evaluation != "no" and has_validation
    saves = ledger.decisions["watch.save_strategy"].value != "no"
    if config.load_best_model_at_end == "auto" and evaluates and not saves:
        ledger.settle("watch.load_best", False, "no checkpoints are kept", "preset")
    elif config.load_best_model_at_end == "auto":
        because = "there is an evaluation to choose by" if evaluates else "nothing is evaluated"
        ledger.settle("watch.load_best", evaluates, because, "preset")
    else:
        now.pass_on(ledger, "watch.load_best", "load_best_model_at_end")
        if config.load_best_model_at_end and not evaluates:
            ledger.warn("watch.load_best", "there is no evaluation to choose the best by")
    now.pass_on(ledger, "watch.metric", "metric_for_best_model")
    rising = config.metric_for_best_model == "eval_token_accuracy"
    if config.greater_is_better == "auto":
        because = f"more {config.metric_for_best_model} is {'better' if rising else 'worse'}"
        ledger.settle("watch.greater_is_better", rising, because, "preset")
    else:
        now.pass_on(ledger, "watch.greater_is_better", "greater_is_better")
    for key in ("early_stopping_patience", "early_stopping_threshold", "trackers"):
        now.pass_on(ledger, f"watch.{key}", key)
    for key in ("on_not_finite", "max_skipped_updates", "on_loss_spike", "max_rollbacks"):
        now.pass_on(ledger, f"stability.{key}", key)
    _settle_output(now, ledger)


def warn_of_cadences_longer_than_the_run(now: Situation, ledger: Ledger) -> None:
    """A warm-up, evaluation or checkpoint that would come after the last update."""
    total = ledger.decisions["length.total_steps"].value
    if total is None:
        return
    settled = {path: ledger.decisions[path].value for path in _CADENCES}
    for path, steps in settled.items():
        by_steps = path == "optim.warmup_steps" or settled_strategy(ledger, path) == "steps"
        if steps is not None and steps > total and by_steps:
            ledger.warn(path, f"{steps} updates are more than the {total} of the whole run")


def settled_strategy(ledger: Ledger, path: str) -> str:
    name = "save_strategy" if path.endswith("save_steps") else "evaluation_strategy"
    return str(ledger.decisions[f"watch.{name}"].value)


def _settle_saving(now: Situation, ledger: Ledger) -> None:
    config = now.config
    streaming = now.manifest.training.dataset.streaming
    if config.save_strategy != "auto":
        now.pass_on(ledger, "watch.save_strategy", "save_strategy")
    elif config.save_steps:
        ledger.settle("watch.save_strategy", "steps", "save_steps is given", "preset")
    elif streaming:
        ledger.settle("watch.save_strategy", "steps", "a stream has no epochs", "preset")
    else:
        ledger.settle("watch.save_strategy", "epoch", "once an epoch", "preset")
    if config.save_steps is None and streaming and config.save_strategy == "auto":
        because = "a stream has no epochs"
        ledger.settle("watch.save_steps", STREAMED_SAVE_STEPS, because, "preset")
    else:
        now.pass_on(ledger, "watch.save_steps", "save_steps")
    now.pass_on(ledger, "watch.save_every_epochs", "save_every_epochs")
    if now.keeps_every_checkpoint:
        because = f"save_every_epochs {config.save_every_epochs}: each of them is kept"
        ledger.settle("watch.keep_checkpoints", None, because, "manifest")
    else:
        now.pass_on(ledger, "watch.keep_checkpoints", "save_total_limit")


def _settle_output(now: Situation, ledger: Ledger) -> None:
    folder = now.folder / (now.config.output_dir or "runs")
    now.pass_on(ledger, "watch.output_dir", "output_dir", str(folder))
    chosen = now.manifest.training.packaging_checkpoint
    given = "packaging_checkpoint" in now.manifest.training.model_fields_set
    because = "set in the manifest" if given else "the default"
    ledger.settle("watch.packaging_checkpoint", chosen, because, "manifest" if given else "preset")
