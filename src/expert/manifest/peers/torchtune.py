"""Converts recipes of torchtune: `_component_` names a Python class in every section."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.rows import NamedDataset
from expert.manifest.text.item import Item, is_comment, shown

_SETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "samsum_dataset": "Samsung/samsum",
    "grammar_dataset": "liweili/c4_200m",
    "cnn_dailymail_articles_dataset": "abisee/cnn_dailymail",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}
_COLUMNS = {
    **{"input": "instruction", "output": "response", "system": "system", "tools": "tools"},
    **dict.fromkeys(("messages", "conversations"), "messages"),
}
_ALPACA_COLUMNS = {**_COLUMNS, "instruction": "instruction", "input": "input"}
_MASKS = {"train_on_all": True, "train_on_assistant": False}
_NAMES = {
    "enable_activation_checkpointing": "gradient_checkpointing",
    "log_every_n_steps": "logging_steps",
    "clip_grad_norm": "max_grad_norm",
    "run_val_every_n_steps": "eval_steps",
    "save_every_n_steps": "save_steps",
    "batch_size_val": "eval_batch_size",
}
_NOT_USED = {
    "loss": "the loss is the answers' cross-entropy",
    "mixed_precision": "dtype decides",
    "max_steps_per_epoch": "max_steps limits the whole run",
}


def read_torchtune(work: Migration) -> None:
    root = work.root
    model, rows = (root.get(key, Item(None)) for key in ("model", "dataset"))
    model_class, rows_class = model.get("_component_"), rows.get("_component_")
    if model_class is None and rows_class is None:
        return
    checkpointer = take(root, "checkpointer")
    folder = checkpointer.get("checkpoint_dir") or Item(None)
    if isinstance(folder.value, str):
        root.setdefault("base_model", folder)
        work.read_as(folder, "base_models[0].name")
    length = root.get("tokenizer", Item(None)).get("max_seq_len") or Item(None)
    if length.value is not None:
        work.place(root, "max_seq_length", length, "training.config.max_seq_length")
    if model_class is not None:
        del root["model"]
        _read_model(work, model.fields(), model_class)
    if rows_class is not None:
        del root["dataset"]
        _read_rows(work, rows.fields(), rows_class)
    validation = root.get("dataset_val", Item(None))
    if (rows_class := validation.get("_component_")) is not None:
        del root["dataset_val"]
        _put_source(work, "validation_path", validation.fields(), rows_class)
    packs = root.get("packing", Item(None)).value is True
    if packs and length.whole and root.get("batch_size", Item(None)).whole:
        work.put_batch_tokens(root.pop("batch_size"), length.whole)
    if "clip_grad_norm" not in root:
        work.put_default("max_grad_norm", 0, "torchtune")
    for key in [key for key in _NAMES if key in root]:
        work.place(root, _NAMES[key], root.pop(key), f"training.config.{_NAMES[key]}")
    if root.get("lr_scheduler", Item(None)).value is None:
        root.pop("lr_scheduler", None)
        work.put_default("lr_scheduler", "constant", "torchtune")
        if "warmup_ratio" not in root:
            work.put_default("warmup_steps", 0, "torchtune")
    for key, reason in _NOT_USED.items():
        item = take(root, key)
        if item.value:
            work.unused(item, reason)


def _read_model(work: Migration, fields: Entries, name: Item) -> None:
    """Convert a model class: its name gives the kind of adapter, its arguments the rest."""
    word = str(name.value).rpartition(".")[2]
    kind = "qlora" if word.startswith("qlora_") else "lora" if word.startswith("lora_") else "full"
    del fields["_component_"]
    if kind != "full":
        quantises = take(fields, "quantize_base").value is True or kind == "qlora"
        kind = "qlora" if quantises else "lora"
        if take(fields, "use_dora").value is True:
            kind = "dora"
            if quantises:
                work.root.setdefault("quantization", with_value(name, "int4"))
        modules, mlp = take(fields, "lora_attn_modules"), take(fields, "apply_lora_to_mlp")
        if not isinstance(modules.value, list | None):
            work.refuse(modules, "a list of layers")
        names = [str(layer.value) for layer in modules.entries()]
        names = ["o_proj" if layer == "output_proj" else layer for layer in names]
        names += ["gate_proj", "up_proj", "down_proj"] if mlp.value is True else []
        if names:
            at = modules if modules.entries() else mlp
            listed = with_value(at, [with_value(at, layer) for layer in names])
            work.root.setdefault("lora_target_modules", listed)
            work.read_as(at, f"training.config.target_modules: {', '.join(names)}")
        head = take(fields, "apply_lora_to_output")
        if head.value is True:
            work.problem(head, "the head cannot have an adapter", "write false")
        for key in ("lora_rank", "lora_alpha", "lora_dropout"):
            if key in fields:
                work.root.setdefault(key, fields.pop(key))
    work.root.setdefault("adapter_type", with_value(name, kind))
    work.read_as(name, f"training.config.adapter_type: {kind}")
    _report_arguments(work, fields)


def _read_rows(work: Migration, fields: Entries, kind: Item) -> None:
    is_alpaca = str(kind.value).rpartition(".")[2].startswith("alpaca_")
    if is_alpaca and "train_on_input" not in fields and not work.is_override:
        work.root.setdefault("train_on_prompt", with_value(kind, True))
        work.read_as(kind, "training.config.train_on_prompt: true (torchtune's default for Alpaca)")
    _put_source(work, "path", fields, kind)
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
        work.root["default_system"] = system  # refused later
    columns = take(fields, "column_map").fields()
    parts = _ALPACA_COLUMNS if "instruction" in columns else _COLUMNS
    named = NamedDataset("rows", kind)
    for key in [key for key in columns if key in parts]:
        named.mapping[parts[key]] = columns.pop(key)
    _report_arguments(work, columns)
    named.map_column("messages", take(fields, "conversation_column"))
    named.map_column("text", take(fields, "column"))
    for part, item in named.mapping.items():
        work.read_as(item, f"training.dataset.field_mapping.{part}")
    if named.mapping:
        at = next(iter(named.mapping.values()))
        work.dataset.setdefault("field_mapping", with_value(at, named.mapping))
    fields.pop("conversation_style", None)
    _report_arguments(work, fields)


def _put_source(work: Migration, key: str, fields: Entries, kind: Item) -> None:
    """Set `key` of training.dataset to a file, or to a hub id with its split."""
    source, files, split = (take(fields, name) for name in ("source", "data_files", "split"))
    if files.value and source.value in ("json", "csv", "text", "parquet"):
        source = files.entries()[0] if len(files.entries()) == 1 else files
    hub = _SETS.get(str(kind.value).rpartition(".")[2])
    if source.value is None and hub is not None:
        source = with_value(kind, hub)
    place = NamedDataset("rows", kind, source, split).source
    if place is None or not isinstance(place.value, str):
        what = f"{shown(kind.plain())} is a Python class, which is not run"
        work.problem(kind, what, "set training.dataset.path to a file or a hub id")
        work.seen.add("no rows")
        return
    if place.path == kind.path or place.value != source.value:
        work.read_as(place, f"training.dataset.{key}: {place.value}")
    work.place_in_dataset(key, place)


def _report_arguments(work: Migration, fields: Entries) -> None:
    for key, item in fields.items():
        if item.value is not None and not is_comment(key):
            work.unused(item, "an argument of a class")
