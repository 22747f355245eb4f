"""Sections in which other files keep what stands alone here: `lora:`, `training_args:`, …"""

from __future__ import annotations

from collections.abc import Mapping

from expert.manifest.migrate.moving import Entries, Migration
from expert.manifest.migrate.names import CONFIG_ALIASES
from expert.manifest.notices import notice
from expert.manifest.text.document import Item, is_comment

_LORA = {"r": "rank", "lora_r": "rank"}
SECTIONS: Mapping[str, Mapping[str, str]] = {
    **{key: {} for key in ("training_args", "training_arguments", "trainer_args", "sft_config")},
    **dict.fromkeys(("lora", "lora_config", "peft", "peft_config", "lora_args"), _LORA),
    **{key: {} for key in ("bnb_config", "bnb_config_kwargs", "quantization_config")},
    **{key: {} for key in ("dataloader", "data_loader", "dataloader_config")},
    **{key: {} for key in ("model_args", "model_kwargs", "model_init_kwargs")},
}
"""With the names that mean something else outside of the section."""
_OPTIMIZER = {"lr": "learning_rate", "eps": "adam_epsilon", "name": "optim", "type": "optim"}
_SCHEDULER = {"num_warmup_steps": "warmup_steps", "name": "lr_scheduler", "type": "lr_scheduler"}
_CLASSES = ("_component_", "class_path")
LOADER_KEYS = frozenset(
    {
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "persistent_workers",
        "batch_size",
        "micro_batch_size",
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "max_seq_length",
        "max_seq_len",
        "sequence_len",
        "cutoff_len",
        "seed",
    }
)
"""Settings of a run that people write beside their rows."""


def open_sections(work: Migration, zone: Entries) -> None:
    """Put the entries of such sections beside them; they find their homes with the others."""
    for key in [key for key in zone if key in SECTIONS and isinstance(zone[key].value, dict)]:
        _spread(work, zone, zone.pop(key).fields(), SECTIONS[key])
    for key, names in (("optimizer", _OPTIMIZER), ("lr_scheduler", _SCHEDULER)):
        item = zone.get(key)
        if item is not None and isinstance(item.value, dict):
            del zone[key]
            _spread_object(work, zone, item.value, key, names)


def _spread(work: Migration, zone: Entries, fields: Entries, names: Mapping[str, str]) -> None:
    for key, item in fields.items():
        if is_comment(key):
            continue
        work.place(zone, names.get(key, key), item, item.path)


def _spread_object(
    work: Migration, zone: Entries, fields: Entries, key: str, names: Mapping[str, str]
) -> None:
    """An optimizer or a schedule given as a class with its arguments."""
    made = next((fields.pop(name) for name in _CLASSES if name in fields), None)
    arguments = fields.pop("init_args", None)
    fields = {**fields, **(arguments.fields() if arguments is not None else {})}
    fused = fields.pop("fused", None)
    word = str(made.value).rpartition(".")[2].lower() if made is not None else ""
    if made is not None and key == "optimizer":
        kind = _optimizer(word, fused is not None and fused.value is True)
        zone.setdefault("optim", Item(kind, made.path, made.line))
        work.notices.append(notice("read as", made, f"training.config.optim: {kind}"))
    elif made is not None:
        for known in ("cosine", "linear", "constant"):
            if known in word:
                zone.setdefault("lr_scheduler", Item(known, made.path, made.line))
                work.notices.append(
                    notice("read as", made, f"training.config.lr_scheduler: {known}")
                )
    fields.pop("num_cycles", None)
    _spread(work, zone, fields, names)


def _optimizer(word: str, fused: bool) -> str:
    if "8bit" in word:
        return "paged_adamw_8bit" if "paged" in word else "adamw_bnb_8bit"
    if word in ("adamw", "pagedadamw"):
        return "adamw_torch_fused" if fused else "adamw_torch"
    return word


def loader_keys_of(work: Migration, fields: Entries) -> None:
    """`data: {num_workers: 8}`: settings of the run that stand beside the rows."""
    config = work.section("training", "config")
    for key in [key for key in fields if key in LOADER_KEYS]:
        home = CONFIG_ALIASES.get(key, key)
        work.place(config, home, fields.pop(key), f"training.config.{home}")
