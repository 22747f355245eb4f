"""Files of LitGPT and torchtune, which name Python classes: what they say in words of ours."""

from __future__ import annotations

import re

from expert.core.errors import Problem
from expert.manifest.migrate.moving import Entries, Migration
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, shown

# --- LitGPT --------------------------------------------------------------------------------------

_LITGPT_TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": ("lm_head",),
}
_LITGPT_DEFAULTS = ("lora_query", "lora_value")
_LITGPT_SETS = {
    "alpaca": "tatsu-lab/alpaca",
    "alpaca2k": "mhenrichsen/alpaca_2k_test",
    "alpacagpt4": "vicgalle/alpaca-gpt4",
    "dolly": "databricks/databricks-dolly-15k",
    "longform": "akoksal/LongForm",
    "deita": "HuggingFaceH4/deita-10k-v0-sft",
}
_TRAIN_NAMES = {
    "save_interval": "save_steps",
    "lr_warmup_steps": "warmup_steps",
    "max_norm": "max_grad_norm",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
}
_WITHOUT = {
    "tie_embeddings": "the model's own config.json decides",
    "max_tokens": "epochs and max_steps say how long a run is",
    "lr_warmup_fraction": "",
}


def read_litgpt(work: Migration) -> None:
    """LitGPT's fine-tuning files: `data: {class_path}`, `train:`, `eval:`."""
    data, train = work.root.get("data"), work.root.get("train")
    made = data.get("class_path") if data is not None else None
    is_class = made is not None or (data is not None and _is_class_name(data))
    settings = train.fields() if train is not None else {}
    if not is_class and "global_batch_size" not in settings:
        return
    folder = work.root.pop("checkpoint_dir", None)
    if folder is not None and isinstance(folder.value, str):
        name = folder.value.replace("\\", "/").removeprefix("checkpoints/")
        work.root.setdefault("base_model", Item(name, folder.path, folder.line))
        work.notices.append(notice("read as", folder, f"base_models[0].name: {name}"))
    work.root.pop("train", None)
    _litgpt_batch(work, settings)
    _rename(work, settings, _TRAIN_NAMES)
    judged = work.root.pop("eval", None)
    _litgpt_evaluation(work, judged.fields() if judged is not None else {})
    _litgpt_targets(work)
    if data is not None and is_class:
        del work.root["data"]
        _litgpt_rows(work, data)


def _is_class_name(data: Item) -> bool:
    return isinstance(data.value, str) and data.value.lower() in _LITGPT_SETS


def _litgpt_batch(work: Migration, settings: Entries) -> None:
    """global_batch_size is a step, micro_batch_size what is on the card at once: as here."""
    rows = settings.pop("global_batch_size", None)
    if rows is not None:
        work.place(work.root, "batch_size", rows, "training.config.batch_size")


def _rename(work: Migration, settings: Entries, names: dict[str, str]) -> None:
    for key, item in settings.items():
        if key.startswith("_") or item.value is None:
            continue
        text = _WITHOUT.get(key)
        if text is not None:
            work.notices.append(notice("superseded", item, text or "warmup_ratio is a key here"))
            continue
        home = names.get(key, key)
        as_it_is = home == key or home.startswith("adam_beta")
        work.place(work.root, home, item, item.path if as_it_is else f"training.config.{home}")


def _litgpt_evaluation(work: Migration, settings: Entries) -> None:
    steps = settings.get("interval")
    if steps is not None and steps.value is not None:
        home = "training.config.eval_steps"
        work.place(work.root, "eval_steps", steps, home)
    for key, item in settings.items():
        if key != "interval" and item.value not in (None, False, True):
            text = "all validation rows are evaluated, and no text is generated while training"
            work.notices.append(notice("superseded", item, text))


def _litgpt_targets(work: Migration) -> None:
    """Which layers get an adapter, by switches; query and value where nothing is said."""
    given = {key: work.root.pop(key) for key in _LITGPT_TARGETS if key in work.root}
    is_lora = given or "lora_r" in work.root
    adapters = any(key in work.root for key in ("adapter", "adapter_type"))
    if not is_lora:
        if not adapters:
            at = Item("full", "lora_r")
            work.root["adapter_type"] = at
            text = "training.config.adapter_type: full (no rank is given: every weight is trained)"
            work.notices.append(notice("read as", at, text))
        return
    names: list[str] = []
    for key, layers in _LITGPT_TARGETS.items():
        item = given.get(key)
        on = item.value if item is not None else key in _LITGPT_DEFAULTS
        if on and key == "lora_head" and item is not None:
            what = "the head gets no adapter here"
            work.problems.append(Problem(item.path, what, "write false", item.line))
        elif on:
            names += layers
    if names and "lora_target_modules" not in work.root:
        at = next(iter(given.values()), Item(None, "lora_query"))
        listed = [Item(name, at.path, at.line) for name in names]
        work.root["lora_target_modules"] = Item(listed, at.path, at.line)
        text = f"training.config.target_modules: {', '.join(names)}"
        work.notices.append(notice("read as", at, text))


def _litgpt_rows(work: Migration, data: Item) -> None:
    made = data.get("class_path") or data
    arguments = data.get("init_args")
    fields = arguments.fields() if arguments is not None else {}
    word = str(made.value).rpartition(".")[2].lower()
    dataset = work.section("training", "dataset")
    path = fields.pop("json_path", None)
    share = fields.pop("val_split_fraction", None)
    hub = _LITGPT_SETS.get(word)
    if path is not None:
        work.place(dataset, "path", path, "training.dataset.path")
    elif hub is not None:
        dataset.setdefault("path", Item(hub, made.path, made.line))
        work.notices.append(notice("read as", made, f"training.dataset.path: {hub}"))
    else:
        what = f"{shown(made.plain())} is a Python class, which is not run"
        fix = "name the rows: training.dataset.path, a file or a hub id"
        work.problems.append(Problem(made.path, what, fix, made.line))
        work.seen.add("no rows")
    if share is not None:
        work.place(dataset, "validation_split", share, "training.dataset.validation_split")
    style = fields.pop("prompt_style", None)
    if style is not None and style.value is not None:
        work.root.setdefault("template", style)
    hidden = fields.pop("mask_prompt", Item(False, made.path, made.line))
    work.root.setdefault("mask_prompt", hidden)  # false there where nothing is said
    for key, item in fields.items():
        if key in ("seed", "ignore_index", "num_workers", "include_multiturn_conversations"):
            continue  # of the loader; the run has its own
        if item.value is not None:
            text = "without effect: it is an argument of a class that is not used"
            work.notices.append(notice("warning", item, text))


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
_TUNE_COLUMNS = {"input": "instruction", "instruction": "instruction", "output": "response"}
_TUNE_NAMES = {
    "enable_activation_checkpointing": "gradient_checkpointing",
    "log_every_n_steps": "logging_steps",
    "clip_grad_norm": "max_grad_norm",
}


def read_torchtune(work: Migration) -> None:
    """torchtune's recipes: `_component_` names a class in every section."""
    model, rows = work.root.get("model"), work.root.get("dataset")
    made = model.get("_component_") if model is not None else None
    kind = rows.get("_component_") if rows is not None else None
    if made is None and kind is None:
        return
    _tune_model(work, model, made)
    if rows is not None and kind is not None:
        del work.root["dataset"]
        _tune_rows(work, rows, kind)
    for key, home in _TUNE_NAMES.items():
        if key in work.root:
            work.place(work.root, home, work.root.pop(key), f"training.config.{home}")
    limit = work.root.pop("max_steps_per_epoch", None)
    if limit is not None and limit.value:
        text = "without effect: max_steps limits the whole run"
        work.notices.append(notice("warning", limit, text))
    for key in ("loss", "mixed_precision"):
        item = work.root.pop(key, None)
        if item is not None and item.value and item.get("enabled") is None:
            text = "the cross-entropy of the answer's tokens, in chunks: fused_loss"
            work.notices.append(notice("superseded", item, text))


def _tune_model(work: Migration, model: Item | None, made: Item | None) -> None:
    """The folder of the checkpointer is the base; the class says what is trained."""
    kept = work.root.pop("checkpointer", None)
    folder = kept.get("checkpoint_dir") if kept is not None else None
    if folder is not None and isinstance(folder.value, str):
        work.root.setdefault("base_model", Item(folder.value, folder.path, folder.line))
        work.notices.append(notice("read as", folder, "base_models[0].name"))
    if kept is not None:
        text = "the folder's own config.json and index say which files hold the weights"
        work.notices.append(notice("superseded", kept, text))
    if model is None or made is None:
        return
    del work.root["model"]
    word = str(made.value).rpartition(".")[2]
    fields = model.fields()
    kind = "qlora" if word.startswith("qlora_") else "lora" if word.startswith("lora_") else "full"
    if kind == "lora" and fields.pop("use_dora", Item(False)).value is True:
        kind = "dora"
    work.root.setdefault("adapter_type", Item(kind, made.path, made.line))
    work.notices.append(notice("read as", made, f"training.config.adapter_type: {kind}"))
    if kind == "full":
        return
    names = _tune_targets(fields)
    if names:
        at = fields.get("lora_attn_modules", made)
        listed = [Item(name, at.path, at.line) for name in names]
        work.root.setdefault("lora_target_modules", Item(listed, at.path, at.line))
        text = f"training.config.target_modules: {', '.join(names)}"
        work.notices.append(notice("read as", at, text))
    for key in ("lora_rank", "lora_alpha", "lora_dropout"):
        if key in fields:
            work.root.setdefault(key, fields[key])
    if fields.get("quantize_base", Item(False)).value is True:
        work.root.setdefault("adapter_type", Item("qlora", made.path, made.line))


def _tune_targets(fields: Entries) -> list[str]:
    listed = fields.get("lora_attn_modules", Item([])).plain()
    names = ["o_proj" if name == "output_proj" else str(name) for name in listed or []]
    if fields.get("apply_lora_to_mlp", Item(False)).value is True:
        names += ["gate_proj", "up_proj", "down_proj"]
    return names


def _tune_rows(work: Migration, rows: Item, kind: Item) -> None:
    fields = rows.fields()
    word = str(kind.value).rpartition(".")[2]
    dataset = work.section("training", "dataset")
    source, files = fields.pop("source", None), fields.pop("data_files", None)
    if files is not None and files.value and source is not None and source.value in ("json", "csv"):
        source = files
    hub = _TUNE_SETS.get(word)
    split = fields.pop("split", None)
    if source is not None and isinstance(source.value, str):
        work.place(dataset, "path", source, "training.dataset.path")
    elif hub is not None:
        parts = hub if split is None or split.value is None else f"{hub}::{split.value}"
        dataset.setdefault("path", Item(parts, kind.path, kind.line))
        work.notices.append(notice("read as", kind, f"training.dataset.path: {parts}"))
    else:
        what = f"{shown(kind.plain())} is a Python class, which is not run"
        fix = "name the rows: training.dataset.path, a file or a hub id"
        work.problems.append(Problem(kind.path, what, fix, kind.line))
        work.seen.add("no rows")
    _tune_columns(work, fields, dataset)
    for key, home in (("packed", "packing"), ("train_on_input", "train_on_prompt")):
        item = fields.pop(key, None)
        if item is not None and item.value is not None:
            work.place(work.root, home, item, f"training.config.{home}")
    for key, item in fields.items():
        if not re.match(r"_|conversation_style|new_system_prompt$", key) and item.value is not None:
            text = "without effect: it is an argument of a class that is not used"
            work.notices.append(notice("warning", item, text))


def _tune_columns(work: Migration, fields: Entries, dataset: Entries) -> None:
    mapping: Entries = {}
    named = fields.pop("column_map", None)
    for key, item in (named.fields() if named is not None else {}).items():
        if key in _TUNE_COLUMNS:
            mapping[_TUNE_COLUMNS[key]] = item
    column = fields.pop("conversation_column", None)
    if column is not None and column.value not in (None, "messages", "conversations"):
        mapping["messages"] = column
    text = fields.pop("column", None)
    if text is not None and text.value:
        mapping["text"] = text
    for part, item in mapping.items():
        work.notices.append(notice("read as", item, f"training.dataset.field_mapping.{part}"))
    if mapping:
        at = next(iter(mapping.values()))
        dataset.setdefault("field_mapping", Item(mapping, at.path, at.line))
