"""Converts recipes of torchtune: `_component_` names a Python class in every section."""

from __future__ import annotations

from expert.manifest.migrate.migration import (
    Entries,
    Migration,
    convert_values_to,
    take,
    with_value,
)
from expert.manifest.peers.rows import hub_path, mapping_of
from expert.manifest.text.item import Item, shown

_SETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
}
_COLUMNS = {
    **{"input": "instruction", "output": "response", "system": "system", "tools": "tools"},
    **dict.fromkeys(("messages", "conversations", "conversation_column"), "messages"),
    "column": "text",
}
_MASKS = {"train_on_all": True, "train_on_assistant": False}


def read_torchtune(work: Migration) -> None:
    root, none = work.root, Item(None)
    sections = {key: root.get(key, none) for key in ("model", "dataset", "dataset_val")}
    classes = {key: name for key, at in sections.items() if (name := at.get("_component_"))}
    if not {"model", "dataset"} & classes.keys():
        return
    folder = take(root, "checkpointer").get("checkpoint_dir") or none
    if isinstance(folder.value, str):
        root.setdefault("base_model", folder)
        work.read_as(folder, "base_models[0].name")
    length = root.get("tokenizer", none).get("max_seq_len") or none
    if length.value is not None:
        work.place(root, "max_seq_length", length, "training.config.max_seq_length")
    for key, name in classes.items():
        fields = root.pop(key).fields()
        if key == "model":
            _read_model(work, fields, name)
        elif key == "dataset":
            _read_rows(work, fields, name)
        else:
            _put_source(work, "validation_path", fields, name)
    packs = root.get("packed", none).value is True
    if packs and length.whole and root.get("batch_size", none).whole:
        work.put_batch_tokens(root.pop("batch_size"), length.whole)
    work.trainer = "torchtune"
    work.defaults = {"validation_split": 0, "max_grad_norm": 0}
    if root.get("lr_scheduler", none).value is None:
        root.pop("lr_scheduler", None)
        work.defaults |= {"lr_scheduler": "constant", "warmup_steps": 0}


def _read_model(work: Migration, fields: Entries, name: Item) -> None:
    """Convert a model class: its name gives the kind of adapter, its arguments the rest."""
    root, word = work.root, str(name.value).rpartition(".")[2]
    is_lora = word.startswith(("lora_", "qlora_"))
    kind = "dora" if take(fields, "use_dora").value is True else "lora"
    root.setdefault("adapter_type", with_value(name, kind if is_lora else "full"))
    work.read_as(name, f"training.config.adapter_type: {root['adapter_type'].value}")
    quantised = take(fields, "quantize_base")
    if quantised.value is True or word.startswith("qlora_"):
        work.convert(root, "quantization", "int4", quantised if quantised.value else name)
    modules, mlp = take(fields, "lora_attn_modules"), take(fields, "apply_lora_to_mlp")
    if not isinstance(modules.value, list | None):
        work.refuse(modules, "a list of layers")
    names = [str(layer.value).replace("output_proj", "o_proj") for layer in modules.entries()]
    names += ["gate_proj", "up_proj", "down_proj"] if mlp.value is True else []
    if names:
        at = modules if modules.entries() else mlp
        root.setdefault("target_modules", with_value(at, [with_value(at, n) for n in names]))
        work.read_as(at, f"training.config.target_modules: {', '.join(names)}")
    head = take(fields, "apply_lora_to_output")
    if head.value is True:
        work.problem(head, "the head cannot have an adapter", "write false")
    for key in ("lora_rank", "lora_alpha", "lora_dropout"):
        if key in fields:
            root.setdefault(key, fields.pop(key))
    _report_arguments(work, fields)


def _read_rows(work: Migration, fields: Entries, name: Item) -> None:
    is_alpaca = str(name.value).rpartition(".")[2].startswith("alpaca_")
    if is_alpaca and "train_on_input" not in fields and not work.is_override:
        work.root.setdefault("train_on_prompt", with_value(name, True))
        work.read_as(name, "training.config.train_on_prompt: true (torchtune's default for Alpaca)")
    _put_source(work, "path", fields, name)
    for key in ("packed", "train_on_input"):
        if key in fields:
            work.root[key] = fields.pop(key)
    mask = take(fields, "masking_strategy")
    if mask.value is not None:
        convert_values_to("train_on_prompt", _MASKS, " or ".join(_MASKS))(work, work.root, mask)
    if "new_system_prompt" in fields:
        work.root["default_system"] = fields.pop("new_system_prompt")  # refused later
    under = take(fields, "column_map").fields()
    parts = dict(_COLUMNS)
    if "instruction" in {*fields, *under}:
        parts |= {"instruction": "instruction", "input": "input"}
    columns = {part: take(zone, key) for zone in (fields, under) for key, part in parts.items()
               if key in zone}  # fmt: skip
    for key, item in mapping_of(work, columns).items():
        work.dataset.setdefault(key, item)
    _report_arguments(work, {**fields, **under})


def _put_source(work: Migration, key: str, fields: Entries, name: Item) -> None:
    """Set `key` of training.dataset to a file, or to a hub id with its split."""
    source, files, split = (take(fields, key) for key in ("source", "data_files", "split"))
    if files.value and source.value in ("json", "csv", "text", "parquet"):
        source = files.entries()[0] if len(files.entries()) == 1 else files
    hub = _SETS.get(str(name.value).rpartition(".")[2])
    if source.value is None and hub is not None:
        source = with_value(name, hub)
    place = hub_path(source, split, Item(None))
    if not isinstance(place.value, str):
        what = f"{shown(name.plain())} is a Python class, which is not run"
        work.problem(name, what, "set training.dataset.path to a file or a hub id")
        work.seen.add("no rows")
        return
    if place.path == name.path or place.value != source.value:
        work.read_as(place, f"training.dataset.{key}: {place.value}")
    work.put(f"training.dataset.{key}", place)


def _report_arguments(work: Migration, fields: Entries) -> None:
    for key, item in fields.items():
        if item.value is not None and key not in ("conversation_style", "_component_"):
            work.unused(item, "an argument of a class")
