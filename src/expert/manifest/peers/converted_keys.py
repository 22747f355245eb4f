"""Keys of other trainers that are converted by a table of values or a function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from expert.manifest.migrate.aliases import (
    ADAM_BETAS,
    AMP_NAMES,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    MODEL_NAMES,
)
from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.distributed import DISTRIBUTED_KEYS
from expert.manifest.schema.kinds import PromptTemplate, Tracker
from expert.manifest.text.item import Item, shown

OTHER_METHODS = ("dpo", "ppo", "kto", "rm", "orpo", "ipo", "simpo", "grpo", "gdpo", "rloo")
"""Values of `stage` and `rl` that are not supervised fine-tuning."""
MEDIA_TEMPLATE = re.compile(
    r"_vl\b|_vl_|vl$|llava|pixtral|vision|omni|audio|internvl|minicpm_[vo]|paligemma|mllama|glm4v"
    r"|voxtral|idefics|smolvlm|moss_?vl|gemma3n"
)
_FAMILIES = (
    *("llama", "qwen", "gemma", "mistral", "phi", "deepseek", "falcon", "yi", "command"),
    *("cohere", "granite", "olmo", "glm", "exaone", "smollm", "ministral"),
)
_OWN_TEMPLATES = [
    name for name in get_args(PromptTemplate) if not any(family in name for family in _FAMILIES)
]
"""Templates with a name of their own; that of a family means the tokenizer's template."""
# Names of precisions, with the values of bf16 and fp16.
_FLOATS = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", "bf16-mixed"), (True, False)),
    **dict.fromkeys(("fp16", "float16", "half", "16-true", "16-mixed"), (False, True)),
    **dict.fromkeys(("fp32", "float32", "float", "no", "32-true"), (False, False)),
}
_NO_TOKENS = ("tokens cannot be added to a vocabulary", "remove it")


@dataclass(frozen=True)
class Values:
    """Converts the values of a key to values of `key`."""

    key: str
    values: Mapping[Any, Any]
    """By the original value, text in lower case. None: dropped."""
    expected: str = ""
    """For the error about any other value; empty: dropped."""

    def __call__(self, work: Migration, zone: Entries, item: Item) -> None:
        word = item.value.lower() if isinstance(item.value, str) else item.value
        known = isinstance(word, str | bool) and word in self.values
        value = self.values[word] if known else None
        if value is not None:
            work.convert(zone, self.key, value, item)
        elif not known and self.expected:
            work.refuse(item, self.expected)


def convert_keys(work: Migration, zone: Entries) -> None:
    """Convert all CONVERTED keys of a section, with a notice or problem for each."""
    first = [key for key in DISTRIBUTED_KEYS if key in zone]
    for key in [*first, *(key for key in zone if key in CONVERTED and key not in DISTRIBUTED_KEYS)]:
        if key in _MAY_BE_METADATA and (zone is not work.root or work.is_expert_manifest):
            continue
        item = zone.pop(key)
        if item.value is not None:
            CONVERTED[key](work, zone, item)
    options = zone.get("lr_scheduler_kwargs", Item(None)).fields()
    if "min_lr_rate" in options:
        work.later.append((_min_rate, options.pop("min_lr_rate")))


def read_methods(work: Migration) -> None:
    """Refuse methods in `stage` (LLaMA-Factory) and `rl` (Axolotl) other than SFT."""
    for key in ("stage", "rl"):
        item = work.root.get(key)
        if item is None or isinstance(item.value, dict | list):
            continue
        word = str(item.value).lower()
        if word in OTHER_METHODS:
            del work.root[key]
            work.seen.add("another method")
            what = f"{word} is not supported: only sft (supervised fine-tuning) is"
            work.problem(item, what, "use rows with answers, and leave the key out")
        elif key == "rl" and item.value in (None, False):
            del work.root[key]


def read_quantization(work: Migration) -> None:
    bits, method = (take(work.root, f"quantization_{part}") for part in ("bit", "method"))
    if method.value not in (None, "bnb", "bitsandbytes"):
        what = f"{shown(method.plain())}: bases are quantised with bitsandbytes only"
        work.problem(method, what, "use bitsandbytes")
    if bits.value is None:
        return
    if bits.value not in (4, 8) or isinstance(bits.value, bool):
        work.refuse(bits, "4 or 8")
        return
    work.root.setdefault("quantization", with_value(bits, f"int{bits.value}"))
    work.read_as(bits, f"base_models[0].quantization: int{bits.value}")


# --- keys that stay in their section -------------------------------------------------------------


def _template(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `template` and `chat_template`: a template of that name, or the tokenizer's."""
    word = str(item.value).lower()
    if not isinstance(item.value, str):
        work.refuse(item, "the name of a template")
    elif "{{" in word or "{%" in word:
        what = "inline templates are not read"
        fix = "put it into the tokenizer_config.json of the base model's folder"
        work.problem(item, what, f"{fix}; prompt_template: tokenizer uses it")
    elif MEDIA_TEMPLATE.search(word):
        what = f"{word} is a template for images or sound"
        work.problem(item, what, "only text is trained: name a model and a template for text")
    elif word in _OWN_TEMPLATES:
        work.convert(zone, "prompt_template", word, item)
    elif word == "jinja":
        return  # chat_template_jinja is refused
    elif word == "empty":
        what = "empty: rows without a template"
        fix = "name the column with the whole text: training.dataset.text_field"
        work.problem(item, what, fix)
    elif word.startswith("tokenizer_default") or any(f in word for f in _FAMILIES):
        work.convert(zone, "prompt_template", "auto", item)
    else:
        text = f"there is no {shown(word)} template here; the tokenizer's own is used"
        work.report("warning", item, text)


def _quant_type(work: Migration, _: Entries, item: Item) -> None:
    if item.value == "nf4":
        work.report("note", item, "quantization: int4 is NF4")
    elif item.value == "fp4":
        what = "fp4 is not supported: quantization: int4 is NF4, which is closer to the weights"
        work.problem(item, what, "write nf4, or leave it out")
    else:
        work.refuse(item, "nf4")


def _compute_dtype(work: Migration, zone: Entries, item: Item) -> None:
    zones = [zone, work.root, work.config.fields() if work.config is not None else {}]
    if any(name in section for name in ("bf16", "fp16", *DTYPE_NAMES) for section in zones):
        text = "a quantised base computes in the precision of the run: bf16 or fp16"
        work.supersede(item, text)
    else:
        zone["torch_dtype"] = item


def _double_quant(work: Migration, _: Entries, item: Item) -> None:
    if item.value is True:
        work.report("note", item, "quantization: int4 always uses double quantisation")
    elif item.value is False:
        work.supersede(item, "int4 always uses double quantisation: 0.4 bits less per weight")
    else:
        work.refuse(item, "true or false")


def _quant_storage(work: Migration, _: Entries, item: Item) -> None:
    if str(item.value).removeprefix("torch.") != "uint8":
        text = "quantised weights are sharded as they are: no other storage type is needed"
        work.supersede(item, text)


def _half(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `float16`, `bfloat16`, `pure_bf16` and `float32`."""
    if item.key == "float32":
        if item.value is True:
            zone["dtype"] = with_value(item, "float32")
        return
    key = "fp16" if item.key == "float16" else "bf16"
    if item.value is True:
        other = zone.get(key)
        if other is not None and other.value is False:
            del zone[key]  # in Axolotl, `float16: true` next to `fp16: false` is valid
        work.convert(zone, key, True, item)


def _attention(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `attn` and `flash_attn`: a name, or true."""
    if "flash-attn" in str(item.value).lower():
        work.convert(zone, "attention", "flash", item)
    else:
        _ATTENTION(work, zone, item)


def _use_rslora(work: Migration, zone: Entries, item: Item) -> None:
    """Refuse rsLoRA, with the alpha that gives the same scale: alpha·√rank."""
    if item.value is not True:
        return
    zones = [zone, work.config.fields() if work.config is not None else {}]
    rank, alpha = (
        next((zone[name].value for zone in zones for name in aliases if name in zone), None)
        for aliases in (("lora_r", "lora_rank", "r", "rank"), ("lora_alpha", "alpha"))
    )
    what = "rank-stabilised scaling (alpha / √rank) is not supported; the scale is alpha / rank"
    fix = "remove it"
    if type(rank) is int and type(alpha) is int and rank > 0:
        fix = f"remove it and write alpha: {round(alpha * math.sqrt(rank))} for the same scale"
    work.problem(item, what, fix)


def _min_rate(work: Migration, item: Item) -> None:
    """Convert `min_lr`, and Axolotl's `cosine_min_lr_ratio` and Transformers' `min_lr_rate`, which
    are shares of the learning rate."""
    config = work.section("training", "config")
    rate: object = item.value
    if item.key != "min_lr":
        peak = config.get("learning_rate", Item(None)).value
        if isinstance(peak, bool) or not isinstance(peak, int | float):
            what = "a share of learning_rate, which is missing"
            work.problem(item, what, "add learning_rate")
            return
        # Rounded: 0.1 × 1e-5 is 1.0000000000000002e-06.
        rate = float(f"{item.value * peak:.12g}") if isinstance(item.value, int | float) else None
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        work.refuse(item, "a number")
        return
    options = config.setdefault("lr_scheduler_kwargs", with_value(item, {}))
    options.fields()["min_lr"] = with_value(item, rate)
    work.read_as(item, f"training.config.lr_scheduler_kwargs.min_lr: {rate:g}")


def _percentage(work: Migration, zone: Entries, item: Item) -> None:
    if isinstance(item.value, bool) or not isinstance(item.value, int | float):
        work.refuse(item, "a number")
    else:
        work.convert(zone, "validation_split", item.value / 100, item)


def _overlong(work: Migration, zone: Entries, item: Item) -> None:
    known = {"drop": "drop", "truncate": "cut"}.get(str(item.value))
    if known is None:
        what = f"{shown(item.plain())}: a run does not stop at a long row"
        work.problem(item, what, "write training.config.overlong: cut, split or drop")
    else:
        work.convert(zone, "overlong", known, item)


def _packing_strategy(work: Migration, zone: Entries, item: Item) -> None:
    """Convert TRL's packing_strategy, which matters only with `packing: true`."""
    known = {"bfd": "best-fit", "ffd": "best-fit", "wrapped": "concat"}.get(str(item.value))
    packing = zone.get("packing")
    if known is None:
        work.refuse(item, "bfd or wrapped")
    elif packing is not None and packing.value is True:
        packing.value = known
        work.read_as(item, f"training.config.packing: {known}")


def _tokens(work: Migration, _: Entries, item: Item) -> None:
    """A list of new tokens, or special tokens by name (old Axolotl files)."""
    if isinstance(item.value, dict):
        work.without_effect(item, "the tokenizer's own special tokens are used")
    elif item.value:
        work.problem(item, *_NO_TOKENS)


def _rope_scaling(work: Migration, zone: Entries, item: Item) -> None:
    """In LLaMA-Factory it is at the top level."""
    if zone is not work.root or "model_name_or_path" not in zone:
        zone["rope_scaling"] = item  # reported later
    else:
        work.later.append((lambda work, item: work.place_in_model("rope_scaling", item), item))


def _revision(work: Migration, _: Entries, item: Item) -> None:
    if item.value != "main":
        work.later.append((lambda work, item: work.place_in_model("revision", item), item))


def _plugins(work: Migration, _: Entries, item: Item) -> None:
    """Axolotl's plugins by class: those with kernels are not needed, others are not run."""
    listed = item.value if isinstance(item.value, list) else [item]
    for entry in listed:
        word = str(entry.plain())
        if re.search(r"liger|cut_cross_entropy|kernels", word.lower()):
            work.supersede(entry, "the plan chooses fused kernels: fused_loss, fused_blocks")
        else:
            work.without_effect(entry, f"{shown(word)} is a Python class, which is not run")


def _tracker(name: str, key: str = "") -> Callable[..., None]:
    """A rule for a key that turns a tracker on; its value may also set `key`."""

    def rule(work: Migration, zone: Entries, item: Item) -> None:
        if not item.value:
            return
        if key:
            _named(work, zone, key, item)
        work.later.append((lambda work, item: _add_tracker(work, item, name), item))

    return rule


def _add_tracker(work: Migration, item: Item, name: str) -> None:
    """Add to the default trackers, unless the file lists its trackers."""
    config, added = work.section("training", "config"), "trackers by other keys"
    if "trackers" not in config:
        work.seen.add(added)
        config["trackers"] = with_value(item, [with_value(item, "tensorboard")])
    if added in work.seen:
        listed = config["trackers"].value
        if isinstance(listed, list) and name not in [entry.value for entry in listed]:
            listed.append(with_value(item, name))
        work.read_as(item, f"training.config.trackers: {name}")


def _logger(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `logger_name` of LitGPT and `metric_logger` of torchtune."""
    fields = item.fields()
    word = str(fields["_component_"].value if "_component_" in fields else item.value).lower()
    name = next((name for name in get_args(Tracker) if name in word), None)
    if name is None:
        work.supersede(item, "TensorBoard files and events.jsonl are written")
        return
    project = fields.get("project")
    if project is not None:
        _tracker(name, "tracker_project")(work, zone, project)
    else:
        _tracker(name)(work, zone, item)


def _named(work: Migration, zone: Entries, key: str, item: Item) -> None:
    if isinstance(item.value, str):
        work.convert(zone, key, item.value, item)
    else:
        work.refuse(item, "text")


def _run_name(work: Migration, zone: Entries, item: Item) -> None:
    if zone is work.root and work.is_expert_manifest:
        zone["run_name"] = item  # metadata
    elif item.value:
        _named(work, zone, "tracker_run_name", item)


def _all(names: str, rule: Callable[..., None]) -> dict[str, Callable[..., None]]:
    return dict.fromkeys(names.split(), rule)


_ATTENTION = Values(
    "attention",
    {
        **dict.fromkeys((True, "fa2", "fa3", "flash", "flash_attention_2"), "flash"),
        **dict.fromkeys(("fa4", "flash_attention_4"), "flash4"),
        **dict.fromkeys(("disabled", "eager"), "eager"),
        **dict.fromkeys(("flex", "flex_attention"), "flex"),
        **{"sdpa": "sdpa", "auto": "auto", False: None},
    },
    "auto, flash, sdpa, flex or eager",
)
_CHECKPOINTING = {"unsloth": "auto", "true": True, True: True, False: False}
_BITS = {
    **dict.fromkeys(("bnb.nf4", "bnb.nf4-dq", "nf4", "nf4-dq"), "int4"),
    **dict.fromkeys(("bnb.int8", "bnb.int8-training", "int8-training"), "int8"),
}
CONVERTED: dict[str, Callable[[Migration, Entries, Item], object]] = {
    **_all("template chat_template", _template),
    **_all("bnb_4bit_quant_type quantization_type", _quant_type),
    "bnb_4bit_compute_dtype": _compute_dtype,
    **_all("bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant", _double_quant),
    "bnb_4bit_quant_storage": _quant_storage,
    "quantize": Values("quantization", _BITS, "bnb.nf4, bnb.nf4-dq or bnb.int8-training"),
    **_all("float16 bfloat16 pure_bf16 float32", _half),
    **_all("attn flash_attn", _attention),
    "sdp_attention": Values("attention", {True: "sdpa"}),
    "eager_attention": Values("attention", {True: "eager"}),
    "flex_attention": Values("attention", {True: "flex"}),
    "flash_attention_3": Values("attention", {True: "flash"}),
    **_all("use_rslora peft_use_rslora", _use_rslora),
    "peft_use_dora": lambda _, zone, item: zone.setdefault("use_dora", item),
    "plugins": _plugins,
    "disable_gradient_checkpointing": Values("gradient_checkpointing", {True: False}),
    "full_finetuning": Values("adapter_type", {True: "full"}),
    "use_peft": Values("adapter_type", {True: "lora", False: "full"}),
    "use_gradient_checkpointing": Values(
        "gradient_checkpointing", _CHECKPOINTING, 'true, false or "unsloth"'
    ),
    **_all(
        "cosine_min_lr_ratio min_lr", lambda work, _, item: work.later.append((_min_rate, item))
    ),
    "excess_length_strategy": _overlong,
    "validation_split_percentage": _percentage,
    **_all(
        "completion_only_loss assistant_only_loss mask_prompt train_on_responses_only "
        "train_on_completions_only train_on_completions",
        Values("train_on_prompt", {True: False, False: True}, "true or false"),
    ),
    **_all("model_revision revision_of_model", _revision),
    "packing_strategy": _packing_strategy,
    "dataset_streaming": Values("streaming", {True: True, False: False}, "true or false"),
    **_all("use_cpu no_cuda", Values("device", {True: "cpu"})),
    "tokens": _tokens,
    "rope_scaling": _rope_scaling,
    "wandb_project": _tracker("wandb", "tracker_project"),
    **_all("mlflow_project mlflow_experiment_name", _tracker("mlflow", "tracker_project")),
    **_all("trackio_project trackio_project_name", _tracker("trackio", "tracker_project")),
    **{f"use_{name}": _tracker(name) for name in get_args(Tracker)},
    **_all("logger_name metric_logger", _logger),
    **_all("run_name wandb_name wandb_run_name mlflow_run_name trackio_run_name", _run_name),
    **DISTRIBUTED_KEYS,
}
_MAY_BE_METADATA = (
    *("plugins", "tokens", "rope_scaling", "template", "chat_template", "quantize", "attn"),
    *("min_lr", "strategy"),
)
"""At the top level of an Expert manifest, these may be metadata."""


# --- keys that are converted last ----------------------------------------------------------------


def _dtype(work: Migration, item: Item) -> None:
    word = str(item.plain()).lower().removeprefix("torch.")
    if item.value is None or word == "auto":
        work.report("note", item, "auto: the plan chooses the precision")
        return
    if not isinstance(item.value, str) or word not in _FLOATS:
        work.refuse(item, "bfloat16, float16, float32 or auto")
        return
    config = work.section("training", "config")
    flags = dict(zip(("bf16", "fp16"), _FLOATS[word], strict=True))
    for key, flag in flags.items():
        present = config.get(key)
        if present is not None and present.value not in (None, "auto", flag):
            work.conflict(item, present)
            return
    config.update({key: with_value(item, flag) for key, flag in flags.items()})
    text = ", ".join(f"{key}: {shown(flag)}" for key, flag in flags.items())
    work.read_as(item, f"training.config.{text}")


def _amp(work: Migration, item: Item) -> None:
    if item.value is True:
        work.read_as(item, "mixed precision: the plan chooses bf16 or fp16")
    else:
        _dtype(work, with_value(item, "fp32") if item.value is False else item)


def _load_in(work: Migration, item: Item) -> None:
    bits = "int4" if "4bit" in item.path else "int8"
    if item.value is None:
        return
    if not isinstance(item.value, bool):
        work.refuse(item, "true or false")
        return
    first = work.first_base_model
    models = work.root["base_models"].value
    for number, entry in enumerate(models if isinstance(models, list) else [Item(first)]):
        present = entry.fields().get("quantization")
        is_unset = present is None or present.value in (None, "auto")
        value = bits if item.value else "none"
        if present is not None and not is_unset and item.value is not (present.value == bits):
            work.conflict(item, present)
        elif item.value or is_unset or (present is not None and present.value == "none"):
            entry.fields()["quantization"] = with_value(item, value)
            work.read_as(item, f"base_models[{number}].quantization: {value}")


def _adam_beta(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    if item.value is None:
        return
    position = 0 if item.path.endswith("beta1") else 1
    betas = config.get("betas")
    if betas is not None and betas.path.endswith("betas"):
        present = betas.below(position)
        if present is None or present.plain() != item.plain():
            work.conflict(item, betas)
        return
    if betas is None:
        betas = config["betas"] = with_value(item, [Item(0.9), Item(0.999)])
    assert isinstance(betas.value, list)
    betas.value[position] = item
    work.read_as(item, f"training.config.betas[{position}]")


def _use_dora(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    kind = config.get("adapter_type") or Item("lora")
    word = str(kind.value).lower() if kind.value is not None else "lora"
    if item.value is None:
        return
    if not isinstance(item.value, bool):
        work.refuse(item, "true or false")
    elif item.value and word == "lora":
        config["adapter_type"] = with_value(item, "dora")
        work.read_as(item, "training.config.adapter_type: dora")
    elif item.value is not (word == "dora"):
        work.conflict(item, kind)


SPECIAL: dict[str, Callable[[Migration, Item], None]] = {
    **dict.fromkeys(DTYPE_NAMES, _dtype),
    **dict.fromkeys(AMP_NAMES, _amp),
    **dict.fromkeys(LOAD_IN_NAMES, _load_in),
    **dict.fromkeys(MODEL_NAMES, lambda work, item: work.place_in_model("name", item)),
    **dict.fromkeys(ADAM_BETAS, _adam_beta),
    "use_dora": _use_dora,
}
