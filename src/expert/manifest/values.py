"""Other spellings of a value become the one the schema knows; each is told as a notice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expert.core.errors import Problem
from expert.manifest.document import Item, shown
from expert.manifest.notices import Notice, notice

_QWEN = ("qwen", "qwen2", "qwen2.5", "qwen3")
CONFIG_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "optim": {
        "adamw": "adamw_torch",
        "adamw_hf": "adamw_torch",
        "adamw_fused": "adamw_torch_fused",
        "adamw_8bit": "adamw_bnb_8bit",
    },
    "lr_scheduler": {"constant_with_warmup": "constant"},
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
    "packing": {"bfd": "best-fit", "best_fit": "best-fit"},
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
        _convert_lists(config.fields(), notices)
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
    for number, prompt in enumerate(_entries(root.get("soft_prompts"))):
        length = prompt.fields().pop("length", None)
        if length is not None:
            tokens = prompt.fields().setdefault("tokens", length)
            notices.append(notice("read as", length, f"soft_prompts[{number}].tokens"))
            if tokens.plain() != length.plain():
                problems.append(_conflict(length, tokens))
    return notices, problems


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


def _convert_lists(config: dict[str, Item], notices: list[Notice]) -> None:
    """`q_proj,v_proj` is a list of two; `report_to: none` an empty one."""
    targets = config.get("target_modules")
    if targets is not None and isinstance(targets.value, str) and "," in targets.value:
        names = [name.strip() for name in targets.value.split(",") if name.strip()]
        targets.value = [Item(name, targets.path, targets.line) for name in names]
    trackers = config.get("trackers")
    if trackers is not None and isinstance(trackers.value, str):
        trackers.value = [Item(trackers.value, trackers.path, trackers.line)]
    if trackers is not None and trackers.plain() == ["none"]:
        trackers.value = []
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
