"""Other spellings of a value become the one the schema knows; each is told as a notice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from expert.core.errors import Problem
from expert.manifest.notices import Notice, notice
from expert.manifest.text.item import Item, shown

_QWEN = ("qwen", "qwen2", "qwen2.5", "qwen3")
CONFIG_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "optim": {
        "adamw": "adamw_torch",
        "adamw_hf": "adamw_torch",
        "adamw_fused": "adamw_torch_fused",
        "adamw_8bit": "adamw_bnb_8bit",
        "adamw_torch_8bit": "adamw_bnb_8bit",
        "adamw_apex_fused": "adamw_torch_fused",
        "paged_adamw_32bit": "adamw_torch",
        "paged_adamw": "adamw_torch",
    },
    "torch_compile_backend": {"eager": "inductor", "aot_eager": "inductor"},
    "lr_scheduler": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "cosine_schedule_with_warmup": "cosine",
    },
    "attention": {
        "flash_attention_2": "flash",
        "flash_attention_3": "flash",
        "flash_attention": "flash",
        "flex_attention": "flex",
    },
    "adapter_type": {
        "full_finetune": "full",
        "full-ft": "full",
        "prompt_tuning": "none",
        "soft_prompt": "none",
    },
    "target_modules": {"all": "all-linear"},
    "save_strategy": {"epochs": "epoch", "step": "steps", "none": "no", False: "no"},
    "evaluation_strategy": {"epochs": "epoch", "step": "steps", "none": "no", False: "no"},
    "device": {"gpu": "cuda", "cuda:0": "cuda"},
    "metric_for_best_model": {
        "loss": "eval_loss",
        "perplexity": "eval_perplexity",
        "accuracy": "eval_token_accuracy",
        "eval_accuracy": "eval_token_accuracy",
        "token_accuracy": "eval_token_accuracy",
    },
    "packing": {"bfd": "best-fit", "best_fit": "best-fit", "wrapped": "concat"},
    "method": {},
}
MODEL_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "quantization": {
        "nf4": "int4",
        "4bit": "int4",
        "8bit": "int8",
        "float8": "fp8",
        "bfloat16": "bf16",
        "float16": "fp16",
        "fp32": "none",
        False: "none",
    },
    "prompt_template": {
        **dict.fromkeys(_QWEN, "chatml"),
        "llama2": "llama",
        "llama3": "tokenizer",
        "default": "auto",
    },
}
# Names that old schemas list but no trainer ever had a template for.
_TEMPLATES_WITHOUT_TEXT = ("vicuna", "custom")
REFUSED_METHODS = ("rlhf", "dpo", "orpo", "kto", "distillation")


def convert_values(root: Item) -> tuple[list[Notice], list[Problem]]:
    """Rewrite known spellings of values in the canonical tree under `root`."""
    notices: list[Notice] = []
    problems: list[Problem] = []
    version = root.get("version")
    if version is not None and type(version.value) in (int, float):
        version.value = str(version.value)  # YAML reads a bare 1.0 as a number
    config = root.get("training", "config")
    if config is not None:
        _convert(config.fields(), CONFIG_VALUES, notices)
        problems += _convert_lists(config.fields(), notices)
        _qlora(root, config.fields(), notices, problems)
        method = config.fields().get("method")
        if method is not None and method.value in REFUSED_METHODS:
            del config.fields()["method"]
            what = f"{method.value} is not built: only sft (supervised fine-tuning) is"
            problems.append(
                Problem(method.path, what, "use rows with answers and method: sft", method.line)
            )
    models = root.get("base_models")
    for model in models.value if models is not None and isinstance(models.value, list) else []:
        _convert(model.fields(), MODEL_VALUES, notices)
        template = model.fields().get("prompt_template")
        if template is not None and template.value in _TEMPLATES_WITHOUT_TEXT:
            text = f"there is no {template.value} template; the tokenizer's own is used"
            notices.append(notice("superseded", template, text))
            template.value = "auto"
    _portable_paths(root)
    problems += _share_of_rows(root)
    for number, prompt in enumerate(_entries(root.get("soft_prompts"))):
        length = prompt.fields().pop("length", None)
        if length is not None:
            tokens = prompt.fields().setdefault("tokens", length)
            notices.append(notice("read as", length, f"soft_prompts[{number}].tokens"))
            if tokens.plain() != length.plain():
                problems.append(_conflict(length, tokens))
    return notices, problems


def _share_of_rows(root: Item) -> list[Problem]:
    """`val_size: 500` counts rows in other trainers."""
    dataset = root.get("training", "dataset") or Item(None)
    share = dataset.get("validation_split")
    if share is None or isinstance(share.value, bool) or not isinstance(share.value, int | float):
        return []
    if share.value <= 1:
        return []
    del dataset.fields()["validation_split"]
    what = f"got {shown(share.value)}, a number of rows; it is a share of them here"
    fix = "write a share such as 0.05, or name the rows: validation_path"
    return [Problem(share.path, what, fix, share.line)]


def _portable_paths(root: Item) -> None:
    """`data\\rows.jsonl` of a manifest from Windows names the same file everywhere.

    A drive or a share is left as it is: what is said of it names what was written.
    """
    dataset = root.get("training", "dataset") or Item(None)
    config = root.get("training", "config") or Item(None)
    tasks = dataset.get("tasks") or Item(None)
    found = [dataset.get(key) for key in ("path", "validation_path", "test_path")]
    found += [config.get(key) for key in ("output_dir", "pretokenized_cache")]
    for task in tasks.fields().values():
        found += [task.get(key) for key in ("train", "valid", "test")]
    found += [model.get("name") for model in _entries(root.get("base_models"))]
    found += [prompt.get("path") for prompt in _entries(root.get("soft_prompts"))]
    for item in found:
        if item is None or not isinstance(item.value, str):
            continue
        if not re.match(r"[\\/]|[A-Za-z]:", item.value):
            item.value = item.value.replace("\\", "/")


def _entries(item: Item | None) -> list[Item]:
    return item.value if item is not None and isinstance(item.value, list) else []


def _convert(
    entries: dict[str, Item], table: Mapping[str, Mapping[Any, Any]], notices: list[Notice]
) -> None:
    for key, spellings in table.items():
        item = entries.get(key)
        if item is None or not isinstance(item.value, str | bool):
            continue
        asked = item.value.lower() if isinstance(item.value, str) else item.value
        known = spellings.get(asked)
        if known is None and isinstance(asked, str) and key != "target_modules":
            known = asked
        if known is not None:
            if asked != known:
                notices.append(notice("read as", item, f'"{known}"'))
            item.value = known


OTHER_TRACKERS = frozenset(
    {
        *("wandb", "mlflow", "comet", "comet_ml", "swanlab", "neptune", "clearml", "azure_ml"),
        *("codecarbon", "dagshub", "dvclive", "flyte", "trackio", "all"),
    }
)
"""What people report to elsewhere."""


def _convert_lists(config: dict[str, Item], notices: list[Notice]) -> list[Problem]:
    """`q_proj,v_proj` is a list of two; `report_to: none` an empty one."""
    problems = []
    targets = config.get("target_modules")
    if targets is not None and re.search(r"[\\(\[*+?|^$]", str(targets.value)):
        if isinstance(targets.value, str):
            del config["target_modules"]
            what = f"{shown(targets.value)} is a regular expression"
            fix = "list the names of the layers, such as [q_proj, v_proj], or write all-linear"
            problems.append(Problem(targets.path, what, fix, targets.line))
    elif targets is not None and isinstance(targets.value, str) and "," in targets.value:
        names = [name.strip() for name in targets.value.split(",") if name.strip()]
        targets.value = [Item(name, targets.path, targets.line) for name in names]
    trackers = config.get("trackers")
    if trackers is not None and isinstance(trackers.value, str):
        trackers.value = [Item(trackers.value, trackers.path, trackers.line)]
    if trackers is not None and trackers.plain() == ["none"]:
        trackers.value = []
    if trackers is not None and trackers.path.endswith("report_to"):
        _other_trackers(config, trackers, notices)
    _share_of_steps(config, notices)
    limit = config.get("max_steps")
    if limit is not None and limit.value == -1:
        limit.value = 0
        notices.append(notice("read as", limit, "0: no limit"))
    patience = config.get("early_stopping_patience")
    if patience is not None and patience.value is True:
        patience.value = 3
        notices.append(notice("read as", patience, "a patience of 3 evaluations"))
    elif patience is not None and patience.value is False:
        patience.value = None
    return problems


def _other_trackers(config: dict[str, Item], trackers: Item, notices: list[Notice]) -> None:
    """`report_to: wandb`: what is trained does not depend on it."""
    listed = trackers.value if isinstance(trackers.value, list) else []
    others = [entry.value for entry in listed if isinstance(entry.value, str)]
    others = [name for name in others if name in OTHER_TRACKERS]
    if others:
        text = f"{', '.join(others)} is not fed; TensorBoard files and events.jsonl are written"
        notices.append(notice("superseded", trackers, text))
        del config["trackers"]


def _share_of_steps(config: dict[str, Item], notices: list[Notice]) -> None:
    """`warmup_steps: 0.1` is a share of all steps in Transformers 5."""
    steps = config.get("warmup_steps")
    if steps is None or not isinstance(steps.value, float) or not 0 < steps.value < 1:
        return
    if config.get("warmup_ratio", Item(None)).value is None:
        config["warmup_ratio"] = config.pop("warmup_steps")
        notices.append(notice("read as", steps, "training.config.warmup_ratio"))


def _conflict(item: Item, other: Item) -> Problem:
    what = f"says {shown(item.plain())}, but {other.path} says {shown(other.plain())}"
    return Problem(item.path, what, "keep one of the two", item.line)


def _qlora(
    root: Item, config: dict[str, Item], notices: list[Notice], problems: list[Problem]
) -> None:
    adapter = config.get("adapter_type")
    if adapter is None or adapter.value != "qlora":
        return
    for model in _entries(root.get("base_models")):
        given = model.fields().get("quantization")
        if given is None or given.value in (None, "auto"):
            model.fields()["quantization"] = Item("int4", adapter.path, adapter.line)
        elif given.value not in ("int4", "nf4", "4bit"):
            problems.append(_conflict(adapter, given))
    adapter.value = "lora"
    notices.append(notice("read as", adapter, "lora on an int4 base"))
