"""Converts sections such as `lora:` and `training_args:`, classes with arguments, and lines of a
Python dataclass to single keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from expert.manifest.migrate.aliases import canonical_path
from expert.manifest.migrate.migration import Entries, Migration, as_item, take, with_value
from expert.manifest.schema.kinds import SCHEDULES
from expert.manifest.text.item import Item, shown

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
_CLASSES = {
    "optimizer": {"lr": "learning_rate", "eps": "adam_epsilon", "name": "optim", "type": "optim"},
    "lr_scheduler": {
        "num_warmup_steps": "warmup_steps",
        **{"name": "lr_scheduler", "type": "lr_scheduler"},
    },
}
# Settings of a run that are often written in the dataset section.
_LOADER_KEYS = frozenset(
    (
        *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "seed"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "batch_size", "micro_batch_size"),
        *("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"),
    )
)


def open_sections(work: Migration, zone: Entries) -> None:
    """Replace SECTIONS, and classes with arguments, by their entries, which are moved to their
    places later."""
    for key in [key for key in zone if key in SECTIONS and isinstance(zone[key].value, dict)]:
        _spread(work, zone, zone.pop(key).fields(), SECTIONS[key])
    for key, names in _CLASSES.items():
        if not isinstance(zone.get(key, Item(None)).value, dict):
            continue
        fields = zone.pop(key).fields()
        class_name, fused = take(fields, "_component_"), take(fields, "fused").value is True
        if class_name.value is not None:
            _read_class(work, {*fields, *zone}, zone, key, class_name, fused=fused)
        if "num_cycles" in fields:
            cycles = fields.pop("num_cycles")
            options = zone.setdefault("lr_scheduler_kwargs", with_value(cycles, {}))
            options.fields()["num_cycles"] = cycles
        _spread(work, zone, fields, names)


def _spread(work: Migration, zone: Entries, fields: Entries, names: Mapping[str, str]) -> None:
    for key, item in fields.items():
        work.place(zone, names.get(key, key), item, item.path)


def _read_class(
    work: Migration, given: set[str], zone: Entries, key: str, name: Item, *, fused: bool
) -> None:
    """Convert the class of an optimizer or schedule to its name here."""
    word = str(name.value).rpartition(".")[2].lower()
    if key != "optimizer":
        kind = next((known for known in SCHEDULES if known in word), "")
        if kind:
            work.convert(zone, "lr_scheduler", kind, name)
        return
    kind = word
    if "8bit" in word and "adam" in word:
        kind = "paged_adamw_8bit" if "paged" in word else "adamw_bnb_8bit"
    elif word in ("adamw", "pagedadamw"):
        kind = "adamw_torch_fused" if fused else "adamw_torch"
    work.convert(zone, "optim", kind, name)
    if "adamw" in word and "weight_decay" not in given and not work.is_override:
        work.convert(zone, "weight_decay", _DECAY_OF_ADAMW, name)


def move_loader_keys(work: Migration, fields: Entries) -> None:
    """Move settings of a run from a dataset section to training.config."""
    for key in [key for key in fields if key in _LOADER_KEYS]:
        work.put(canonical_path(key) or "", fields.pop(key))


# `batch_size: int = 24` means 24
_PYTHON_LINE = re.compile(
    r"(?:typing\.)?(?:int|float|str|bool|Optional|Union|List|list|Dict|dict|Tuple|tuple|Literal"
    r"|Path|Any)\b[\w\s.,|\[\]]*=\s*(\S.*)"
)


def read_python_lines(work: Migration) -> None:
    """Replace `name: type = value` by the value; refuse values that are not literals."""
    for item in list(Item(work.root).walk()):
        line = _PYTHON_LINE.fullmatch(item.value) if isinstance(item.value, str) else None
        if line is None:
            continue
        try:
            value = ast.literal_eval(line[1])
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            work.refuse(item, "a value", f"write {item.key}: VALUE")
            item.value = None
            continue
        item.value = as_item(value, item).value
        work.read_as(item, f"{shown(item.plain())} (a line of Python)")
