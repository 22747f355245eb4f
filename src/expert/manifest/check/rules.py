"""Rules across keys: values that are valid alone, but contradict or overrule each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from expert.core.errors import Problem
from expert.core.text import visible
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.kinds import (
    ADAPTERS,
    DPO_LOSSES,
    LOW_RANK,
    OF_LOSSES,
    ON_POLICY,
    PREFERENCES,
    QUANTISED,
    SCHEDULES,
    takes,
)
from expert.manifest.schema.manifest import CHAR_GPT, Manifest
from expert.manifest.text.item import Item, Kind, Notice


@dataclass
class Findings:
    """Problems and notices of the rules, each with the path and line of the user's file."""

    root: Item
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    @cached_property
    def items(self) -> dict[str, Item]:
        """The user's items by their canonical paths."""
        return dict(self.root.by_path())

    def item(self, path: str) -> Item:
        """The user's item at a canonical path; without a value if there is none."""
        if path in self.items:
            return self.items[path]
        above = [at for at in self.items if path.startswith((f"{at}.", f"{at}["))]
        return Item(None, path, self.items[max(above, key=len, default="")].line)

    def wrong(self, path: str, what: str, fix: str) -> None:
        item = self.item(path)
        self.problems.append(Problem(item.path, what, fix, item.line))

    def report(self, kind: Kind, path: str, text: str) -> None:
        item = self.item(path)
        self.notices.append(Notice(kind, item.path, text, item.line))

    def not_used(self, key: str, text: str) -> None:
        self.report("not used here", f"training.config.{key}", text)


def _adapter(manifest: Manifest, found: Findings) -> None:
    config = manifest.training.config
    kind, targets = config.adapter_type, config.target_modules
    given = [key for key in config.model_fields_set if getattr(config, key) != "auto"]
    reason = "all weights are trained" if kind == "full" else "only soft prompts are trained"
    for key in sorted({"rank", "alpha", "dropout", "target_modules"}.intersection(given)):
        if kind not in ADAPTERS:
            found.not_used(key, f"adapter_type {kind}: {reason}")
        elif key in ("rank", "alpha") and not takes(kind, key):
            found.wrong(f"training.config.{key}", f"{kind} has no {key}", "remove it")
        elif key == "dropout" and not takes(kind, key) and config.dropout:
            found.not_used("dropout", f"{kind} has no dropout")
    if kind == "none" and not manifest.soft_prompts:
        what = "none trains only soft prompts, but soft_prompts is empty"
        found.wrong("training.config.adapter_type", what, "add soft_prompts or choose an adapter")
    stray = set(config.feedforward_modules).difference(targets if isinstance(targets, list) else ())
    if config.feedforward_modules and not takes(kind, "feedforward_modules"):
        found.not_used("feedforward_modules", f"only for ia3; {kind} uses target_modules")
    elif stray and isinstance(targets, list):
        what = f"{', '.join(sorted(stray))} not among target_modules"
        path = "training.config.feedforward_modules"
        found.wrong(path, what, "add them there or remove them")
    for number, model in enumerate(manifest.base_models):
        path = f"base_models[{number}].quantization"
        if model.quantization in QUANTISED and kind == "full" and model.name != CHAR_GPT:
            what = f"adapter_type full cannot train an {model.quantization} base"
            found.wrong(path, what, "use quantization: none, or an adapter_type")
        if model.quantization in QUANTISED and kind in ADAPTERS and not ADAPTERS[kind].quantised:
            what = f"{kind} does not work on an {model.quantization} base"
            found.wrong(path, what, "use quantization: none, or adapter_type: lora")
        for position, adapter in enumerate(model.adapters):
            is_dora = adapter.type == "lora" and adapter.use_dora
            released = "dora" if is_dora else adapter.type
            if released and released != kind:
                text = f"released as {released}; adapter_type {kind} is trained instead"
                found.report("warning", f"base_models[{number}].adapters[{position}].type", text)


# Models for images or sound, by the last part of their name or path. Other names are checked by
# their config.json once it is read.
_MEDIA_MODEL = re.compile(
    r"(?:^|[-_.\d])(?:vl|vlm|vl2|vision|v?omni|audio|ocr)(?:$|[-_.\d])"
    r"|llava|internvl|pixtral|paligemma|idefics|moondream|smolvlm|minicpm-[vo]\b|fuyu|florence-2"
    r"|llama-4-|cogvlm|molmo|kosmos|mllama|whisper|voxtral|blip2?|glm-4(?:\.\d)?v|gemma-?3n|got-ocr",
    re.IGNORECASE,
)


def _models(manifest: Manifest, found: Findings) -> None:
    for number, model in enumerate(manifest.base_models):
        place, shape = f"base_models[{number}]", model.architecture
        last = re.split(r"[\\/]", model.name.rstrip("\\/"))[-1]
        if _MEDIA_MODEL.search(last):
            what = f"{model.name!r} is a model for images or sound; only text is trained"
            found.wrong(f"{place}.name", what, "name a text-only model")
        if model.name != CHAR_GPT:
            if shape is not None:
                what = f"only {CHAR_GPT} takes an architecture"
                found.wrong(f"{place}.architecture", what, "remove it")
            continue
        if shape is not None and shape.width % shape.heads:
            what = f"width {shape.width} is not a multiple of heads {shape.heads}"
            found.wrong(f"{place}.architecture", what, "change one of them")
        if manifest.training.config.adapter_type != "full":
            what = f"{CHAR_GPT} is trained from scratch"
            found.wrong("training.config.adapter_type", what, "write adapter_type: full")
        if model.quantization not in ("auto", "none", "bf16", "fp16"):
            what = f"{CHAR_GPT} is trained from scratch and cannot be quantised"
            found.wrong(f"{place}.quantization", what, "remove it")
        if manifest.soft_prompts:
            found.wrong("soft_prompts", f"{CHAR_GPT} takes no soft prompts", "remove them")


def _steps(manifest: Manifest, found: Findings) -> None:
    """Precision, schedule and batch."""
    config, path = manifest.training.config, "training.config.batch_tokens"
    if config.bf16 is True and config.fp16 is True:
        found.wrong("training.config.fp16", "bf16 and fp16 are both true", "keep one of the two")
    allowed = SCHEDULES[config.lr_scheduler].options
    for key in sorted(config.lr_scheduler_kwargs.model_fields_set):
        if key not in allowed and getattr(config.lr_scheduler_kwargs, key) is not None:
            what = f"{config.lr_scheduler} takes {' and '.join(allowed) or 'no options'}"
            found.wrong(f"training.config.lr_scheduler_kwargs.{key}", what, "remove it")
    if config.warmup_ratio is not None and config.warmup_steps:
        found.not_used("warmup_steps", f"warmup_ratio {config.warmup_ratio:g} takes precedence")
    if config.batch_tokens is not None and config.batch_size != "auto":
        what = f"sets the size of a step, and so does batch_size ({config.batch_size})"
        found.wrong(path, what, "keep one of the two")
    if config.batch_tokens is not None and manifest.training.dataset.streaming:
        what = "streamed rows are not counted in advance, so tokens cannot be converted to rows"
        found.wrong(path, what, "write batch_size: rows per step")


def _sequences(manifest: Manifest, found: Findings) -> None:
    """Packing, streaming, and tokenize: late, a baseline for benchmarks: single rows, tokenised
    when needed."""
    config, data = manifest.training.config, manifest.training.dataset
    if config.group_by_length is True and config.packing is not False:
        text = "packing leaves no padding to avoid (set packing: false to use it)"
        found.not_used("group_by_length", text)
    persistent, no_workers = (
        config.dataloader_persistent_workers,
        config.dataloader_num_workers == 0,
    )
    if persistent is no_workers:  # as if it were "auto" in the two other cases
        text = "there are no workers" if no_workers else "workers stay for the whole run"
        found.not_used("dataloader_persistent_workers", text)
    if config.pretokenized_cache and data.streaming:
        found.not_used("pretokenized_cache", "streaming: true keeps no cache")
    if data.streaming and not config.max_steps:
        text = "the number of rows is not known in advance: set training.config.max_steps"
        found.report("warning", "training.dataset.streaming", text)
    if data.streaming and config.epochs % 1:
        what = f"{config.epochs:g}, but the length of an epoch of a stream is not known in advance"
        fix = "use a whole number, with max_steps to stop earlier; or set streaming: false"
        found.wrong("training.config.epochs", what, fix)
    is_char_model = any(model.name == CHAR_GPT for model in manifest.base_models)
    conflicts = {
        f"the tokens of {CHAR_GPT} are the characters of its corpus": is_char_model,
        "streamed rows are always tokenised while training": data.streaming,
        "mixing several tasks needs prepared tokens": bool(data.tasks),
        "packing needs prepared tokens": config.packing is not False,
        "splitting rows needs prepared tokens": config.overlong == "split",
    }
    what = next((what for what, applies in conflicts.items() if applies), "")
    if config.tokenize == "late" and what:
        fix = "remove it, or set packing: false and overlong: cut"
        found.wrong("training.config.tokenize", f"late, but {what}", fix)


# Keys without effect, by their path: why they have none.
_NOT_USED = {
    "training.config.use_unsloth": "the built-in fused kernels replace it",
    "training.config.memory_efficient_attention": "flash attention and SDPA need little memory",
    "training.config.memory_clear_every": "shapes are fixed, so there is no cache to clear",
    "training.config.cuda_graph_warmup_steps": "graphs are captured after two warm-up passes",
    "training.config.activation_checkpointing": "gradient_checkpointing decides",
    "training.config.gradient_checkpointing_kwargs.use_reentrant": "it is never reentrant",
    "training.dataset.max_in_memory_samples": "tokens are memory-mapped, no rows are held",
}
_DESCRIPTIVE = {
    "training.dataset.augmentation": "only descriptive: rows are used as they are",
    "training.dataset.error_injection_ratio": "only descriptive: rows are used as they are",
    "training.decoding.validation_cmd": "never run: commands in a manifest are not executed",
    "base_models[].rope_scaling": "only descriptive: the model's config.json decides",
}


def _no_effect(manifest: Manifest, found: Findings) -> None:
    for path, item in found.items.items():
        place = re.sub(r"\[\d+\]", "[]", path)
        if place in _NOT_USED and item.plain():
            found.report("not used here", path, _NOT_USED[place])
        if place in _DESCRIPTIVE and item.plain():
            found.report("note", path, _DESCRIPTIVE[place])


def _start(manifest: Manifest, found: Findings) -> None:
    config = manifest.training.config
    if config.start_from is not None and config.adapter_type in ("full", "none", "adalora"):
        what = f"adapter_type {config.adapter_type} does not start from an adapter"
        fix = "name the folder of trained weights as the base model, or remove it"
        found.wrong("training.config.start_from", what, fix)
    if config.adapter_type not in LOW_RANK:
        for key in ("adapter_init", "loraplus_lr_ratio", "modules_to_save"):
            if getattr(config, key) != TrainingConfig.model_fields[key].default:
                what = f"adapter_type {config.adapter_type} does not have it"
                found.wrong(f"training.config.{key}", what, "use adapter_type: lora, or remove it")
    elif config.adapter_init == "pissa":
        clashes = {
            "start_from": config.start_from is not None,
            "adapter_type: dora": config.adapter_type == "dora",
            "a quantised base": any(
                each.quantization in QUANTISED for each in manifest.base_models
            ),
        }
        for other in (other for other, is_set in clashes.items() if is_set):
            what = f"pissa cannot be combined with {other}"
            found.wrong("training.config.adapter_init", what, "remove one of them")


def _preferences(manifest: Manifest, found: Findings) -> None:
    """Keys of preference training, and what it cannot be combined with."""
    config, data = manifest.training.config, manifest.training.dataset
    path, method = "training.config", config.method
    kind = PREFERENCES.get(method)
    if kind is None:
        for key in ("loss_type", "beta", "sft_weight", *OF_LOSSES):
            if key == "beta" and method == ON_POLICY:
                if config.adapter_type == "full" and config.beta != "auto":
                    what = "would need a second copy of all weights"
                    found.wrong(f"{path}.beta", what, "remove it, or train an adapter")
                continue
            if getattr(config, key) != TrainingConfig.model_fields[key].default:
                found.wrong(f"{path}.{key}", "only for preferences", "remove it, or method: dpo")
        if data.preference_rows in ("pairs", "judged"):
            what = f"method {method} does not train on rejected answers"
            found.wrong("training.dataset.preference_rows", what, "set method: dpo, or preferred")
        return
    loss = kind.loss if config.loss_type == "auto" else config.loss_type
    if loss != kind.loss and (method != "dpo" or loss not in DPO_LOSSES):
        fix = f"leave it out, or method: {loss if loss in PREFERENCES else 'dpo'}"
        found.wrong(f"{path}.loss_type", f"{loss} is not a loss of method {method}", fix)
    for key, losses in OF_LOSSES.items():
        if loss not in losses and getattr(config, key) != TrainingConfig.model_fields[key].default:
            found.wrong(f"{path}.{key}", f"only for the loss {' or '.join(losses)}", "remove it")
    if loss == "kto" and config.sft_weight not in ("auto", 0):
        found.wrong(f"{path}.sft_weight", "has no meaning in the loss kto", "remove it")
    if data.preference_rows not in (None, kind.rows):
        what, fix = f"{method} trains on {kind.rows}", "remove it, or method: sft"
        found.wrong("training.dataset.preference_rows", what, fix)
    unfit = {
        f"{path}.train_on_prompt": config.train_on_prompt,
        f"{path}.tokenize": config.tokenize == "late",
        "training.dataset.streaming": data.streaming,
        "training.dataset.use_pretokenized": data.use_pretokenized,
        "training.dataset.text_field": data.text_field is not None,
        "soft_prompts": bool(manifest.soft_prompts),
        f"{path}.adapter_type": config.adapter_type == "adalora",
        "base_models": any(model.name == CHAR_GPT for model in manifest.base_models),
        f"{path}.overlong": config.overlong in ("cut", "split"),
        f"{path}.packing": config.packing == "concat",
    }
    for key, is_set in unfit.items():
        if is_set:
            what = f"does not work with method {method}"
            found.wrong(key, what, "remove it, or method: sft")
    if config.packing is False:
        found.not_used("packing", "answers are always packed beside their prompt")


def _kernels(manifest: Manifest, found: Findings) -> None:
    config = manifest.training.config
    chosen = config.attention
    if config.flash_attention_2:
        text = "flash kernels are used where the card has them; no package is needed"
        is_other = chosen not in ("auto", "flash")
        found.not_used("flash_attention_2", f"attention: {chosen} decides" if is_other else text)
    if config.use_sdpa is True and chosen != "auto":
        found.not_used("use_sdpa", f"attention: {chosen} decides")
    for key in ("flash_attention_2", "use_sdpa"):
        if getattr(config, key) is False and chosen == "auto":
            text = "false means not requested: the plan chooses. Set attention to force a kernel"
            found.report("note", f"training.config.{key}", text)
    if chosen == "sdpa" and config.packing not in (False, "auto"):
        text = "packed rows with SDPA need a dense mask: memory and time grow quadratically"
        found.report("warning", "training.config.attention", text)


def _cadence(manifest: Manifest, found: Findings) -> None:
    config = manifest.training.config
    for key, name in (("save_steps", "save_strategy"), ("eval_steps", "evaluation_strategy")):
        steps, strategy = getattr(config, key), getattr(config, name)
        if steps and strategy in ("epoch", "no"):
            found.not_used(key, f"{name} is {strategy}")
        if steps is None and strategy == "steps":
            what = f"steps, but {key} is not given"
            found.wrong(f"training.config.{name}", what, f"add {key}")
    if config.evaluation_strategy == "no":
        for key in ("load_best_model_at_end", "early_stopping_patience"):
            if getattr(config, key) not in (None, False, "auto"):
                what = "needs an evaluation, but evaluation_strategy is no"
                found.wrong(f"training.config.{key}", what, "choose steps or epoch")
    if config.early_stopping_patience is None and config.early_stopping_threshold:
        what = "has no effect without early_stopping_patience"
        found.wrong("training.config.early_stopping_threshold", what, "add early_stopping_patience")
    data = manifest.training.dataset
    has_files = data.validation_path or any(task.valid for task in (data.tasks or {}).values())
    for key in ("early_stopping_patience", "eval_steps", "evaluation_strategy"):
        is_asked = getattr(config, key) not in (None, "auto", "no")
        if is_asked and not has_files and not data.validation_split:
            found.not_used(key, "there are no validation rows (validation_split is 0)")
    falling = config.metric_for_best_model in ("eval_loss", "eval_perplexity")
    if config.greater_is_better is falling:
        text = f"applied, although lower {config.metric_for_best_model} is better"
        text = text if falling else "applied, although higher accuracy is better"
        found.report("warning", "training.config.greater_is_better", text)


def _dataset(manifest: Manifest, found: Findings) -> None:
    data = manifest.training.dataset
    place = "training.dataset"
    if data.path is None and not data.tasks:
        fix = "add a path: a file, a folder or a hub id"
        what = "there is no data"
        if data.generation is not None:
            what = "generation is only descriptive: no rows are generated"
        found.wrong(place, what, fix)
    if data.path is not None and data.tasks:
        found.wrong(f"{place}.tasks", "given together with path", "keep one of the two")
    if data.type == "multi_task" and not data.tasks:
        found.wrong(f"{place}.type", "multi_task, but there are no tasks", "add tasks")
    mapped = data.field_mapping.text if data.field_mapping else None
    if data.text_field and mapped and mapped != data.text_field:
        what = f"is {data.text_field!r}, but field_mapping.text is {mapped!r}"
        found.wrong(f"{place}.text_field", what, "keep one of the two")
    if data.generation and data.path is not None:
        found.report("note", f"{place}.generation", "only descriptive: no rows are generated")


def _prompts(manifest: Manifest, found: Findings) -> None:
    """Soft prompts, the checkpoint that is exported, and the version."""
    prompts = manifest.soft_prompts
    for number, prompt in enumerate(prompts):
        if prompt.init_method == "text" and not prompt.init_text:
            what = "init_method is text, but there is no init_text"
            found.wrong(f"soft_prompts[{number}].init_text", what, "add the text")
    length, tokens = manifest.training.config.max_seq_length, sum(p.tokens for p in prompts)
    if length != "auto" and tokens >= length and manifest.base_models[0].name != CHAR_GPT:
        what = f"{tokens} tokens leave no room for text in the {length} of max_seq_length"
        found.wrong("soft_prompts", what, "use fewer tokens, or a larger max_seq_length")
    checkpoint = manifest.training.packaging_checkpoint
    if not re.fullmatch(r"final|best|checkpoint-[0-9]+", checkpoint):
        what = f"got {checkpoint!r}, expected final, best or checkpoint-N"
        found.wrong("training.packaging_checkpoint", what, "name one of the run's checkpoints")
    if not re.fullmatch(r"\d+\.\d+\.\d+([-+].*)?", manifest.version):
        text = f"{manifest.version!r} is not of the form x.y.z"
        found.report("warning", "version", text)


def read_paths(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Keys of files and folders that are read, with their values."""
    data = manifest.training.dataset
    for key in ("path", "validation_path", "test_path"):
        if getattr(data, key):
            yield f"training.dataset.{key}", getattr(data, key)
    for name, task in (data.tasks or {}).items():
        for key in ("train", "valid", "test"):
            if getattr(task, key):
                yield f"training.dataset.tasks.{name}.{key}", getattr(task, key)
    if manifest.training.config.start_from:
        yield "training.config.start_from", manifest.training.config.start_from
    for number, prompt in enumerate(manifest.soft_prompts):
        if prompt.path:
            yield f"soft_prompts[{number}].path", prompt.path


def _names(manifest: Manifest, found: Findings) -> None:
    """Names appear in terminals and as folder names: refuse invisible characters."""
    names = {"name": manifest.name, "version": manifest.version}
    for number, model in enumerate(manifest.base_models):
        names[f"base_models[{number}].name"] = model.name
    for number, prompt in enumerate(manifest.soft_prompts):
        names[f"soft_prompts[{number}].name"] = prompt.name
    tasks = manifest.training.dataset.tasks or {}
    names |= {f"training.dataset.tasks.{visible(name, keep='')}": name for name in tasks}
    for path, name in names.items():
        shown = visible(name, keep="")
        if shown != name:
            found.wrong(path, f"{shown!r} contains an invisible character", "remove it")


def _paths(manifest: Manifest, found: Findings) -> None:
    """Paths may not leave the folder, as a manifest may come from anyone; paths of --set may."""
    config, models = manifest.training.config, enumerate(manifest.base_models)
    folders = {"output_dir": config.output_dir, "pretokenized_cache": config.pretokenized_cache}
    written = {f"training.config.{key}": value for key, value in folders.items() if value}
    paths = {**dict(read_paths(manifest)), **written}
    for path, value in paths.items():
        if not value.isprintable():
            fix = "remove it"
            if re.search(r"[\t\n\r\f\b]", value):
                fix = "a backslash before t, n, r, f or b is an escape: use / instead"
            found.wrong(path, f"{value!r} contains a control character", fix)
        if found.item(path).from_command_line:
            continue
        if ".." in re.split(r"[\\/]", value):
            what = f"{value!r}: a path in a manifest may not leave its folder"
            instead = "a path inside it" if path in written else "the absolute path"
            found.wrong(path, what, f"use {instead}, or --set {path}={value}")
        if path in written and re.match(r"[\\/~]|[A-Za-z]:", value):
            what = f"{value!r}: a manifest may write only inside its own folder"
            found.wrong(path, what, f"use a relative path, or --set {path}={value}")
    names = {f"base_models[{number}].name": model.name for number, model in models}
    for path, value in {**names, **paths}.items():
        is_variable = re.search(r"\$\w|\$\{|%\w+%", value)
        if is_variable and not found.item(path).from_command_line:
            what = f"{value!r}: environment variables are not expanded"
            found.wrong(path, what, "write the path itself")


RULES = (
    *(_adapter, _models, _steps, _sequences, _kernels, _cadence, _dataset, _prompts),
    *(_preferences, _start, _no_effect, _names, _paths),
)
