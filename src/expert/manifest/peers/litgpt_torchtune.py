"""Converts files of LitGPT and torchtune, which name Python classes."""

from __future__ import annotations

import re

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.data_sets import NamedDataset
from expert.manifest.peers.defaults import default_constant_rate, default_no_clipping
from expert.manifest.peers.packed_batches import int_or_zero, put_batch_tokens
from expert.manifest.text.item import Item, shown

_LITGPT_TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": ("lm_head",),
}
_NO_HEAD = ("the head cannot have an adapter", "write false")
_LITGPT_DEFAULTS = ("lora_query", "lora_value")
_LITGPT_SETS = {
    "alpaca": "tatsu-lab/alpaca",
    "alpaca2k": "mhenrichsen/alpaca_2k_test",
    "alpacagpt4": "vicgalle/alpaca-gpt4",
    "dolly": "databricks/databricks-dolly-15k",
    "longform": "akoksal/LongForm",
    "deita": "HuggingFaceH4/deita-10k-v0-sft",
    "lima": "GAIR/lima",
}
_TRAIN_NAMES = {
    "save_interval": "save_steps",
    "lr_warmup_steps": "warmup_steps",
    "max_norm": "max_grad_norm",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
}
_WITHOUT = {
    "max_tokens": "max_steps or epochs end a run",
    "lr_warmup_fraction": "a share of an epoch there; set warmup_steps, or warmup_ratio of the run",
}
# Arguments of a data class that are settings of the run in Expert.
_RUN_SETTINGS = ("seed", "ignore_index", "num_workers", "include_multiturn_conversations")


def read_litgpt(work: Migration) -> None:
    """Convert LitGPT's fine-tuning files: `data: {class_path}`, `train:`, `eval:`."""
    data = work.root.get("data", Item(None))
    settings = work.root.get("train", Item(None)).fields()
    is_litgpt = "global_batch_size" in settings
    is_name = isinstance(data.value, str) and (
        data.value.lower() in _LITGPT_SETS or (is_litgpt and data.value.isidentifier())
    )
    is_class = is_name or data.get("class_path") is not None
    if not is_class and not is_litgpt:
        return
    folder = take(work.root, "checkpoint_dir")
    if isinstance(folder.value, str):
        name = folder.value.replace("\\", "/").removeprefix("checkpoints/")
        work.root.setdefault("base_model", with_value(folder, name))
        work.read_as(folder, f"base_models[0].name: {name}")
    work.root.pop("train", None)
    # global_batch_size is batch_size of Expert; micro_batch_size means the same.
    rows = settings.pop("global_batch_size", None)
    if rows is not None:
        work.place(work.root, "batch_size", rows, "training.config.batch_size")
    for key, item in settings.items():
        if key.startswith("_") or item.value is None:
            continue
        if key in _WITHOUT:
            work.without_effect(item, _WITHOUT[key])
            continue
        if key == "tie_embeddings":
            work.supersede(item, "the model's own config.json decides")
            continue
        home = _TRAIN_NAMES.get(key, key)
        same_name = home == key or home.startswith("adam_beta")
        work.place(work.root, home, item, item.path if same_name else f"training.config.{home}")
    if settings.get("max_norm", Item(None)).value is None:
        default_no_clipping(work, "LitGPT", settings.get("max_norm"))
    _litgpt_evaluation(work, take(work.root, "eval").fields())
    _litgpt_targets(work)
    if is_class:
        del work.root["data"]
        _litgpt_rows(work, data)


def _litgpt_evaluation(work: Migration, settings: Entries) -> None:
    steps = take(settings, "interval")
    if steps.value is not None:
        work.place(work.root, "eval_steps", steps, "training.config.eval_steps")
    for item in settings.values():
        if item.value not in (None, False, True):
            text = "all validation rows are evaluated; no text is generated during training"
            work.supersede(item, text)


def _litgpt_targets(work: Migration) -> None:
    """Convert the switches for adapted layers; by default query and value."""
    switches = {key: work.root.pop(key) for key in _LITGPT_TARGETS if key in work.root}
    if not switches and "lora_r" not in work.root:
        if not {"adapter", "adapter_type"} & {*work.root} and not work.is_override:
            at = work.root["adapter_type"] = Item("full", "lora_r")
            text = "training.config.adapter_type: full (without lora_r all weights are trained)"
            work.read_as(at, text)
        return
    names: list[str] = []
    for key, layers in _LITGPT_TARGETS.items():
        item = switches.get(key)
        on = item.value if item is not None else key in _LITGPT_DEFAULTS
        if on and key == "lora_head" and item is not None:
            work.problem(item, *_NO_HEAD)
        elif on:
            names += layers
    if names and "lora_target_modules" not in work.root:
        _put_targets(work, names, next(iter(switches.values()), Item(None, "lora_query")))


def _put_targets(work: Migration, names: list[str], at: Item) -> None:
    listed = [with_value(at, name) for name in names]
    work.root.setdefault("lora_target_modules", with_value(at, listed))
    work.read_as(at, f"training.config.target_modules: {', '.join(names)}")


def _litgpt_rows(work: Migration, data: Item) -> None:
    name = data.get("class_path") or data
    fields = (data.get("init_args") or Item(None)).fields()
    word = str(name.value).rpartition(".")[2].lower()
    _put_source(work, fields.pop("json_path", None), name, _LITGPT_SETS.get(word))
    share = take(fields, "val_split_fraction")
    if share.value is not None:
        work.place_in_dataset("validation_split", share)
    style = take(fields, "prompt_style")
    if style.value is not None:
        work.root.setdefault("template", style)
    default = None if work.is_override else False  # LitGPT's default
    work.root.setdefault("mask_prompt", fields.pop("mask_prompt", with_value(name, default)))
    _arguments_without_effect(work, {k: v for k, v in fields.items() if k not in _RUN_SETTINGS})


def _put_source(work: Migration, path: Item | None, name: Item, hub: str | None) -> None:
    """Set the dataset path: a file, or the hub id of a class; another class is a problem."""
    if path is not None:
        work.place_in_dataset("path", path)
    elif hub is not None:
        work.dataset.setdefault("path", with_value(name, hub))
        work.read_as(name, f"training.dataset.path: {hub}")
    else:
        what = f"{shown(name.plain())} is a Python class, which is not run"
        work.problem(name, what, "set training.dataset.path to a file or a hub id")
        work.seen.add("no rows")


def _arguments_without_effect(work: Migration, fields: Entries) -> None:
    for item in fields.values():
        if item.value is not None:
            work.without_effect(item, "an argument of a class that is not used")


# --- torchtune -----------------------------------------------------------------------------------

_TUNE_SETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "cnn_dailymail_articles_dataset": "abisee/cnn_dailymail",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}
_TUNE_COLUMNS = {
    **{"input": "instruction", "output": "response", "system": "system", "tools": "tools"},
    **dict.fromkeys(("messages", "conversations"), "messages"),
}
_ALPACA_COLUMNS = {**_TUNE_COLUMNS, "instruction": "instruction", "input": "input"}
_MASKS = {"train_on_all": True, "train_on_assistant": False}
_TUNE_WITHOUT_EFFECT = {
    "loss": "the loss is cross-entropy on the answers, in chunks: fused_loss",
    "mixed_precision": "the precision is that of dtype: bf16, fp16 or neither",
}
_TUNE_NAMES = {
    "enable_activation_checkpointing": "gradient_checkpointing",
    "log_every_n_steps": "logging_steps",
    "clip_grad_norm": "max_grad_norm",
    "run_val_every_n_steps": "eval_steps",
    "save_every_n_steps": "save_steps",
    "batch_size_val": "eval_batch_size",
}


def read_torchtune(work: Migration) -> None:
    """Convert torchtune's recipes: `_component_` names a class in every section."""
    model, rows = (work.root.get(key, Item(None)) for key in ("model", "dataset"))
    model_class, rows_class = model.get("_component_"), rows.get("_component_")
    if model_class is None and rows_class is None:
        return
    _tune_checkpointer(work)
    length = work.root.get("tokenizer", Item(None)).get("max_seq_len") or Item(None)
    if length.value is not None:
        work.place(work.root, "max_seq_length", length, "training.config.max_seq_length")
    if model_class is not None:
        del work.root["model"]
        _tune_adapter(work, model.fields(), model_class)
    if rows_class is not None:
        del work.root["dataset"]
        _tune_rows(work, rows.fields(), rows_class)
    validation = work.root.get("dataset_val", Item(None))
    if (rows_class := validation.get("_component_")) is not None:
        del work.root["dataset_val"]
        _put_tune_source(work, "validation_path", validation.fields(), rows_class)
    packs = work.root.get("packing", Item(None)).value is True
    if packs and int_or_zero(length) and int_or_zero(work.root.get("batch_size", Item(None))):
        put_batch_tokens(work, work.root.pop("batch_size"), int_or_zero(length))
    if "clip_grad_norm" not in work.root:
        default_no_clipping(work, "torchtune")
    work.rename(_TUNE_NAMES)
    if work.root.get("lr_scheduler", Item(None)).value is None:
        work.root.pop("lr_scheduler", None)
        default_constant_rate(work, "torchtune")
    limit = take(work.root, "max_steps_per_epoch")
    if limit.value:
        work.without_effect(limit, "max_steps limits the whole run")
    for key, text in _TUNE_WITHOUT_EFFECT.items():
        item = take(work.root, key)
        if item.value:
            work.supersede(item, text)


def _tune_checkpointer(work: Migration) -> None:
    """The checkpointer's folder is the base model."""
    checkpointer = take(work.root, "checkpointer")
    folder = checkpointer.get("checkpoint_dir") or Item(None)
    if isinstance(folder.value, str):
        work.root.setdefault("base_model", with_value(folder, folder.value))
        work.read_as(folder, "base_models[0].name")
    if checkpointer.value is not None:
        text = "the folder's config.json and index name the weight files"
        work.supersede(checkpointer, text)


def _tune_adapter(work: Migration, fields: Entries, name: Item) -> None:
    """Convert a model class: its name gives the kind of adapter, its arguments the rest."""
    word = str(name.value).rpartition(".")[2]
    kind = "qlora" if word.startswith("qlora_") else "lora" if word.startswith("lora_") else "full"
    del fields["_component_"]
    if kind != "full":
        kind = _tune_lora(work, fields, name, kind)
    work.root.setdefault("adapter_type", with_value(name, kind))
    work.read_as(name, f"training.config.adapter_type: {kind}")
    _arguments_without_effect(work, fields)


def _tune_lora(work: Migration, fields: Entries, name: Item, kind: str) -> str:
    """Take the arguments of an adapter; return its kind."""
    if take(fields, "quantize_base").value is True:
        kind = "qlora"
    if take(fields, "use_dora").value is True:
        if kind == "qlora":
            work.root.setdefault("quantization", with_value(name, "int4"))
        kind = "dora"
    modules, mlp = take(fields, "lora_attn_modules"), take(fields, "apply_lora_to_mlp")
    listed = modules.plain() if isinstance(modules.value, list) else []
    if modules.value is not None and not isinstance(modules.value, list):
        work.refuse(modules, "a list of layers")
    names = ["o_proj" if layer == "output_proj" else str(layer) for layer in listed]
    if mlp.value is True:
        names += ["gate_proj", "up_proj", "down_proj"]
    if names:
        _put_targets(work, names, modules if listed else mlp)
    head = take(fields, "apply_lora_to_output")
    if head.value is True:
        work.problem(head, *_NO_HEAD)
    for key in ("lora_rank", "lora_alpha", "lora_dropout"):
        if key in fields:
            work.root.setdefault(key, fields.pop(key))
    return kind


def _tune_rows(work: Migration, fields: Entries, kind: Item) -> None:
    is_alpaca = str(kind.value).rpartition(".")[2].startswith("alpaca_")
    if is_alpaca and "train_on_input" not in fields and not work.is_override:
        work.root.setdefault("train_on_prompt", with_value(kind, True))
        text = "training.config.train_on_prompt: true (torchtune's default for Alpaca)"
        work.read_as(kind, text)
    _put_tune_source(work, "path", fields, kind)
    _tune_columns(work, fields)
    for key, home in (("packed", "packing"), ("train_on_input", "train_on_prompt")):
        item = take(fields, key)
        if item.value is not None:
            work.place(work.root, home, item, f"training.config.{home}")
    mask = take(fields, "masking_strategy")
    if isinstance(mask.value, str) and mask.value in _MASKS:
        work.convert(work.root, "train_on_prompt", _MASKS[mask.value], mask)
    elif mask.value is not None:
        work.refuse(mask, " or ".join(_MASKS))
    system = take(fields, "new_system_prompt")
    if system.value:
        work.root["default_system"] = system  # refused by unsupported_keys.py
    known = re.compile(r"_|conversation_style$")
    _arguments_without_effect(work, {k: v for k, v in fields.items() if not known.match(k)})


def _put_tune_source(work: Migration, key: str, fields: Entries, kind: Item) -> None:
    """Set `key` of training.dataset to a file, or to a hub id with its split."""
    source, files, split = (take(fields, name) for name in ("source", "data_files", "split"))
    if files.value and source.value in ("json", "csv", "text", "parquet"):
        source = files
        if isinstance(files.value, list) and len(files.value) == 1:
            source = files.value[0]
    hub = _TUNE_SETS.get(str(kind.value).rpartition(".")[2])
    if source.value is None and hub is not None:
        source = with_value(kind, hub)
    if not isinstance(source.value, str):
        _put_source(work, None, kind, None)
        return
    named = NamedDataset("rows", kind, source, split if split.value is not None else None)
    place = named.source
    if place is not None:
        if place.path == kind.path or place.value != source.value:
            work.read_as(place, f"training.dataset.{key}: {place.value}")
        work.place_in_dataset(key, place)


def _tune_columns(work: Migration, fields: Entries) -> None:
    named = take(fields, "column_map").fields()
    parts = _ALPACA_COLUMNS if "instruction" in named else _TUNE_COLUMNS
    mapping = {parts[key]: named.pop(key) for key in [*named] if key in parts}
    _arguments_without_effect(work, named)
    column = take(fields, "conversation_column")
    if column.value not in (None, "messages", "conversations"):
        mapping["messages"] = column
    text = take(fields, "column")
    if text.value:
        mapping["text"] = text
    for part, item in mapping.items():
        work.read_as(item, f"training.dataset.field_mapping.{part}")
    if mapping:
        at = next(iter(mapping.values()))
        work.dataset.setdefault("field_mapping", with_value(at, mapping))
