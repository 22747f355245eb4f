"""What is trained and how: model, adapter, learning rate, schedule, evaluation, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_json
from expert.core.text import counted, percent
from expert.manifest.schema.kinds import (
    ADAPTERS,
    ON_POLICY,
    ON_POLICY_RATE,
    OPTIMIZERS,
    PREFERENCES,
    QUANTISED,
    SCHEDULES,
    takes,
)
from expert.manifest.schema.manifest import Adapter, CharGptShape
from expert.planning.choose.kernels import base_quantization
from expert.planning.choose.sequences import (
    LEAST_EVALUATED_ROWS,
    rows_to_evaluate,
    steps_between_evaluations,
)
from expert.planning.decisions import Source
from expert.planning.draft import SET, PlanDraft
from expert.planning.models.resolve import basename
from expert.planning.models.shapes import PROJECTIONS
from expert.planning.run_plan import ObjectivePlan

DEFAULT_RANK = 16
# Layers that some Llama-like models have instead of, or in addition to, the usual seven.
FUSED_PROJECTIONS = {"qkv_proj", "gate_up_proj", "embed_tokens", "lm_head"}
LEAST_RATE, MOST_WARMUP = 1e-8, 0.9
TOTAL = "length.total_steps"
FULL_RATE = 2e-5
PROMPT_RATE = 5e-3
SCRATCH_RATE = 1e-3
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FACTOR = 10
"""In preference training, the usual rate of an adapter over that of all weights."""
SECONDS_WITHOUT_PROGRESS, SECONDS_TO_COMPILE = 60.0, 600.0
DEFAULT_WARMUP_RATIO = 0.03
STREAMED_SAVE_STEPS = 500
NEEDS_END = "needs the total number of steps, which a stream does not have"
# Matched against the last part of a model's name; "yi" and "phi" are short and must begin it.
_TEMPLATES = (
    (r"qwen|^yi-", "chatml"),
    (r"mistral|mixtral|ministral", "mistral"),
    (r"llama", "llama"),
    (r"^phi-?[234]", "phi"),
    (r"deepseek", "deepseek"),
    (r"gemma", "gemma"),
    (r"smollm", "chatml"),
)


def settle_model(draft: PlanDraft) -> None:
    """Where the model is and how its prompts are formatted."""
    resolved, spec = draft.resolved, draft.model
    draft.settle("model.name", spec.name, "base_models of the manifest", "manifest")
    draft.settle("model.place", resolved.place, resolved.because)
    draft.settle("model.location", resolved.location, resolved.because)
    if resolved.named_kernels:
        kernels = ", ".join(resolved.named_kernels)
        text = f"its config.json requests {kernels}; kernels are chosen by the plan"
        draft.warn("model.name", text)
    if resolved.reads_images:
        text = "it also reads images: its language model alone is loaded and trained"
        draft.warn("model.name", text)
    if resolved.weights is not None:
        # The name stays the same when another version of the package ships other weights.
        because = "sha256 of the weights that come with the package"
        draft.settle("model.revision", resolved.weights, because)
    else:
        because = SET if spec.revision else "the newest revision"
        draft.settle("model.revision", spec.revision, because, "manifest")
    size = resolved.shape.parameters if resolved.shape is not None else None
    because = resolved.shape_from if size else f"unknown: {resolved.shape_from}"
    if size and resolved.shape is not None and resolved.shape.experts:
        because += f"; {resolved.shape.active_parameters:,} of them compute a token"
    draft.settle("model.parameters", size, because)
    shape = spec.architecture
    if draft.is_char_model and shape is None:
        built_in = CharGptShape().model_dump()
        draft.settle("model.architecture", built_in, "the built-in size", "preset")
    else:
        asked = shape.model_dump() if shape else None
        draft.settle("model.architecture", asked, SET if shape else "char-gpt only", "manifest")
    path, place = "model.prompt_template", draft.resolved.place
    if draft.is_char_model:
        draft.settle(path, None, "plain text has no turns")
    elif draft.model.prompt_template != "auto":
        draft.settle(path, draft.model.prompt_template, SET, "manifest")
    elif place in ("hf cache", "hub") or _has_chat_template(Path(draft.resolved.location)):
        # The same before and after the download: prepared data serves both plans.
        draft.settle(path, "tokenizer", "the tokenizer's own template; chatml if it has none")
    else:
        name = basename(draft.model.name).lower()
        template = next((to for pattern, to in _TEMPLATES if re.search(pattern, name)), "alpaca")
        because = f"by the model's name; {name} has no tokenizer with a template yet"
        draft.settle(path, template, because, "preset")


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def settle_objective(draft: PlanDraft) -> None:
    """The method, and the values of its loss."""
    config = draft.config
    kind, shape = PREFERENCES.get(config.method), draft.resolved.shape
    if shape is not None and shape.recurrent and (kind or config.method == ON_POLICY):
        what = f"{config.method} reads a prompt once for all its answers, and layers of this model"
        fix = "use method: sft, or a model that only attends"
        raise ExpertError(f"training.config.method: {what} carry a state from there  ({fix})")
    draft.settle_from_config("objective.method", "method")
    if kind is None:
        if config.method == ON_POLICY:
            because = "answers are compared with each other"
            draft.choose("objective.beta", "beta", 0.0, because, "preset")
        for name, value in ObjectivePlan().model_dump(exclude={"method"}).items():
            if f"objective.{name}" not in draft.decisions:
                draft.settle(f"objective.{name}", value, f"{config.method} has none", "manifest")
        return
    because = f"usual for {config.method}"
    draft.choose("objective.loss", "loss_type", kind.loss, because, "preset")
    draft.choose("objective.beta", "beta", kind.beta, because, "preset")
    draft.choose("objective.sft_weight", "sft_weight", kind.sft_weight, because, "preset")
    for key in ObjectivePlan.model_fields:
        if f"objective.{key}" not in draft.decisions:
            draft.settle_from_config(f"objective.{key}", key)


def settle_adapter(draft: PlanDraft) -> tuple[int, frozenset[str]]:
    """Rank, scale, dropout and targets; returns the rank and the plain names of the targets."""
    config, adapters = draft.config, draft.model.adapters
    released = adapters[0] if adapters else Adapter()
    kind, rank = config.adapter_type, 0
    draft.settle_from_config("adapter.type", "adapter_type")

    def choose(key: str, given: Any, default: Any, because: str) -> Any:
        """As in the manifest, else as released with the base model, else the default."""
        path = f"adapter.{key}"
        if given is not None:
            because = "set in adapters[0] of the base model"
            return draft.choose(path, key, given, because, "manifest")
        return draft.choose(path, key, default, because, "preset")

    shape = draft.resolved.shape
    if shape is not None and shape.experts and kind not in ("full", "none"):
        text = "the router, which chooses experts for each token, is not trained"
        if kind != "lora" or config.adapter_init != "default":
            text = f"the {shape.experts} experts of a layer get no adapter, only its attention does"
            text += ": only lora that starts by default has one for them"
        draft.warn("adapter.target_modules", text)
        if (base := base_quantization(draft)) in QUANTISED:
            text = f"the weights of experts stay in 16 bits: {base} is for attention alone"
            draft.warn("model.quantization", text)
    if takes(kind, "rank"):
        rank = choose("rank", released.r, DEFAULT_RANK, "the usual rank")
    else:
        draft.settle("adapter.rank", None, f"{kind} has none", "manifest")
    if takes(kind, "alpha"):
        choose("alpha", released.alpha, 2 * rank, "twice the rank")
    else:
        draft.settle("adapter.alpha", None, f"{kind} has none", "manifest")
    if kind in ("full", "none"):
        draft.settle("adapter.dropout", 0.0, f"{kind}: no adapter", "manifest")
        draft.settle("adapter.target_modules", None, f"{kind}: no adapter", "manifest")
    else:
        choose("dropout", released.dropout, 0.0, "dropout makes steps slower")
        because = "adapters on every linear layer train best"
        choose("target_modules", released.target_modules or None, "all-linear", because)
    feedforward, because = list[str](), f"{kind} has none"
    if takes(kind, "feedforward_modules"):
        feedforward = config.feedforward_modules or released.feedforward_modules or []
        because = f"{kind} layers scaled at their input"
    draft.settle("adapter.feedforward_modules", feedforward, because, "manifest")
    start = Path(draft.folder, config.start_from).absolute() if config.start_from else None
    if start is not None and not (start / ADAPTER_CONFIG).is_file():
        start = start / "final"  # of a run
    draft.settle_from_config("adapter.start", "start_from", str(start) if start else None)
    draft.settle_from_config("adapter.init", "adapter_init")
    draft.settle_from_config("adapter.modules_to_save", "modules_to_save")
    keys = {"name", "tokens", "init_method", "init_text"}
    prompts = [prompt.model_dump(include=keys) for prompt in draft.manifest.soft_prompts]
    because = "soft_prompts of the manifest" if prompts else "none asked for"
    draft.settle("adapter.soft_prompts", prompts, because, "manifest")
    targets = draft["adapter.target_modules"]
    listed = targets if isinstance(targets, list) else []
    names = frozenset(target.rsplit(".", 1)[-1] for target in listed)
    # A misspelt layer gets no adapter. Only Llama-like models are sure to have these names.
    unknown, shape = sorted(names - set(PROJECTIONS) - FUSED_PROJECTIONS), draft.resolved.shape
    if shape is not None and shape.gated_mlp and unknown:
        text = f"no known layer is called {', '.join(unknown)}; usual are {', '.join(PROJECTIONS)}"
        draft.warn("adapter.target_modules", text)
    return rank, names


def settle_optimisation(draft: PlanDraft) -> None:
    """Learning rate, schedule, decay, clipping and seed; the optimizer is chosen elsewhere."""
    config = draft.config
    kind = config.adapter_type
    rate, because = SCRATCH_RATE, "usual from scratch"
    if not draft.is_char_model:
        others = {"full": FULL_RATE, "none": PROMPT_RATE}
        rate = ADAPTERS[kind].rate if kind in ADAPTERS else others[kind]
        because = f"usual for {kind}"
    if preference := PREFERENCES.get(config.method):
        rate = preference.full_rate * (1 if kind == "full" else ADAPTER_FACTOR)
        because = f"usual for {config.method} with {kind}"
    elif config.method == ON_POLICY:
        rate = ON_POLICY_RATE * (1 if kind == "full" else ADAPTER_FACTOR)
        because = f"usual for {config.method} with {kind}"
    rate *= OPTIMIZERS[draft["optim.optimizer"]].rate_factor
    draft.choose("optim.learning_rate", "learning_rate", rate, because, "preset")
    draft.settle_from_config("optim.max_grad_norm", "max_grad_norm", config.max_grad_norm or 0.0)
    # A stream without max_steps has no last step: a constant rate replaces a default schedule; one
    # that the manifest names is refused when it is run.
    endless = draft.dataset.streaming and not config.max_steps
    because = "a stream has no last step; set max_steps"
    needs_end = {
        "lr_scheduler": SCHEDULES[config.lr_scheduler].needs_end,
        "warmup_ratio": config.warmup_ratio is not None,
    }
    asked = [key for key, needs in needs_end.items() if needs and key in config.model_fields_set]
    for key in asked if endless else ():
        draft.warn(f"training.config.{key}", NEEDS_END)
    if endless and needs_end["lr_scheduler"] and "lr_scheduler" not in asked:
        draft.settle("optim.scheduler", "constant", because)
        draft.settle("optim.scheduler_options", {}, because)
    else:
        draft.settle_from_config("optim.scheduler", "lr_scheduler")
        options = config.lr_scheduler_kwargs.model_dump(exclude_none=True)
        draft.settle_from_config("optim.scheduler_options", "lr_scheduler_kwargs", options)
    if config.warmup_ratio is not None:
        draft.settle("optim.warmup_steps", None, "warmup_ratio is set", "manifest")
        draft.settle_from_config("optim.warmup_ratio", "warmup_ratio")
    elif config.warmup_steps is not None:
        draft.settle_from_config("optim.warmup_steps", "warmup_steps")
        draft.settle("optim.warmup_ratio", None, "warmup_steps is set", "manifest")
    elif endless:
        draft.settle("optim.warmup_steps", None, because)
        draft.settle("optim.warmup_ratio", None, because)
    else:
        draft.settle("optim.warmup_steps", None, "warmup_ratio is used", "preset")
        because = "a short warm-up steadies the first steps"
        draft.settle("optim.warmup_ratio", DEFAULT_WARMUP_RATIO, because, "preset")


AS_WRITTEN = {
    "optim.epsilon": "adam_epsilon",
    "watch.metric": "metric_for_best_model",
    **{f"optim.{key}": key for key in ("weight_decay", "betas", "seed", "loraplus_lr_ratio")},
    **{
        f"watch.{key}": key
        for key in (
            *("logging_steps", "eval_steps", "eval_every_epochs", "save_every_epochs"),
            *("early_stopping_patience", "early_stopping_threshold", "on_sigusr1"),
            *("trackers", "tracker_project", "tracker_run_name"),
        )
    },
    **{
        f"stability.{key}": key
        for key in ("on_not_finite", "max_skipped_updates", "on_loss_spike", "max_rollbacks")
    },
}
"""Plan values that are keys of training.config as written."""


def warn_of_settings(draft: PlanDraft) -> None:
    """Warn about values of the plan that hardly anyone means: far beyond any published run, since a
    warning that is often wrong is ignored."""
    rate, name, total = draft["optim.learning_rate"], draft["optim.optimizer"], draft[TOTAL]
    if rate >= OPTIMIZERS[name].most_rate:
        draft.warn("optim.learning_rate", f"{rate:g} makes nearly every run with {name} diverge")
    if rate < LEAST_RATE:
        draft.warn("optim.learning_rate", f"{rate:g} is so small that hardly a weight changes")
    for option in ("min_lr", "lr_end"):
        least = draft["optim.scheduler_options"].get(option)
        if least is not None and least > rate:
            text = f"{option} {least:g} is above the learning rate of {rate:g}: the rate rises"
            draft.warn("optim.scheduler_options", text)
    warmup, ratio = draft["optim.warmup_steps"], draft["optim.warmup_ratio"]
    never = "the learning rate never reaches its peak"
    if ratio is not None and ratio > MOST_WARMUP:
        draft.warn("optim.warmup_ratio", f"{percent(ratio)} of the run is warm-up: {never}")
    if total is None:
        return
    if warmup is not None and warmup > total:
        text = f"{warmup} steps are more than the {total} of the whole run: {never}"
        draft.warn("optim.warmup_steps", text)
    for path in ("watch.eval_steps", "watch.save_steps"):
        strategy = "watch.evaluation_strategy" if "eval" in path else "watch.save_strategy"
        every = draft[path]
        if every is not None and every > total and draft[strategy] == "steps":
            draft.warn(path, f"{every} steps are more than the {total} of the whole run")


def settle_watching(draft: PlanDraft) -> None:
    """Logging, evaluation, checkpoints, early stopping, output."""
    config, training = draft.config, draft.manifest.training
    for path, key in AS_WRITTEN.items():
        draft.settle_from_config(path, key)
    evaluates = _settle_evaluation(draft)
    _settle_saving(draft)
    path = "watch.load_best"
    keeps = draft["watch.save_strategy"] != "no"
    because = "the evaluations decide which is best; needs checkpoints"
    draft.choose(path, "load_best_model_at_end", evaluates and keeps, because, "preset")
    if config.load_best_model_at_end is True and not evaluates:
        draft.warn(path, "there is no evaluation to choose the best checkpoint by")
    rising = config.metric_for_best_model not in ("eval_loss", "eval_perplexity")
    because = f"higher {config.metric_for_best_model} is {'better' if rising else 'worse'}"
    draft.choose("watch.greater_is_better", "greater_is_better", rising, because, "preset")
    seconds, because = SECONDS_WITHOUT_PROGRESS, "no step should take this much longer than others"
    if draft["kernels.compile"] or draft.dataset.streaming:
        seconds, because = SECONDS_TO_COMPILE, "a step may have to compile or to wait for rows"
    draft.choose("watch.hang_seconds", "hang_timeout", seconds, because, "preset")
    runs = str(config.runs_beside(draft.folder))
    draft.settle_from_config("watch.output_dir", "output_dir", runs)
    is_set = "packaging_checkpoint" in training.model_fields_set
    source: Source = "manifest" if is_set else "preset"
    because = SET if is_set else "the default"
    draft.settle("watch.packaging_checkpoint", training.packaging_checkpoint, because, source)


def _settle_evaluation(draft: PlanDraft) -> bool:
    """When validation rows are evaluated; returns whether any are."""
    path, has_rows = "watch.evaluation_strategy", draft.has_validation_rows
    chosen, because = ("steps" if draft.config.eval_steps else "epoch"), "by eval_steps"
    if not has_rows:
        chosen, because = "no", "there are no validation rows"
    elif not draft.config.eval_steps:
        because = "once an epoch"
    strategy = draft.choose(path, "evaluation_strategy", chosen, because, "preset")
    if strategy != "no" and not has_rows:
        draft.warn(path, "there are no validation rows to evaluate")
    config, path = draft.config, "watch.eval_rows"
    steps = steps_between_evaluations(draft, strategy)
    if config.eval_max_rows != "auto":
        draft.settle_from_config(path, "eval_max_rows")
    elif strategy == "no" or steps is None:
        because = "nothing is evaluated" if strategy == "no" else "how often is not known yet"
        draft.settle(path, None, because, "preset")
    else:
        rows = rows_to_evaluate(draft, steps)
        because = f"a tenth of the time of {counted(steps, 'step')}, or {LEAST_EVALUATED_ROWS} rows"
        draft.settle(path, rows, because, "preset")
    return strategy != "no" and has_rows


def _settle_saving(draft: PlanDraft) -> None:
    config, path, key = draft.config, "watch.save_strategy", "save_strategy"
    no_epochs = draft.dataset.streaming and not config.save_steps
    if config.save_steps or no_epochs:
        because = "a stream has no epochs" if no_epochs else "save_steps is set"
        draft.choose(path, key, "steps", because, "preset")
    else:
        draft.choose(path, key, "epoch", "once an epoch", "preset")
    if no_epochs and config.save_strategy == "auto":
        draft.settle("watch.save_steps", STREAMED_SAVE_STEPS, "a stream has no epochs", "preset")
    else:
        draft.settle_from_config("watch.save_steps", "save_steps")
    if draft.keeps_every_checkpoint:
        because = f"save_every_epochs {config.save_every_epochs}: each of them is kept"
        draft.settle("watch.keep_checkpoints", None, because, "manifest")
    else:
        draft.settle_from_config("watch.keep_checkpoints", "save_total_limit")
