"""Converts any layout to the 2.0 layout, with a notice for each moved key."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from expert.manifest.migrate import aliases
from expert.manifest.migrate.aliases import CONFIG_ALIASES, CONFIG_KEYS, SPECIAL_NAMES
from expert.manifest.migrate.migration import Entries, Migration, with_value
from expert.manifest.peers.arguments import read_arguments
from expert.manifest.peers.axolotl import read_axolotl
from expert.manifest.peers.keys import SPECIAL, convert_keys
from expert.manifest.peers.sections import move_loader_keys, open_sections, read_python_lines
from expert.manifest.peers.torchtune import read_torchtune
from expert.manifest.peers.unused import report_unused
from expert.manifest.schema.dataset import Decoding
from expert.manifest.schema.kinds import PREFERENCES, AdapterType
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec, CharGptShape
from expert.manifest.text.item import Item, Notice

CHARACTER_CONFIG: dict[str, str | int] = {
    "adapter_type": "full",
    "epochs": 25,
    "save_every_epochs": 5,
}
"""What the character GPT is trained with if a manifest does not say; every checkpoint is kept."""
_INSTEAD = {"epochs": ("max_steps",), "save_every_epochs": ("save_steps", "save_strategy")}
"""Keys that make one of these meaningless."""
# Keys whose null means "not set"; for other keys the schema decides.
_MAY_BE_NULL = (
    *("schema_version", "name", "base_model", "base_models", "model", "adapters"),
    *("training", "dataset", "data", "config"),
)


def migrate(root: Item, folder: Path = Path(), *, is_override: bool = False) -> Migration:
    """Move every key under `root` to its 2.0 place."""
    work = Migration(root.fields(), folder, is_override=is_override)
    for zone in (work.root, work.section("training")):
        for key in _MAY_BE_NULL:
            if key in zone and zone[key].value is None:
                del zone[key]
    _move_config(work)
    _read_other_trainers(work)
    # 1.0: `base_model` and root `adapters` become the only entry of `base_models`.
    single, several = work.root.pop("base_model", None), work.root.get("base_models")
    if single is not None and several is not None:
        fix = "keep base_models and move this model into it"
        work.problem(single, "given together with base_models", fix)
    elif single is not None:
        single = with_value(single, {"name": single}) if isinstance(single.value, str) else single
        work.root["base_models"] = with_value(single, [single])
        adapters = work.root.pop("adapters", None)
        if adapters is not None and "adapters" in single.fields():
            work.put("base_models[0].adapters", adapters)
        elif adapters is not None:
            single.fields()["adapters"] = adapters
    elif several is not None and isinstance(several.value, list):
        for position, entry in enumerate(several.value):
            if isinstance(entry.value, str):
                several.value[position] = with_value(entry, {"name": entry})
    _move_dataset(work)
    _move_model_section(work)
    # Settings such as `device` at the top level belong in training.config.
    for zone in (work.root, work.section("training")):
        _move_loose_keys(work, zone)
    _move_loose_keys(work, work.section("training", "config"))
    # False values last: `load_in_8bit: false` beside `load_in_4bit: true` changes nothing.
    for convert, item in sorted(work.later, key=lambda pair: pair[1].value is False):
        convert(work, item)
    _drop_empty_sections(work)
    return work


def _move_config(work: Migration) -> None:
    """Move a `config` or `decoding` with settings that is beside `training` instead of in it."""
    for section, is_setting in (
        ("config", lambda key: aliases.canonical_path(key) or key in SPECIAL_NAMES),
        ("decoding", Decoding.model_fields.__contains__),
    ):
        item = work.root.get(section, Item(None))
        is_missing = not work.section("training").get(section)
        if is_missing and any(is_setting(key) for key in item.fields()):
            del work.root[section]
            for key, entry in item.fields().items():
                is_alias = section == "config" and not isinstance(entry.value, dict)
                name = CONFIG_ALIASES.get(key, key) if is_alias else key
                work.put(f"training.{section}.{name}", entry)


def _read_other_trainers(work: Migration) -> None:
    """Convert keys of Axolotl, LLaMA-Factory, torchtune, TRL and Unsloth."""
    read_python_lines(work)
    read_torchtune(work)
    model, config = work.root.get("model"), work.config
    zones = [work.root, work.section("training")]
    zones += [config.fields()] if config is not None else []
    for zone in zones:
        if zone is not work.root or not work.is_expert_manifest:
            open_sections(work, zone)
    read_arguments(work)
    read_axolotl(work)
    for zone in [*zones, model.fields()] if model is not None else zones:
        convert_keys(work, zone)
        # `bias` under `model` belongs to the character model, not to an adapter.
        report_unused(work, zone, keep="bias" if model and zone is model.value else "")
    work.put_defaults()


def complete_layout(work: Migration) -> None:
    """Add the default model and adapter kind, and set the version of the layout."""
    _default_to_char_model(work)
    # What a method that trains on preferences is trained with if the manifest does not say.
    config = work.section("training", "config")
    method = config.get("method", Item(None))
    if kind := PREFERENCES.get(str(method.value)):
        rows = work.section("training", "dataset")
        if rows:  # otherwise there are no rows at all, which is reported
            rows.setdefault("preference_rows", with_value(method, kind.rows))
        config.setdefault("epochs", Item(1))
    _default_to_released_adapter(work)
    version = work.root.get("schema_version")
    if version is not None and str(version.plain()) not in {"1.0", "2.0", "1", "2"}:
        work.report("warning", version, f"unknown version {version.plain()!r}: read by its layout")
    work.root["schema_version"] = with_value(version or Item(None, "schema_version"), "2.0")
    _drop_empty_sections(work)


def _move_dataset(work: Migration) -> None:
    """Move `dataset` or `data` to training.dataset; a plain path becomes an object."""
    training = work.section("training")
    if "dataset" in training:
        training["dataset"] = _as_dataset(work, training["dataset"])
    for zone, key in ((work.root, "dataset"), (work.root, "data"), (training, "data")):
        if key not in zone:
            continue
        item = zone.pop(key)
        report_unused(work, item.fields())
        item = _as_dataset(work, item)
        if not isinstance(item.value, dict):
            work.place(training, "dataset", item, "training.dataset")
            continue
        target = training.setdefault("dataset", Item({}, item.path, item.line)).fields()
        for name, entry in item.value.items():
            if name in aliases.DATASET_KEYS:
                work.put(f"training.dataset.{name}", entry)
            else:
                target.setdefault(name, entry)  # metadata, reported later


def _as_dataset(work: Migration, item: Item) -> Item:
    """A path becomes an object with a path; keys get their names here."""
    if isinstance(item.value, str):
        return with_value(item, {"path": item})
    entries = item.fields()
    move_loader_keys(work, entries)
    others = [key for key in entries if key in aliases.DATASET_ALIASES]
    for name in sorted(others, key=lambda key: key == "name"):
        if name in aliases.DATASET_KEYS or (name == "name" and {"path", "tasks"} & entries.keys()):
            continue  # with a path, `name` is a title
        home = aliases.DATASET_ALIASES[name]
        work.place(entries, home, entries.pop(name), f"training.dataset.{home}")
    if isinstance(entries.get("validation", Item(None)).value, str):
        # A file of rows. Here the key says which rows to drop.
        rows = entries.pop("validation")
        work.place(entries, "validation_path", rows, "training.dataset.validation_path")
    return item


def _move_model_section(work: Migration) -> None:
    """`model`: a name, the shape of a character model, or settings of a model."""
    if "model" not in work.root:
        return
    item = work.root.pop("model")
    if isinstance(item.value, str):
        work.put("base_models[0].name", item)
        return
    if not isinstance(item.value, dict):
        work.refuse(item, "a name or an object", "write base_model: NAME")
        work.first_base_model.setdefault("name", item)
        return
    names = item.value
    kind = names.pop("name", None) or names.pop("type", None) or names.pop("base_model", None)
    if kind is not None:
        work.put("base_models[0].name", kind)
    is_char_model = kind is None or kind.value == CHAR_GPT
    is_char_model &= not {*aliases.MODEL_NAMES} & {*names}
    shape_keys = [key for key in names if key in aliases.SHAPE_ALIASES] if is_char_model else []
    if shape_keys:
        shape = work.first_base_model.setdefault("architecture", Item({}, item.path, item.line))
        for key in shape_keys:
            home = aliases.SHAPE_ALIASES[key]
            full_home = f"base_models[0].architecture.{home}"
            work.place(shape.fields(), home, names.pop(key), full_home)
    if "vocab_size" in names:
        work.unused(names.pop("vocab_size"), "the vocabulary is taken from the data")
    _move_loose_keys(work, names)
    for key in [key for key in names if key in BaseModelSpec.model_fields]:
        work.put(f"base_models[0].{key}", names.pop(key))
    known = CharGptShape.model_fields if is_char_model else BaseModelSpec.model_fields
    for entry in names.values():
        work.problem(entry, "unknown key", f"a model has {', '.join(known)}")


def _move_loose_keys(work: Migration, zone: Entries) -> None:
    """Move keys of training.config, the dataset and the model that are outside their section."""
    is_config = zone is work.section("training", "config")
    for key in list(zone):
        home = aliases.canonical_path(key)
        if key in SPECIAL_NAMES:
            work.later.append((SPECIAL[key], zone.pop(key)))
        elif home is not None and not (is_config and key in CONFIG_KEYS):
            work.put(home, zone.pop(key))
        elif key in aliases.LOOSE_CONSTRAINTS and zone is work.root:
            work.put(f"constraints.{key}", zone.pop(key))
        elif key in aliases.BASE_MODEL_KEYS or (key == "adapters" and zone is work.root):
            work.put(f"base_models[0].{key}", zone.pop(key))


def _default_to_char_model(work: Migration) -> None:
    """A file without a base model, but with a text corpus or a shape, means the character model."""
    dataset = work.dataset
    path = dataset.get("path", Item("")).value
    is_corpus = str(path).endswith(".txt") or path in aliases.CORPORA or "max_chars" in dataset
    models = work.root.get("base_models")
    if not is_corpus if models is None else not models.value:
        return
    first = work.first_base_model
    if "name" not in first and (models is None or "architecture" in first):
        first["name"] = Item(CHAR_GPT, "base_models[0].name")
        text = f"no base model is named: {CHAR_GPT} is trained from scratch"
        work.notices.append(Notice("note", "base_models", text))
    if first.get("name", Item(None)).value == CHAR_GPT:
        config = work.section("training", "config")
        for key, value in CHARACTER_CONFIG.items():
            given = [config.get(each) for each in (key, *_INSTEAD.get(key, ()))]
            if all(item is None or item.value is None for item in given):
                config[key] = Item(value, f"training.config.{key}")


def _default_to_released_adapter(work: Migration) -> None:
    """adapter_type defaults to the kind of the first released adapter."""
    none = Item(None)
    adapter = Item(work.root).get("base_models", 0, "adapters", 0) or none
    kind = adapter.get("type") or none
    if kind.value not in get_args(AdapterType):
        return
    config = work.section("training", "config")
    if config.get("adapter_type", none).value is None:
        is_dora = kind.value == "lora" and (adapter.get("use_dora") or none).value is True
        config["adapter_type"] = Item("dora" if is_dora else kind.value, kind.path, kind.line)


def _drop_empty_sections(work: Migration) -> None:
    """Remove empty sections that `Migration.section` added; keep those of the user."""
    training = work.root.get("training", Item({})).fields()
    for zone, key in ((training, "dataset"), (training, "config"), (work.root, "training")):
        item = zone.get(key, Item(None))
        if item.value == {} and item.line is None:
            del zone[key]
