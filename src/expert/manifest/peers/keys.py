"""Keys of other trainers that are converted by a table of values or a function."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from expert.core.files import read_text
from expert.manifest.migrate.aliases import (
    ADAM_BETAS,
    AMP_NAMES,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    MODEL_NAMES,
)
from expert.manifest.migrate.migration import (
    Entries,
    Migration,
    Rule,
    convert_values_to,
    with_value,
)
from expert.manifest.peers.distributed import DISTRIBUTED_KEYS, DISTRIBUTED_RULES
from expert.manifest.schema.kinds import Tracker, is_jinja
from expert.manifest.text.item import Item, shown

_MEDIA_TEMPLATE = re.compile(
    r"_vl\b|_vl_|vl$|llava|pixtral|vision|omni|audio|internvl|minicpm_[vo]|paligemma|mllama|glm4v"
    r"|voxtral|idefics|smolvlm|moss_?vl|gemma3n"
)
_OWN_TEMPLATES = ("tokenizer", "alpaca", "chatml")
"""Those of other names are families of models there: the tokenizer's template is used."""
# Names of precisions, with the values of bf16 and fp16.
_FLOATS = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true", "bf16-mixed"), (True, False)),
    **dict.fromkeys(("fp16", "float16", "half", "16-true", "16-mixed"), (False, True)),
    **dict.fromkeys(("fp32", "float32", "float", "no", "32-true"), (False, False)),
}


def convert_keys(work: Migration, zone: Entries) -> None:
    """Convert all CONVERTED keys of a section, with a notice or problem for each."""
    for key in dict.fromkeys([*DISTRIBUTED_KEYS, *zone]):
        if key not in CONVERTED or key not in zone:
            continue
        if key in METADATA_WORDS and (zone is not work.root or work.is_expert_manifest):
            continue
        item = zone.pop(key)
        if item.value is not None:
            CONVERTED[key](work, zone, item)
    options = zone.get("lr_scheduler_kwargs", Item(None)).fields()
    if "min_lr_rate" in options:
        work.later.append((_min_rate, options.pop("min_lr_rate")))


# --- keys that stay in their section -------------------------------------------------------------


def _template(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `template` and `chat_template`: the text of a template, one of that name, or the
    tokenizer's."""
    word = str(item.value).lower()
    if is_jinja(word):
        zone["prompt_template"] = item
        work.read_as(item, "base_models[0].prompt_template: the text in this file")
    elif not isinstance(item.value, str) or item.key == "chat_template_jinja":
        fix = "write its text, with {% and {{, or leave it out for the tokenizer's"
        work.problem(item, "only a name or the text of a template is read", fix)
    elif _MEDIA_TEMPLATE.search(word):
        fix = "only text is trained: name a model and a template for text"
        work.problem(item, f"{word} is a template for images or sound", fix)
    elif word in _OWN_TEMPLATES:
        work.convert(zone, "prompt_template", word, item)
    elif word == "empty":
        fix = "name the column with the whole text: training.dataset.text_field"
        work.problem(item, "empty: rows without a template", fix)
    elif word != "jinja":  # chat_template_jinja has it
        work.convert(zone, "prompt_template", "auto", item)


def _compute_dtype(work: Migration, zone: Entries, item: Item) -> None:
    zones = [zone, work.root, (work.config or Item(None)).fields()]
    if any(name in section for name in ("bf16", "fp16", *DTYPE_NAMES) for section in zones):
        work.unused(item, "bf16 and fp16 decide")
    else:
        zone["torch_dtype"] = item


def _percentage(work: Migration, zone: Entries, item: Item) -> None:
    if isinstance(item.value, bool) or not isinstance(item.value, int | float):
        work.refuse(item, "a number")
    else:
        work.convert(zone, "validation_split", item.value / 100, item)


def _packing_strategy(work: Migration, zone: Entries, item: Item) -> None:
    """Convert TRL's packing_strategy, which matters only with `packing: true`."""
    known = {"bfd": "best-fit", "ffd": "best-fit", "wrapped": "concat"}.get(str(item.value))
    packing = zone.get("packing", Item(None))
    if known is None:
        work.refuse(item, "bfd or wrapped")
    elif packing.value is True:
        packing.value = known
        work.read_as(item, f"training.config.packing: {known}")


def _revision(work: Migration, zone: Entries, item: Item) -> None:
    if item.value != "main":
        work.later.append((lambda work, item: work.put("base_models[0].revision", item), item))


def _tracker(name: str) -> Rule:
    """A rule for a key that turns a tracker on; the name of a project also sets tracker_project."""

    def rule(work: Migration, zone: Entries, item: Item) -> None:
        if item.value and not item.key.startswith("use_"):
            _text("tracker_project")(work, zone, item)
        if item.value:
            work.later.append((lambda work, item: _add_tracker(work, item, name), item))

    return rule


def _add_tracker(work: Migration, item: Item, name: str) -> None:
    """Add to the default trackers, unless the file lists its trackers."""
    config, added = work.section("training", "config"), "trackers by other keys"
    if "trackers" not in config:
        work.seen.add(added)
        config["trackers"] = with_value(item, [with_value(item, "tensorboard")])
    if added in work.seen:
        listed = config["trackers"].entries()
        if name not in [entry.value for entry in listed]:
            listed.append(with_value(item, name))
        work.read_as(item, f"training.config.trackers: {name}")


def _text(key: str) -> Rule:
    def rule(work: Migration, zone: Entries, item: Item) -> None:
        if item.key == "run_name" and zone is work.root and work.is_expert_manifest:
            zone["run_name"] = item  # metadata
        elif isinstance(item.value, str) and item.value:
            work.convert(zone, key, item.value, item)
        elif item.value:
            work.refuse(item, "text")

    return rule


def _unfrozen(work: Migration, zone: Entries, item: Item) -> None:
    """Accept patterns that leave out a vision tower only: just the text model is loaded here."""
    texts = ("language_model", "lm_head")
    if all(any(text in str(each.value) for text in texts) for each in item.entries() or [item]):
        work.unused(item, "only the text model is loaded, so nothing else is trained")
    elif item.value:
        work.problem(item, "parts of the model cannot be chosen", "remove it")


# --- keys that are converted last ----------------------------------------------------------------


def _min_rate(work: Migration, item: Item) -> None:
    """Convert `min_lr`, and Axolotl's `cosine_min_lr_ratio` and Transformers' `min_lr_rate`, which
    are shares of the learning rate."""
    config = work.section("training", "config")
    rate = item.value
    if item.key != "min_lr" and type(rate) in (int, float):
        peak = config.get("learning_rate", Item(None)).value
        if type(peak) not in (int, float):
            work.problem(item, "a share of learning_rate, which is missing", "add learning_rate")
            return
        rate = float(f"{rate * peak:.12g}")  # type: ignore[operator]  # 0.1 × 1e-5 is 1.0…2e-06
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        work.refuse(item, "a number")
        return
    options = config.setdefault("lr_scheduler_kwargs", with_value(item, {}))
    options.fields()["min_lr"] = with_value(item, rate)
    work.read_as(item, f"training.config.lr_scheduler_kwargs.min_lr: {rate:g}")


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
        if config.get(key, Item(None)).value not in (None, "auto", flag):
            is_ours = work.root["training"].line is not None  # with a section as in our files
            if item.key == "torch_dtype" and config[key].value is True and not is_ours:
                work.unused(item, f"{key}: true decides")  # there it is the dtype of loading
            else:
                work.conflict(item, config[key])
            return
    config.update({key: with_value(item, flag) for key, flag in flags.items()})
    text = ", ".join(f"{key}: {shown(flag)}" for key, flag in flags.items())
    work.read_as(item, f"training.config.{text}")


def _amp(work: Migration, item: Item) -> None:
    if item.value is True:
        work.read_as(item, "mixed precision: the plan chooses bf16 or fp16")
    else:
        _dtype(work, with_value(item, "fp32") if item.value is False else item)


def _rslora(work: Migration, item: Item) -> None:
    """rsLoRA divides alpha by √rank instead of the rank."""
    config = work.section("training", "config")
    rank = config.get("rank", Item(None)).whole or 16
    alpha = config.get("alpha", Item(None)).whole or 2 * rank
    if not isinstance(item.value, bool | None) or (item.value and work.is_override):
        work.refuse(item, "true or false in a file", "or set alpha to alpha × √rank")
    elif item.value:
        same = round(alpha * math.sqrt(rank))
        config["alpha"] = with_value(config.get("alpha", item), same)
        work.read_as(item, f"training.config.alpha: {same} ({alpha} × √{rank}, the same scale)")


def _load_in(work: Migration, item: Item) -> None:
    if not isinstance(item.value, bool | None):
        work.refuse(item, "true or false")
    if not isinstance(item.value, bool):
        return
    bits = "int4" if "4bit" in item.path else "int8"
    first = Item(work.first_base_model)
    for number, entry in enumerate(work.root["base_models"].entries() or [first]):
        present = entry.fields().get("quantization", Item(None))
        is_set = present.value not in (None, "auto")
        if is_set and item.value is not (present.value == bits):
            work.conflict(item, present)
        elif item.value or present.value in (None, "auto", "none"):
            value = bits if item.value else "none"
            entry.fields()["quantization"] = with_value(item, value)
            work.read_as(item, f"base_models[{number}].quantization: {value}")


def _adam_beta(work: Migration, item: Item) -> None:
    if item.value is None:
        return
    config, position = work.section("training", "config"), int(item.path[-1]) - 1
    betas = config.get("betas")
    if betas is not None and betas.path.endswith("betas"):
        present = betas.get(position)
        if present is None or present.plain() != item.plain():
            work.conflict(item, betas)
        return
    if betas is None:
        betas = config["betas"] = with_value(item, [Item(0.9), Item(0.999)])
    betas.entries()[position] = item
    work.read_as(item, f"training.config.betas[{position}]")


def _use_dora(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    kind = config.get("adapter_type") or Item("lora")
    word = str(kind.value or "lora").lower()
    if not isinstance(item.value, bool | None):
        work.refuse(item, "true or false")
    elif item.value and word == "lora":
        config["adapter_type"] = with_value(item, "dora")
        work.read_as(item, "training.config.adapter_type: dora")
    elif item.value is not None and item.value is not (word == "dora"):
        work.conflict(item, kind)


def _expert_weights(work: Migration, item: Item) -> None:
    """Weights of experts stand among target_modules here, and all-linear includes them."""
    config = work.section("training", "config")
    targets = config.get("target_modules", Item(None))
    if not item.entries() or not all(isinstance(each.value, str) for each in item.entries()):
        work.refuse(item, "a list of names")
    elif targets.entries():
        config["target_modules"] = with_value(targets, [*targets.entries(), *item.entries()])
        names = ", ".join(str(each.value) for each in item.entries())
        work.read_as(item, f"training.config.target_modules: also {names}")
    else:
        work.read_as(item, "training.config.target_modules: experts are included")


SPECIAL: dict[str, Callable[[Migration, Item], None]] = {
    **dict.fromkeys(DTYPE_NAMES, _dtype),
    **dict.fromkeys(AMP_NAMES, _amp),
    **dict.fromkeys(LOAD_IN_NAMES, _load_in),
    **dict.fromkeys(MODEL_NAMES, lambda work, item: work.put("base_models[0].name", item)),
    **dict.fromkeys(ADAM_BETAS, _adam_beta),
    "use_dora": _use_dora,
}


def _by_values() -> Iterator[tuple[str, Rule]]:
    """The rules of values.toml."""
    words = {"true": True, "false": False, "dropped": None}
    tables = tomllib.loads(read_text(Path(__file__).with_name("values.toml")))
    for names, table in tables.items():
        key, expected = table.pop("sets"), table.pop("expected", "")
        values = {word: words.get(ours, ours) for ours, theirs in table.items() for word in theirs}
        for name in names.split():
            yield name, convert_values_to(key, values, expected)


CONVERTED: dict[str, Rule] = {
    **dict(_by_values()),
    **dict.fromkeys(("template", "chat_template", "chat_template_jinja"), _template),
    "bnb_4bit_compute_dtype": _compute_dtype,
    "peft_use_dora": lambda work, zone, item: work.place(zone, "use_dora", item, item.path),
    "validation_split_percentage": _percentage,
    "unfrozen_parameters": _unfrozen,
    **dict.fromkeys(
        ("use_rslora", "peft_use_rslora"),
        lambda work, zone, item: work.later.append((_rslora, item)),
    ),
    **dict.fromkeys(
        ("target_parameters", "lora_target_parameters", "peft_target_parameters"),
        lambda work, zone, item: work.later.append((_expert_weights, item)),
    ),
    "packing_strategy": _packing_strategy,
    **dict.fromkeys(("model_revision", "revision_of_model"), _revision),
    **dict.fromkeys(
        ("cosine_min_lr_ratio", "min_lr"),
        lambda work, zone, item: work.later.append((_min_rate, item)),
    ),
    "wandb_project": _tracker("wandb"),
    **dict.fromkeys(("mlflow_project", "mlflow_experiment_name"), _tracker("mlflow")),
    **dict.fromkeys(("trackio_project", "trackio_project_name"), _tracker("trackio")),
    **{f"use_{name}": _tracker(name) for name in get_args(Tracker)},
    **dict.fromkeys(
        ("run_name", "wandb_name", "wandb_run_name", "mlflow_run_name", "trackio_run_name"),
        _text("tracker_run_name"),
    ),
    **DISTRIBUTED_RULES,
}
METADATA_WORDS = frozenset(
    (
        *("bias", "debug", "devices", "model_type", "neftune", "padding", "profiler", "plugins"),
        *("qat", "relora", "resume", "run", "shuffle", "strict", "task_type", "tokenizer", "loss"),
        *("tokens", "tool_format", "quantize", "iters", "rope_scaling", "template", "attn"),
        *("chat_template", "min_lr"),
    )
)
"""At the top level of an Expert manifest, these may be metadata."""
