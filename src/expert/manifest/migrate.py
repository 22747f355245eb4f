"""Any layout in the wild becomes the 2.0 layout; each move is told as a notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from expert.core.errors import Problem
from expert.manifest.document import Item, is_comment
from expert.manifest.names import (
    ADAM_BETAS,
    AMP_NAMES,
    BASE_MODEL_KEYS,
    CONFIG_ALIASES,
    CONFIG_KEYS,
    DATASET_ALIASES,
    DATASET_KEYS,
    DTYPE_NAMES,
    LOAD_IN_NAMES,
    LOOSE_DATASET_KEYS,
    MODEL_NAMES,
    SHAPE_ALIASES,
    SPECIAL_NAMES,
)
from expert.manifest.notices import Notice, notice
from expert.manifest.schema import CHAR_GPT

Entries = dict[str, Item]
_FLOATS = {
    "bf16": (True, False),
    "bfloat16": (True, False),
    "fp16": (False, True),
    "float16": (False, True),
    "half": (False, True),
    "fp32": (False, False),
    "float32": (False, False),
    "float": (False, False),
    "no": (False, False),
}
CORPORA = ("shakespeare", "python-stdlib")


@dataclass
class Migration:
    """The tree being rewritten, and what there is to tell about it."""

    root: Entries
    notices: list[Notice] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def section(self, *keys: str) -> Entries:
        """The mapping at `keys`, made where it is missing; a stray {} where it is no mapping."""
        entries = self.root
        for key in keys:
            item = entries.setdefault(key, Item({}, path=".".join(keys[: keys.index(key) + 1])))
            if not isinstance(item.value, dict):
                return {}
            entries = item.value
        return entries

    def place(self, entries: Entries, key: str, item: Item, home: str) -> None:
        """Put a moved value where it belongs; two different values for one key are a problem."""
        present = entries.get(key)
        if present is not None and present.plain() != item.plain():
            here, there = present.plain(), item.plain()
            what = f"says {there!r}, but {present.path} says {here!r}"
            self.problems.append(Problem(item.path, what, "keep one of the two", item.line))
            return
        entries.setdefault(key, item)
        if item.path != home:
            off = " (0: no clipping)" if key == "max_grad_norm" and item.value == 0 else ""
            self.notices.append(notice("read as", item, home + off))


def migrate(root: Item) -> Migration:
    """Move every key under `root` to its home in the 2.0 layout, in place."""
    work = Migration(root.fields())
    _move_base_model(work)
    _move_dataset(work)
    _move_model_section(work)
    # `device` and friends at the top level belong to the run, not to the expert's description.
    for zone in (work.root, work.section("training")):
        _move_loose_keys(work, zone)
    _rename_in_config(work)
    _drop_empty_sections(work)
    return work


def complete_layout(work: Migration) -> None:
    """What a whole file needs once its keys are in place: a model and the layout's version."""
    _default_to_char_model(work)
    _settle_schema_version(work)
    _drop_empty_sections(work)


def _move_base_model(work: Migration) -> None:
    """1.0: `base_model` and root `adapters` become the one entry of `base_models`."""
    single, several = work.root.get("base_model"), work.root.get("base_models")
    if single is not None and several is not None:
        what = "given together with base_models"
        work.problems.append(
            Problem(single.path, what, "keep base_models and move this model into it", single.line)
        )
        del work.root["base_model"]
        return
    if single is not None:
        del work.root["base_model"]
        if isinstance(single.value, str):
            single = Item({"name": single}, single.path, single.line, single.above, single.beside)
        elif single.value is None:
            return
        work.root["base_models"] = Item([single], single.path, single.line)
        adapters = work.root.pop("adapters", None)
        if adapters is not None:
            single.fields().setdefault("adapters", adapters)
    elif several is not None and isinstance(several.value, list):
        for position, entry in enumerate(several.value):
            if isinstance(entry.value, str):
                several.value[position] = Item(
                    {"name": Item(entry.value, entry.path, entry.line)}, entry.path, entry.line
                )


def _move_dataset(work: Migration) -> None:
    """`dataset` or `data` at the top, and a data set that is only a path, find their place."""
    training = work.section("training")
    if "dataset" in training:
        training["dataset"] = _as_dataset(training["dataset"])
        _rename_dataset_keys(work, training["dataset"].fields())
    for zone, key in ((work.root, "dataset"), (work.root, "data"), (training, "data")):
        item = zone.pop(key, None)
        if item is None:
            continue
        item = _as_dataset(item)
        if not isinstance(item.value, dict):
            work.place(training, "dataset", item, "training.dataset")
            continue
        target = training.setdefault("dataset", Item({}, item.path, item.line)).fields()
        _rename_dataset_keys(work, item.value)
        for name, entry in item.value.items():
            if is_comment(name):
                target.setdefault(name, entry)
            else:
                work.place(target, name, entry, f"training.dataset.{name}")


def _as_dataset(item: Item) -> Item:
    """A data set given as text is one with just a path."""
    if not isinstance(item.value, str):
        return item
    path = Item(item.value, item.path, item.line, item.above, item.beside, item.from_command_line)
    return Item({"path": path}, item.path, item.line)


def _rename_dataset_keys(work: Migration, entries: Entries) -> None:
    for name in [key for key in entries if key in DATASET_ALIASES and key not in DATASET_KEYS]:
        home = DATASET_ALIASES[name]
        work.place(entries, home, entries.pop(name), f"training.dataset.{home}")


def _move_model_section(work: Migration) -> None:
    """`model`: a name, the shape of a character model, or a bag of model settings."""
    item = work.root.pop("model", None)
    if item is None:
        return
    if isinstance(item.value, str):
        _name_base_model(work, item)
        return
    if not isinstance(item.value, dict):
        what = f"got {item.plain()!r}, expected a name or an object"
        work.problems.append(Problem(item.path, what, "write base_model: NAME", item.line))
        return
    names = item.value
    kind = names.pop("name", None) or names.pop("type", None)
    if kind is not None:
        _name_base_model(work, kind)
    shape_keys = [key for key in names if key in SHAPE_ALIASES]
    is_char_model = (kind is None or kind.value == CHAR_GPT) and not any(
        name in names for name in MODEL_NAMES
    )
    if shape_keys and is_char_model:
        shape = _first_base_model(work).setdefault("architecture", Item({}, item.path, item.line))
        for key in shape_keys:
            home = SHAPE_ALIASES[key]
            full_home = f"base_models[0].architecture.{home}"
            work.place(shape.fields(), home, names.pop(key), full_home)
    vocabulary = names.pop("vocab_size", None)
    if vocabulary is not None:
        text = "the vocabulary is read off the data"
        work.notices.append(notice("superseded", vocabulary, text))
    _move_loose_keys(work, names)
    for key, entry in names.items():
        if not is_comment(key):
            work.problems.append(
                Problem(entry.path, "unknown key", "move it to where it belongs", entry.line)
            )


def _first_base_model(work: Migration) -> Entries:
    models = work.root.setdefault("base_models", Item([], "base_models"))
    if not isinstance(models.value, list):
        return {}
    if not models.value:
        models.value.append(Item({}, "base_models[0]"))
    first = models.value[0]
    return first.value if isinstance(first.value, dict) else {}


def _name_base_model(work: Migration, item: Item) -> None:
    work.place(_first_base_model(work), "name", item, "base_models[0].name")


def _move_loose_keys(work: Migration, zone: Entries, *, in_config: bool = False) -> None:
    """Keys of training.config, of the data set and of the model that stand outside their home."""
    for key in list(zone):
        if key in SPECIAL_NAMES:
            _SPECIAL[key](work, zone.pop(key))
        elif not in_config and (key in CONFIG_KEYS or key in CONFIG_ALIASES):
            home = CONFIG_ALIASES.get(key, key)
            _place_in_config(work, home, zone.pop(key))
        elif key in LOOSE_DATASET_KEYS:
            target = work.section("training", "dataset")
            work.place(target, key, zone.pop(key), f"training.dataset.{key}")
        elif key in BASE_MODEL_KEYS:
            work.place(_first_base_model(work), key, zone.pop(key), f"base_models[0].{key}")
        elif key == "adapters" and zone is work.root:
            work.place(_first_base_model(work), key, zone.pop(key), "base_models[0].adapters")


def _place_in_config(work: Migration, key: str, item: Item) -> None:
    config = work.section("training", "config")
    work.place(config, key, item, f"training.config.{key}")
    if key == "save_every_epochs":
        config.setdefault("save_strategy", Item("epoch", item.path, item.line))


def _rename_in_config(work: Migration) -> None:
    config = work.section("training", "config")
    _move_loose_keys(work, config, in_config=True)
    for key in [name for name in config if name in CONFIG_ALIASES and name not in CONFIG_KEYS]:
        _place_in_config(work, CONFIG_ALIASES[key], config.pop(key))


def _split_dtype(work: Migration, item: Item) -> None:
    value = item.value
    if value in ("auto", None):
        work.notices.append(notice("note", item, "auto: the plan chooses the precision"))
        return
    if value not in _FLOATS:
        what = f"got {value!r}, expected bfloat16, float16, float32 or auto"
        work.problems.append(Problem(item.path, what, "", item.line))
        return
    config = work.section("training", "config")
    for key, flag in zip(("bf16", "fp16"), _FLOATS[str(value)], strict=True):
        work.place(config, key, Item(flag, item.path, item.line), f"training.config.{key}")


def _split_amp(work: Migration, item: Item) -> None:
    if item.value is True:
        text = "mixed precision: the plan chooses bf16 or fp16"
        work.notices.append(notice("read as", item, text))
        return
    _split_dtype(work, Item("fp32" if item.value is False else item.value, item.path, item.line))


def _load_in(work: Migration, item: Item) -> None:
    bits = "int4" if "4bit" in item.path else "int8"
    if item.value is True:
        models = work.root.get("base_models")
        entries = models.value if models is not None and isinstance(models.value, list) else []
        for entry in entries or [Item(_first_base_model(work))]:
            moved = Item(bits, item.path, item.line)
            work.place(entry.fields(), "quantization", moved, "base_models[0].quantization")
    elif item.value is False:
        first = _first_base_model(work)
        if "quantization" not in first:
            first["quantization"] = Item("none", item.path, item.line)
        text = f"base_models[0].quantization: {first['quantization'].plain()}"
        work.notices.append(notice("read as", item, text))
    else:
        what = f"got {item.plain()!r}, expected true or false"
        work.problems.append(Problem(item.path, what, "", item.line))


def _adam_beta(work: Migration, item: Item) -> None:
    config = work.section("training", "config")
    betas = config.setdefault("betas", Item([Item(0.9), Item(0.999)], item.path, item.line))
    if isinstance(betas.value, list) and len(betas.value) == 2:
        betas.value[0 if item.path.endswith("adam_beta1") else 1] = item
        work.notices.append(notice("read as", item, "part of training.config.betas"))


def _use_dora(work: Migration, item: Item) -> None:
    if item.value is True:
        config = work.section("training", "config")
        if config.get("adapter_type", Item("lora")).value == "lora":
            config["adapter_type"] = Item("dora", item.path, item.line)
        text = "training.config.adapter_type: dora"
        work.notices.append(notice("read as", item, text))
    elif item.value is not False:
        what = f"got {item.plain()!r}, expected true or false"
        work.problems.append(Problem(item.path, what, "", item.line))


_SPECIAL: dict[str, Callable[[Migration, Item], None]] = {
    **dict.fromkeys(DTYPE_NAMES, _split_dtype),
    **dict.fromkeys(AMP_NAMES, _split_amp),
    **dict.fromkeys(LOAD_IN_NAMES, _load_in),
    **dict.fromkeys(MODEL_NAMES, _name_base_model),
    **dict.fromkeys(ADAM_BETAS, _adam_beta),
    "use_dora": _use_dora,
}


def _default_to_char_model(work: Migration) -> None:
    """A file that names no base model but a text corpus or a shape means the character model."""
    dataset = work.section("training", "dataset")
    path = dataset.get("path", Item("")).value
    is_corpus = str(path).endswith(".txt") or path in CORPORA or "max_chars" in dataset
    models = work.root.get("base_models")
    if models is None and not is_corpus:
        return
    first = _first_base_model(work)
    if "name" not in first and (models is None or "architecture" in first):
        first["name"] = Item(CHAR_GPT, "base_models[0].name")
        text = f"no base model is named: {CHAR_GPT} is trained from scratch"
        work.notices.append(Notice("note", "base_models", text))
    if first.get("name", Item(None)).value == CHAR_GPT:
        config = work.section("training", "config")
        config.setdefault("adapter_type", Item("full", "training.config.adapter_type"))


def _settle_schema_version(work: Migration) -> None:
    given = work.root.get("schema_version")
    if given is not None and str(given.plain()) not in {"1.0", "2.0", "1", "2"}:
        text = f"unknown version {given.plain()!r}: read by its layout"
        work.notices.append(notice("warning", given, text))
    source = given or Item(None, "schema_version")
    work.root["schema_version"] = Item("2.0", source.path, source.line, source.above, source.beside)


def _drop_empty_sections(work: Migration) -> None:
    """Sections that only looking for them made; a real empty one is the user's own."""
    training = work.root.get("training")
    if training is None:
        return
    for key in ("dataset", "config"):
        item = training.fields().get(key)
        if item is not None and item.value == {} and item.line is None:
            del training.fields()[key]
    if training.value == {} and training.line is None:
        del work.root["training"]
