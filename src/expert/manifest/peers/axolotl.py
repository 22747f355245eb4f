"""Axolotl: its datasets, packed batches, and full training if no adapter is named."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.preferences import ROW_KEYS, ROW_TYPES, refuse_rows
from expert.manifest.peers.rows import hub_path, mapping_of, put_rows
from expert.manifest.peers.unused import report_unused
from expert.manifest.schema.message_names import ROLES
from expert.manifest.text.item import Item, shown

# With any of these, a file with micro_batch_size is Axolotl's.
_DISTINCTIVE_KEYS = (
    *("datasets", "pretraining_dataset", "sequence_len", "sample_packing", "train_on_inputs"),
    *("val_set_size", "dataset_prepared_path", "lora_target_linear"),
)
_DEFAULT_SEQUENCE_LEN = 512
_COLUMNS = {
    **{"field_instruction": "instruction", "field_input": "input", "field_output": "response"},
    **{"field_system": "system", "field_tools": "tools", "field_messages": "messages"},
}
_FORMATS = ("json", "jsonl", "csv", "parquet", "text", "arrow")
_TEXT_TYPES = ("completion", "pretrain", "pretraining")
_CADENCES = {"evals_per_epoch": "evaluation_strategy", "saves_per_epoch": "save_strategy"}
# Of an entry of `datasets`: what changes nothing.
_SILENT = ("shards_idx", "preprocess_shards", "trust_remote_code")


def read_axolotl(work: Migration) -> None:
    root, none = work.root, Item(None)
    for key, home in _CADENCES.items():
        item = take(root, key)
        if item.value is not None and type(item.value) is not int:
            work.refuse(item, "a whole number")
        elif item.value is not None:
            work.convert(root, home, "epoch" if item.value else "no", item)
            if item.whole > 1:
                work.report("warning", item, f"once per epoch, not {item.value} times")
    signs = [key for key in _DISTINCTIVE_KEYS if key in root]
    _read_rows(work)
    if not work.is_expert_manifest:  # micro_batch_size is ours
        if signs:
            _batches(work, is_certain=len(signs) > 1)
            work.trainer = "Axolotl" if len(signs) > 1 else work.trainer
            work.defaults |= {"validation_split": 0, "epochs": 1} if len(signs) > 1 else {}
        named = root.get("adapter") or root.get("adapter_type") or Item(None, "adapter")
        if len(signs) > 1 and not named.value:
            root.pop("adapter", None)
            root["adapter_type"] = with_value(named, "full")
            work.read_as(named, "training.config.adapter_type: full (no adapter is named)")
    linear = take(root, "lora_target_linear")
    if linear.value is True and not root.get("lora_target_modules", none).value:
        work.convert(root, "target_modules", "all-linear", linear)
    elif linear.value not in (None, True, False):
        work.refuse(linear, "true or false")
    for key in ("exact_deduplication", "dataset_exact_deduplication"):
        item = take(root, key)
        if item.value:
            work.put("training.dataset.validation.deduplicate", item)


def _read_rows(work: Migration) -> None:
    """Convert datasets, test_datasets and pretraining_dataset, which is streamed plain text."""
    listed = take(work.root, "datasets")
    if "path" in listed.fields():
        listed = with_value(listed, [listed])  # one, without a dash
    if listed.entries():
        put_rows(work, listed, [_data_set(work, entry) for entry in listed.entries()])
    elif listed.value not in (None, []):
        work.root["datasets"] = listed  # not a list: metadata
    tests = take(work.root, "test_datasets").entries()  # evaluated during training: validation
    if len(tests) > 1:
        work.problem(tests[0], f"{len(tests)} sets of validation rows", "keep one of them")
    elif tests and (path := _data_set(work, tests[0]).get("path")):
        work.put("training.dataset.validation_path", path)
    item = take(work.root, "pretraining_dataset")
    entries = item.entries() or ([item] if item.value else [])
    if len(entries) > 1:
        work.problem(item, f"{len(entries)} streamed data sets", "name one of them")
    elif entries:
        fields = entries[0].fields()
        fields.setdefault("type", with_value(entries[0], "pretrain"))
        if "text_column" in fields:
            fields["field"] = fields.pop("text_column")
        put_rows(work, item, [{**_data_set(work, entries[0]), "streaming": with_value(item, True)}])


def _batches(work: Migration, *, is_certain: bool) -> None:
    """Convert micro_batch_size, which counts rows; with sample_packing, packed sequences, which
    become batch_tokens. batch_size is the rows of a whole step there: it sets the accumulation,
    unless that is set itself."""
    root, none = work.root, Item(None)
    count, total = (root.get(key, none) for key in ("micro_batch_size", "batch_size"))
    if is_certain and total.whole and count.whole:
        del root["batch_size"]
        if root.get("gradient_accumulation_steps", none).value is not None:
            work.unused(total, "micro_batch_size × gradient_accumulation_steps decides there")
        else:
            steps = max(1, total.whole // count.whole)
            work.convert(root, "gradient_accumulation_steps", steps, total)
    if not count.whole or {"batch_size", "batch_tokens"} & root.keys():
        return  # the schema reports what is not a number
    del root["micro_batch_size"]
    length = root.get("sequence_len", Item(_DEFAULT_SEQUENCE_LEN)).whole
    packs = bool(root.get("sample_packing", none).value)
    if packs and length and "streaming" not in work.dataset:
        work.put_batch_tokens(count, length)
        return
    root["batch_size"] = count
    work.read_as(count, "training.config.batch_size")
    if packs:
        work.report("warning", count, "a stream is not packed in advance: it counts rows here")


def _data_set(work: Migration, entry: Item) -> Entries:
    """An entry of `datasets` as keys of training.dataset."""
    if isinstance(entry.value, str):
        return {"path": entry}
    if not isinstance(entry.value, dict):
        work.refuse(entry, "an object with a path")
        work.seen.add("no rows")
        return {}
    fields = dict(entry.value)
    found = _location(work, fields, entry)
    under = fields["type"].fields() if "type" in fields else {}
    columns = {part: take(under if key in under else fields, key) for key, part in _COLUMNS.items()}
    kind, column = fields.get("type", Item(None)), take(fields, "field")
    word = str(kind.value)
    if word in _TEXT_TYPES:
        columns["text"] = column if column.value else with_value(kind, "text")
    elif column.value:
        work.unused(column)
    if word in _TEXT_TYPES or isinstance(kind.value, dict):
        del fields["type"]
    elif word == "input_output":
        fix = 'use messages; a message with "weight": 0 is not trained on'
        work.problem(kind, "input_output: segments with their own labels", fix)
    elif word.startswith(ROW_TYPES):
        refuse_rows(work, kind)
    for item in under.values():
        if item.value and item.value != "{system}":
            work.unused(item, "prompt_template formats the rows")
    found |= mapping_of(work, columns)
    _check_training(work, fields)
    found |= {key: fields.pop(key) for key in ("field_mapping", "max_samples") if key in fields}
    report_unused(work, fields)
    for key, item in fields.items():
        if key not in _SILENT and item.value not in (None, False, ""):
            reason = "columns and the template format rows" if key == "type" else ""
            work.unused(item, reason)
    return found


def _location(work: Migration, fields: Entries, entry: Item) -> Entries:
    """The path with split and configuration, and the format."""
    path, files = fields.pop("path", None), take(fields, "data_files")
    kind = take(fields, "ds_type")
    if files.value:
        listed = files.entries() or [files]
        if path is not None and path.value in _FORMATS:
            kind, path = path, None
        if len(listed) > 1 or path is not None:
            what = "selects files of a data set" if path is not None else "several files"
            fix = "name one file, or a folder with nothing else in it, as path"
            work.problem(files, what, fix)
        else:
            path = listed[0]
    if path is None:
        work.problem(entry, "has no path", "add path")
        work.seen.add("no rows")
        return {}
    split, split_too = (take(fields, key) for key in ("split", "train_on_split"))
    split, subset = split if split.value is not None else split_too, take(fields, "name")
    source = hub_path(path, split, subset)
    part = split if split.value is not None else subset
    if part.value is not None:
        work.read_as(part, f"path: {source.value}")
    shards = take(fields, "shards")
    if shards.value not in (None, 0, 1):
        fix = "training.dataset.max_samples takes the first N rows"
        work.problem(shards, f"selects one of {shown(shards.plain())} shards", fix)
    return {"path": source, **({"format": kind} if kind.value in _FORMATS else {})}


def _check_training(work: Migration, fields: Entries) -> None:
    """Refuse what trains on anything but answers."""
    trained = take(fields, "roles_to_train")
    speakers = trained.entries() or [trained]
    if any(ROLES.get(str(name.value)) != "assistant" for name in speakers if name.value):
        what = f"got {shown(trained.plain())}, but only answers are trained on"
        fix = "write [assistant]; training.config.train_on_prompt: true trains on everything"
        work.problem(trained, what, fix)
    elif trained.value == []:
        work.report("warning", trained, "answers without a train flag are trained on here")
    for key in ROW_KEYS:
        preference = take(fields, key)
        if preference.value:
            refuse_rows(work, preference)
