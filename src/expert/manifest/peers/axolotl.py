"""Axolotl: its datasets, packed batches, and full training if no adapter is named."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.rows import (
    PREFERENCES,
    NamedDataset,
    put_rows,
    put_validation,
    title_of,
)
from expert.manifest.peers.unused import report_unused
from expert.manifest.schema.message_names import ROLES
from expert.manifest.text.item import Item, is_comment, shown

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
_PREFERENCE_TYPES = ("bradley_terry", "stepwise_supervised", "chatml.intel", "llama3.ultra")
_CADENCES = {"evals_per_epoch": "evaluation_strategy", "saves_per_epoch": "save_strategy"}
_NOT_USED = {
    **dict.fromkeys(("type", "conversation", "chat_template"), "columns and template format rows"),
    "drop_system_message": "system messages are kept",
    **dict.fromkeys(
        (
            *("message_property_mappings", "message_field_role", "message_field_content", "roles"),
            *("message_field_training", "message_field_training_detail", "field_thinking"),
        ),
        "the usual names of roles are read",
    ),
    "revision": "the latest version on the hub is read",
}


def read_axolotl(work: Migration) -> None:
    for key, home in _CADENCES.items():
        item = take(work.root, key)
        if item.value is not None and type(item.value) is not int:
            work.refuse(item, "a whole number")
        elif item.value is not None:
            work.convert(work.root, home, "epoch" if item.value else "no", item)
            if item.whole > 1:
                work.report("warning", item, f"once per epoch, not {item.value} times")
    _read_rows(work)
    signs = [key for key in _DISTINCTIVE_KEYS if key in work.root]
    signs += ["datasets"] if "rows of a list" in work.seen else []
    if signs and not work.is_expert_manifest:  # micro_batch_size is ours
        _batches(work, is_certain=len(signs) > 1)
    if len(signs) > 1 and not work.is_expert_manifest:
        _default_to_full(work)
    linear, modules = take(work.root, "lora_target_linear"), work.root.get("lora_target_modules")
    if linear.value is True and not (modules and modules.value):
        work.convert(work.root, "target_modules", "all-linear", linear)
    elif linear.value not in (None, True, False):
        work.refuse(linear, "true or false")
    for key in ("exact_deduplication", "dataset_exact_deduplication"):
        item = take(work.root, key)
        if item.value:
            checks = work.section("training", "dataset", "validation")
            work.place(checks, "deduplicate", item, "training.dataset.validation.deduplicate")


def _read_rows(work: Migration) -> None:
    """Convert datasets, test_datasets and pretraining_dataset, which is streamed plain text."""
    listed = take(work.root, "datasets")
    if "path" in listed.fields():
        listed = with_value(listed, [listed])  # one, without a dash
    if listed.entries():
        work.seen.add("rows of a list")
        sets = [_data_set(work, entry) for entry in listed.entries()]
        put_rows(work, [named for named in sets if named is not None])
    elif listed.value not in (None, []):
        work.root["datasets"] = listed  # not a list: metadata
    tests = take(work.root, "test_datasets").entries()  # evaluated during training: validation
    if tests:
        is_one = len(tests) == 1
        put_validation(work, tests[0], [_data_set(work, e) if is_one else None for e in tests])
    item = take(work.root, "pretraining_dataset")
    entries = item.entries() or ([item] if item.value else [])
    if len(entries) > 1:
        work.problem(item, f"{len(entries)} streamed data sets", "name one of them")
    elif entries:
        work.seen.add("rows of a list")
        fields = entries[0].fields()
        fields.setdefault("type", with_value(entries[0], "pretrain"))
        if "text_column" in fields:
            fields["field"] = fields.pop("text_column")
        named = _data_set(work, entries[0])
        if named is not None:
            named.more["streaming"] = with_value(item, True)
            put_rows(work, [named])


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


def _default_to_full(work: Migration) -> None:
    """Without `adapter`, Axolotl trains all weights; the default here is lora."""
    named = work.root.get("adapter") or work.root.get("adapter_type") or Item(None, "adapter")
    if not named.value:
        work.root.pop("adapter", None)
        work.root["adapter_type"] = with_value(named, "full")
        work.read_as(named, "training.config.adapter_type: full (no adapter is named)")


def _data_set(work: Migration, entry: Item) -> NamedDataset | None:
    if isinstance(entry.value, str):
        return NamedDataset(title_of(entry.value), entry, entry)
    if not isinstance(entry.value, dict):
        work.refuse(entry, "an object with a path")
        return None
    fields = dict(entry.value)
    named = NamedDataset("rows", entry)
    _read_location(work, fields, named)
    _read_columns(work, fields, named)
    _check_training(work, fields)
    for key in ("field_mapping", "max_samples"):
        if key in fields:
            named.more[key] = fields.pop(key)
    for key in [key for key in fields if key in _NOT_USED]:
        item = fields.pop(key)
        if item.value:
            work.unused(item, _NOT_USED[key])
    report_unused(work, fields)
    for key, item in fields.items():
        if not is_comment(key) and item.value not in (None, False, ""):
            work.unused(item)
    return named


def _read_location(work: Migration, fields: Entries, named: NamedDataset) -> None:
    """Path, split, configuration and format."""
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
    named.path = path
    if path is None:
        work.problem(named.item, "has no path", "add path")
        work.seen.add("no rows")
    elif isinstance(path.value, str):
        named.name = title_of(path.value)
    splits = [take(fields, key) for key in ("split", "train_on_split")]
    named.split = next((split for split in splits if split.value is not None), Item(None))
    named.subset = take(fields, "name")
    if kind.value in _FORMATS:
        named.more["format"] = kind
    shards = take(fields, "shards")
    if shards.value not in (None, 0, 1):
        fix = "training.dataset.max_samples takes the first N rows"
        work.problem(shards, f"selects one of {shown(shards.plain())} shards", fix)
    for key in ("shards_idx", "preprocess_shards", "trust_remote_code"):
        fields.pop(key, None)


def _read_columns(work: Migration, fields: Entries, named: NamedDataset) -> None:
    """Convert `type` and the column names of an entry, or of its `type`."""
    kind, column = fields.get("type", Item(None)), take(fields, "field")
    word = str(kind.value)
    under = kind.fields()
    if under:
        del fields["type"]
    elif word in _TEXT_TYPES:
        del fields["type"]
        named.mapping["text"] = column if column.value else with_value(kind, "text")
    elif word.startswith(_PREFERENCE_TYPES) and "another method" not in work.seen:
        del fields["type"]
        work.problem(kind, f"{word}: {PREFERENCES[0]}", PREFERENCES[1])
    elif word == "input_output":
        del fields["type"]
        fix = 'use messages; a message with "weight": 0 is not trained on'
        work.problem(kind, "input_output: segments with their own labels", fix)
    for zone in (under, fields):
        for key, part in _COLUMNS.items():
            named.map_column(part, take(zone, key))
    for item in under.values():
        if item.value and item.value != "{system}":
            work.unused(item, "prompt_template formats the rows")


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
    for key in ("field_chosen", "field_rejected"):
        preference = take(fields, key)
        if preference.value and "another method" not in work.seen:
            work.problem(preference, *PREFERENCES)
