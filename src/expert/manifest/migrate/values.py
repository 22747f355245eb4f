"""Converts other spellings of values to those of the schema, with a notice for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from expert.manifest.migrate.aliases import TABLES
from expert.manifest.migrate.migration import Entries, Migration, with_value
from expert.manifest.schema.kinds import Tracker, is_jinja
from expert.manifest.text.item import Item


def _spellings(section: str) -> dict[str, dict[Any, str]]:
    """By key, the value that each other spelling means."""
    return {
        key: {word: value for value, words in values.items() for word in words}
        for key, values in TABLES[section].items()
    }


CONFIG_VALUES, MODEL_VALUES = _spellings("values"), _spellings("model_values")
# One name, or several: `q_proj, v_proj`. "auto" and "all-linear" are no names.
_LAYERS = re.compile(r"(?!auto$)\w[\w.]*(\s*,\s*[\w.]+)*,?")
# Keys of paths, and names of models, which may be paths.
_PATHS = re.compile(
    r"training\.dataset\.((validation_|test_)?path|tasks\..*\.(train|valid|test))"
    r"|training\.config\.(output_dir|pretokenized_cache)"
    r"|base_models\[\d+\]\.name|soft_prompts\[\d+\]\.path"
)
_ABSOLUTE = re.compile(r"[\\/]|[A-Za-z]:")


def convert_values(work: Migration) -> None:
    root, none = Item(work.root), Item(None)
    version = root.get("version")
    if version is not None and type(version.value) in (int, float):
        version.value = str(version.value)  # YAML reads a bare 1.0 as a number
    config = (root.get("training", "config") or none).fields()
    _convert(work, config, CONFIG_VALUES)
    # Convert values that need more than a table: `q_proj,v_proj` is a list of two.
    for key in ("target_modules", "modules_to_save"):
        modules = config.get(key, Item(None))
        if isinstance(modules.value, str) and _LAYERS.fullmatch(modules.value):
            names = [name.strip() for name in modules.value.split(",") if name.strip()]
            modules.value = [with_value(modules, name) for name in names]
    _convert_trackers(work, config)
    if config.get("loss_type", Item(None)).value == "nll":  # TRL's name of what sft does
        del config["loss_type"]
    # `warmup_steps: 0.1` is a share of all steps in Transformers 5.
    steps, ratio = (config.get(key, Item(None)) for key in ("warmup_steps", "warmup_ratio"))
    if isinstance(steps.value, float) and 0 < steps.value < 1 and ratio.value is None:
        config["warmup_ratio"] = config.pop("warmup_steps")
        work.read_as(steps, "training.config.warmup_ratio")
    # So are these, of which a run's number of steps is not known yet.
    for key, strategy in (("save_steps", "save_strategy"), ("eval_steps", "evaluation_strategy")):
        every = config.get(key, Item(None))
        if isinstance(every.value, float) and 0 < every.value < 1:
            work.read_as(config.pop(key), f"training.config.{strategy}: epoch")
            config[strategy] = with_value(every, "epoch")
    limit = config.get("max_steps", Item(None))
    if limit.value == -1:
        limit.value = 0
        work.read_as(limit, "0: no limit")
    patience = config.get("early_stopping_patience", Item(None))
    if patience.value is True:
        patience.value = 3
        work.read_as(patience, "a patience of 3 evaluations")
    elif patience.value is False:
        patience.value = None
    _convert_qlora(work, config)
    for model in (root.get("base_models") or none).entries():
        _convert(work, model.fields(), MODEL_VALUES)
    # Replace backslashes in relative Windows paths; messages show absolute ones as written.
    for path, item in root.by_path():
        is_relative = isinstance(item.value, str) and not _ABSOLUTE.match(item.value)
        if is_relative and _PATHS.fullmatch(path):
            item.value = str(item.value).replace("\\", "/")
    for number, prompt in enumerate((root.get("soft_prompts") or none).entries()):
        length = prompt.fields().pop("length", None)
        if length is not None:
            work.place(prompt.fields(), "tokens", length, f"soft_prompts[{number}].tokens")


def _convert(work: Migration, entries: Entries, table: Mapping[str, Mapping[Any, Any]]) -> None:
    for key, spellings in table.items():
        item = entries.get(key)
        if item is None or not isinstance(item.value, str | bool) or is_jinja(str(item.value)):
            continue
        spelling = item.value.lower() if isinstance(item.value, str) else item.value
        known = spellings.get(spelling)
        if known is None and isinstance(spelling, str) and key != "target_modules":
            known = spelling
        if known is not None:
            if spelling != known:
                work.read_as(item, f'"{known}"')
            item.value = known


def _convert_trackers(work: Migration, config: Entries) -> None:
    """Drop unsupported trackers of `report_to` with a notice; they do not affect training."""
    trackers = config.get("trackers", Item(None))
    if isinstance(trackers.value, str):
        trackers.value = [with_value(trackers, trackers.value)]
    if trackers.plain() == ["none"]:
        trackers.value = []
    listed = trackers.entries()
    others = [str(each.value) for each in listed if each.value not in get_args(Tracker)]
    if others and trackers.path.endswith("report_to"):
        work.unused(trackers, f"not supported: {', '.join(others)}")
        trackers.value = [each for each in listed if str(each.value) not in others]
        if not trackers.value:
            del config["trackers"]


def _convert_qlora(work: Migration, config: Entries) -> None:
    adapter = config.get("adapter_type", Item(None))
    if adapter.value != "qlora":
        return
    for model in work.root.get("base_models", Item(None)).entries():
        bits = model.fields().get("quantization")
        if bits is None or bits.value in (None, "auto"):
            model.fields()["quantization"] = with_value(adapter, "int4")
        elif bits.value not in ("int4", "nf4", "4bit"):
            work.conflict(adapter, bits)
    adapter.value = "lora"
    work.read_as(adapter, "lora on an int4 base")
