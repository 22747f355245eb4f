"""Axolotl: its datasets, packed batches, and full training if no adapter is named."""

from __future__ import annotations

from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.data_sets import (
    MESSAGES,
    PREFERENCES,
    NamedDataset,
    check_message_key,
    map_column,
    put_rows,
    put_validation,
    roles,
    title_of,
)
from expert.manifest.peers.packed_batches import int_or_zero, put_batch_tokens
from expert.manifest.peers.unsupported_keys import report_unsupported
from expert.manifest.schema.message_names import ROLES
from expert.manifest.text.item import Item, shown

# With any of these, a file with micro_batch_size is Axolotl's.
DISTINCTIVE_KEYS = (
    *("datasets", "pretraining_dataset", "sequence_len", "sample_packing", "train_on_inputs"),
    *("val_set_size", "dataset_prepared_path", "lora_target_linear"),
)
_DEFAULT_SEQUENCE_LEN = 512
_COLUMNS = {"field_instruction": "instruction", "field_input": "input", "field_output": "response"}
_FORMATS = ("json", "jsonl", "csv", "parquet", "text", "arrow")
_TEXT_TYPES = ("completion", "pretrain", "pretraining")
_PREFERENCE_TYPES = ("bradley_terry", "stepwise_supervised", "chatml.intel", "llama3.ultra")
_MESSAGE_KEYS = {
    "message_field_role": "role",
    "message_field_content": "content",
    "message_field_training": "train",
    "message_field_training_detail": "train_detail",
    "field_thinking": "reasoning",
}
_CADENCES = {
    "evals_per_epoch": ("evaluation_strategy", "eval_steps"),
    "saves_per_epoch": ("save_strategy", "save_steps"),
}
_FORMATTED = "rows are formatted by their columns and the model's template"


def read_axolotl(work: Migration) -> None:
    _read_intervals(work)
    listed = take(work.root, "datasets")
    if "path" in listed.fields():
        listed = with_value(listed, [listed])  # one, without a dash
    if isinstance(listed.value, list) and listed.value:
        work.seen.add("rows of a list")
        sets = [_data_set(work, entry) for entry in listed.value]
        put_rows(work, [named for named in sets if named is not None])
    elif listed.value not in (None, []):
        work.root["datasets"] = listed  # not a list: metadata
    tests = take(work.root, "test_datasets")  # evaluated during training: validation rows
    if isinstance(tests.value, list):
        single = len(tests.value) == 1
        put_validation(work, tests, [_data_set(work, e) if single else None for e in tests.value])
    _read_stream(work)
    signs = [key for key in DISTINCTIVE_KEYS if key in work.root]
    if "rows of a list" in work.seen:
        signs.append("datasets")
    if work.is_expert_manifest:  # micro_batch_size is ours
        signs = []
    if len(signs) > 1:
        _total_batch(work)
    _batches(work, signs)
    if len(signs) > 1:
        _default_to_full(work)
    _read_switches(work)


def _total_batch(work: Migration) -> None:
    """Convert batch_size, in Axolotl the rows of a whole step on one GPU: it sets the accumulation,
    unless that is set itself."""
    total, rows = (work.root.get(key, Item(None)) for key in ("batch_size", "micro_batch_size"))
    if not int_or_zero(total) or not int_or_zero(rows):
        return
    del work.root["batch_size"]
    if work.root.get("gradient_accumulation_steps", Item(None)).value is not None:
        work.supersede(total, "micro_batch_size × gradient_accumulation_steps is the step there")
        return
    steps = max(1, int_or_zero(total) // int_or_zero(rows))
    work.root["gradient_accumulation_steps"] = with_value(total, steps)
    work.read_as(total, f"training.config.gradient_accumulation_steps: {steps}")


def _batches(work: Migration, signs: list[str]) -> None:
    """Convert micro_batch_size, which counts rows; with sample_packing, packed sequences, which
    become batch_tokens."""
    count = work.root.get("micro_batch_size", Item(None))
    if not signs or "batch_size" in work.root or "batch_tokens" in work.root:
        return
    if not int_or_zero(count):
        return  # the schema reports it
    packs = bool(work.root.get("sample_packing", Item(None)).value)
    places = int_or_zero(work.root.get("sequence_len", Item(_DEFAULT_SEQUENCE_LEN)))
    del work.root["micro_batch_size"]
    if not packs or "streaming" in work.dataset:
        text = "training.config.batch_size: rows per step, before gradient_accumulation_steps"
        work.root["batch_size"] = count
        work.read_as(count, text)
        if packs:
            text = "counts rows here, not packed sequences: a stream is not packed in advance"
            work.report("warning", count, text)
    elif places:
        put_batch_tokens(work, count, places)


def _default_to_full(work: Migration) -> None:
    """Without `adapter`, Axolotl trains all weights; the default here is lora."""
    named = work.root.get("adapter") or work.root.get("adapter_type")
    in_config = work.config.get("adapter_type") if work.config is not None else None
    if (named is not None and named.value) or in_config is not None:
        return
    at = named or Item(None, "adapter")
    work.root.pop("adapter", None)
    work.root["adapter_type"] = with_value(at, "full")
    text = "training.config.adapter_type: full (no adapter is named: every weight is trained)"
    work.read_as(at, text)


def _read_switches(work: Migration) -> None:
    linear = _switch(work, "lora_target_linear")
    if linear.value and not work.root.get("lora_target_modules", Item(None)).value:
        work.root["lora_target_modules"] = with_value(linear, "all-linear")
        work.read_as(linear, "training.config.target_modules: all-linear")
    elif linear.value is False and not work.root.get("lora_target_modules", Item(None)).value:
        text = "every linear layer gets an adapter, unless lora_target_modules names others"
        work.report("warning", linear, text)
    for key in ("exact_deduplication", "dataset_exact_deduplication"):
        item = _switch(work, key)
        if item.value:
            checks = work.section("training", "dataset", "validation")
            work.place(checks, "deduplicate", item, "training.dataset.validation.deduplicate")


def _switch(work: Migration, key: str) -> Item:
    item = take(work.root, key)
    if isinstance(item.value, bool | None):
        return item
    work.refuse(item, "true or false")
    return Item(None)


def _read_intervals(work: Migration) -> None:
    """Convert evals_per_epoch and saves_per_epoch; 0 is never."""
    for key, (home, steps) in _CADENCES.items():
        item = take(work.root, key)
        if item.value is None:
            continue
        if isinstance(item.value, bool) or not isinstance(item.value, int):
            work.refuse(item, "a whole number")
            continue
        how = "epoch" if item.value else "no"
        work.root.setdefault(home, with_value(item, how))
        work.read_as(item, f"training.config.{home}: {how}")
        if item.value > 1:
            text = f"once per epoch, not {item.value} times; set {steps} for shorter intervals"
            work.report("warning", item, text)


def _read_stream(work: Migration) -> None:
    """Convert pretraining_dataset: streamed plain text."""
    item = take(work.root, "pretraining_dataset")
    if not item.value:
        return
    entries = item.value if isinstance(item.value, list) else [item]
    if len(entries) > 1:
        work.problem(item, f"{len(entries)} streamed data sets", "name one of them")
        return
    work.seen.add("rows of a list")
    entry = entries[0]
    fields = entry.fields()
    column = fields.pop("text_column", None)
    fields.setdefault("type", with_value(entry, "pretrain"))
    if column is not None:
        fields["field"] = column
    named = _data_set(work, entry)
    if named is not None:
        named.more["streaming"] = with_value(item, True)
        put_rows(work, [named])


def _data_set(work: Migration, entry: Item) -> NamedDataset | None:
    if isinstance(entry.value, str):
        return NamedDataset(title_of(entry.value), entry, entry)
    if not isinstance(entry.value, dict):
        work.refuse(entry, "an object with a path")
        return None
    fields = dict(entry.value)
    named = NamedDataset("rows", entry)
    _read_location(work, fields, named)
    _read_type(work, fields, named)
    _read_columns(work, fields, named)
    _check_messages(work, fields)
    for key in ("field_mapping", "max_samples"):
        if key in fields:
            named.more[key] = fields.pop(key)
    report_unsupported(work, fields)
    for key, item in fields.items():
        if not key.startswith("_") and item.value not in (None, False, ""):
            work.without_effect(item, "Expert has no such dataset key")
    return named


def _read_location(work: Migration, fields: Entries, named: NamedDataset) -> None:
    """Path, split, configuration and format."""
    path, files = fields.pop("path", None), take(fields, "data_files")
    kind = take(fields, "ds_type")
    if files.value:
        listed = files.value if isinstance(files.value, list) else [files]
        if path is not None and path.value in _FORMATS:
            kind, path = path, None
        if len(listed) > 1 or path is not None:
            what = "selects files of a data set" if path is not None else "several files"
            fix = "name one file, or a folder with nothing else in it, as path"
            work.problem(files, what, fix)
        else:
            path = listed[0]
    named.path = path
    if path is not None and isinstance(path.value, str):
        named.name = title_of(path.value)
    if path is None:
        work.problem(named.item, "has no path", "add path")
        work.seen.add("no rows")
    splits = [take(fields, key) for key in ("split", "train_on_split")]
    named.split = next((split for split in splits if split.value is not None), None)
    subset = take(fields, "name")
    named.subset = subset if subset.value is not None else None
    if kind.value in _FORMATS:
        named.more["format"] = kind
    shards = take(fields, "shards")
    if shards.value not in (None, 0, 1):
        what = f"selects one of {shown(shards.plain())} shards"
        work.problem(shards, what, "training.dataset.max_samples takes the first N rows")
    for key in ("shards_idx", "preprocess_shards", "trust_remote_code"):
        fields.pop(key, None)
    revision = take(fields, "revision")
    if revision.value:
        work.without_effect(revision, "the latest version on the hub is read")


def _read_type(work: Migration, fields: Entries, named: NamedDataset) -> None:
    """Convert `type`, as far as columns and template do not decide: plain text, refused formats."""
    kind, column = fields.get("type"), take(fields, "field")
    if kind is None or isinstance(kind.value, dict):
        return
    del fields["type"]
    word = str(kind.value)
    if word in _TEXT_TYPES:
        named.mapping["text"] = column if column.value else with_value(kind, "text")
    elif word.startswith(_PREFERENCE_TYPES) and "another method" not in work.seen:
        work.problem(kind, f"{word}: {PREFERENCES[0]}", PREFERENCES[1])
    elif word == "input_output":
        fix = 'use messages; a message with "weight": 0 is not trained on'
        work.problem(kind, "input_output: segments with their own labels", fix)
    elif kind.value is not None:
        work.supersede(kind, _FORMATTED)


def _read_columns(work: Migration, fields: Entries, named: NamedDataset) -> None:
    """Convert the column names of an entry, or of its `type`."""
    under = take(fields, "type").fields()
    for key, part in _COLUMNS.items():
        for zone in (under, fields):
            item = take(zone, key)
            if item.value is not None:
                named.mapping[part] = item
    for key in ("format", "no_input_format", "system_prompt", "system_format", "no_input_prompt"):
        item = take(under, key)
        if item.value and item.value != "{system}":
            work.without_effect(item, "base_models[0].prompt_template formats the rows")
    for zone in (under, fields):
        for part in ("system", "tools"):
            map_column(named, part, take(zone, f"field_{part}"))
    messages = take(fields, "field_messages")
    if messages.value not in (None, *MESSAGES):
        named.mapping["messages"] = messages


def _check_messages(work: Migration, fields: Entries) -> None:
    """Check the names of keys and roles in conversations."""
    for part, item in take(fields, "message_property_mappings").fields().items():
        check_message_key(work, part, item)
    for key, part in _MESSAGE_KEYS.items():
        check_message_key(work, part, take(fields, key))
    for role, names in take(fields, "roles").fields().items():
        roles(work, names.value if isinstance(names.value, list) else [names], role)
    trained = take(fields, "roles_to_train")
    speakers = trained.value if isinstance(trained.value, list) else [trained]
    if any(ROLES.get(str(name.value)) != "assistant" for name in speakers if name.value):
        what = f"got {shown(trained.plain())}, but only answers are trained on"
        fix = "write [assistant]; training.config.train_on_prompt: true trains on everything"
        work.problem(trained, what, fix)
    elif trained.value == []:
        text = "answers without a train flag are trained on here"
        work.report("warning", trained, text)
    dropped = take(fields, "drop_system_message")
    if dropped.value:
        text = "system messages are kept; remove them from the rows"
        work.without_effect(dropped, text)
    for key in ("conversation", "chat_template"):
        template = take(fields, key)
        if template.value:
            work.supersede(template, _FORMATTED)
    for key in ("field_chosen", "field_rejected"):
        preference = take(fields, key)
        if preference.value and "another method" not in work.seen:
            work.problem(preference, *PREFERENCES)
