"""Converts sections such as `lora:` and `training_args:`, classes with arguments, and lines of a
Python dataclass to single keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from expert.manifest.migrate.aliases import CONFIG_ALIASES
from expert.manifest.migrate.migration import Entries, Migration, as_item, take, with_value
from expert.manifest.text.item import Item, is_comment, shown

_LORA = {"r": "rank", "lora_r": "rank"}
_PLAIN: Mapping[str, str] = {}
SECTIONS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("training_args", "training_arguments", "trainer_args", "sft_config"), _PLAIN),
    **dict.fromkeys(("lora", "lora_config", "peft", "peft_config", "lora_args"), _LORA),
    **dict.fromkeys(("bnb_config", "bnb_config_kwargs", "quantization_config"), _PLAIN),
    **dict.fromkeys(("dataloader", "data_loader", "dataloader_config"), _PLAIN),
    **dict.fromkeys(("model_args", "model_kwargs", "model_init_kwargs"), _PLAIN),
}
"""With keys that need another name outside the section."""
_DECAY_OF_ADAMW = 0.01  # of torch, bitsandbytes and torchao; the default of Expert is 0
_OPTIMIZER = {"lr": "learning_rate", "eps": "adam_epsilon", "name": "optim", "type": "optim"}
_SCHEDULER = {"num_warmup_steps": "warmup_steps", "name": "lr_scheduler", "type": "lr_scheduler"}
LOADER_KEYS = frozenset(
    (
        *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "seed"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "batch_size", "micro_batch_size"),
        *("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"),
    )
)
"""Settings of a run that are often written in the dataset section."""


def open_sections(work: Migration, zone: Entries) -> None:
    """Replace SECTIONS by their entries, which are moved to their places later."""
    for key in [key for key in zone if key in SECTIONS and isinstance(zone[key].value, dict)]:
        _spread(work, zone, zone.pop(key).fields(), SECTIONS[key])
    for key, names in (("optimizer", _OPTIMIZER), ("lr_scheduler", _SCHEDULER)):
        if isinstance(zone.get(key, Item(None)).value, dict):
            _spread_class(work, zone, zone.pop(key).fields(), key, names)


def _spread(work: Migration, zone: Entries, fields: Entries, names: Mapping[str, str]) -> None:
    for key, item in fields.items():
        if not is_comment(key):
            work.place(zone, names.get(key, key), item, item.path)


def _spread_class(
    work: Migration, zone: Entries, fields: Entries, key: str, names: Mapping[str, str]
) -> None:
    """Convert an optimizer or schedule given as a class with arguments."""
    class_name = fields.pop("_component_", None)
    fused = take(fields, "fused").value is True
    if class_name is not None:
        word = str(class_name.value).rpartition(".")[2].lower()
        home, kind = "optim", _optimizer(word, fused)
        if key != "optimizer":
            kinds = [known for known in ("cosine", "linear", "constant") if known in word]
            home, kind = "lr_scheduler", kinds[0] if kinds else ""
        if kind:
            work.convert(zone, home, kind, class_name)
        is_set = "weight_decay" in {*fields, *zone}
        if "adamw" in word and not is_set and not work.is_override:
            work.convert(zone, "weight_decay", _DECAY_OF_ADAMW, class_name)
    cycles = fields.pop("num_cycles", None)
    if cycles is not None:
        options = zone.setdefault("lr_scheduler_kwargs", with_value(cycles, {}))
        options.fields()["num_cycles"] = cycles
    _spread(work, zone, fields, names)


def _optimizer(word: str, fused: bool) -> str:
    if "8bit" in word:
        return "paged_adamw_8bit" if "paged" in word else "adamw_bnb_8bit"
    if word in ("adamw", "pagedadamw"):
        return "adamw_torch_fused" if fused else "adamw_torch"
    return word


def move_loader_keys(work: Migration, fields: Entries) -> None:
    """Move LOADER_KEYS of a dataset section to training.config."""
    for key in [key for key in fields if key in LOADER_KEYS]:
        work.place_in_config(CONFIG_ALIASES.get(key, key), fields.pop(key))


# --- lines of a Python dataclass in YAML: `batch_size: int = 24` means 24 ------------------------

_TYPE = r"(?:typing\.)?[A-Za-z_][\w.]*(?:\[[^=]*\])?(?:\s*\|\s*[A-Za-z_][\w.]*(?:\[[^=]*\])?)*"
_LINE = re.compile(rf"({_TYPE})\s*=\s*(\S.*)")
_TYPES = re.compile(
    r"\b(?:int|float|str|bool|Optional|Union|List|list|Dict|dict|Tuple|tuple|Literal|Path|Any)\b"
)


def read_python_lines(work: Migration) -> None:
    """Replace `name: type = value` by the value; refuse values that are not literals."""
    for item in list(Item(work.root).walk()):
        if not isinstance(item.value, str) or "=" not in item.value:
            continue
        line = _LINE.fullmatch(item.value)
        if line is None or not _TYPES.match(line[1].removeprefix("typing.")):
            continue
        try:
            value = ast.literal_eval(line[2])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            work.refuse(item, "a value", f"write {item.key}: VALUE")
            item.value = None
            continue
        item.value = as_item(value, item).value
        work.read_as(item, f"{shown(item.plain())} (a line of Python)")
