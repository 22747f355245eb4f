"""Converts sections of FSDP and DeepSpeed to training.config.distributed. The rows per step do not
depend on the number of GPUs, and the plan offloads what does not fit otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from expert.core.files import read_json
from expert.manifest.migrate.aliases import CONFIG_ALIASES
from expert.manifest.migrate.migration import Entries, Migration, as_item, convert_values_to, take
from expert.manifest.text.item import Item, is_comment

_MAX_BYTES = 1_000_000
# FSDP's sharding_strategy, by name and by number.
_STRATEGIES: dict[Any, str] = {
    **dict.fromkeys(("full_shard", "1", 1, "hybrid_shard", "4", 4, "true"), "sharded"),
    **dict.fromkeys(("shard_grad_op", "2", 2, "hybrid_shard_zero2", "5", 5), "auto"),
    **dict.fromkeys(("no_shard", "3", 3), "replicated"),
}
# ZeRO-1 and 2 shard gradients and optimizer state, which are small for adapters.
_STAGES = {0: "replicated", 1: "auto", 2: "auto", 3: "sharded"}
_TYPES: dict[Any, str | None] = {
    **dict.fromkeys(("multi_gpu", "multi_cpu", "ddp"), "replicated"),
    **dict.fromkeys(("fsdp", "fsdp2"), "sharded"),
    **dict.fromkeys(("no", False, "deepspeed"), None),  # YAML reads a bare NO as false
}
_STAGE_IN_A_NAME = re.compile(r"(?:zero|stage|z|ds)[-_]?([0-3])(?!\d)", re.IGNORECASE)
_DEEPSPEED_VALUES = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}


def _fsdp(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `fsdp`: words such as `full_shard auto_wrap`, a list of them, or true."""
    if item.value in (False, "", []):
        return
    parts = [str(each.value) for each in item.entries()] or str(item.value).split()
    words = {word.lower().strip(",") for word in parts}
    if words - _STRATEGIES.keys() - {"offload", "auto_wrap"} or isinstance(item.value, dict):
        work.refuse(item, "full_shard, shard_grad_op, hybrid_shard, no_shard, offload, auto_wrap")
        return
    for value in {_STRATEGIES[word] for word in words if word in _STRATEGIES} or {"sharded"}:
        work.convert(zone, "distributed", value, item)
    if "offload" in words:
        work.unused(item, "the plan offloads what does not fit")


def _fsdp_config(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `fsdp_config`; its keys may start with `fsdp_`. Without an `fsdp` key it means FSDP;
    with one, even empty, that decides."""
    fields = _object(work, item, "an object, or the path of a JSON file").fields()
    entries = {f"fsdp_{k.removeprefix('fsdp_')}": v for k, v in fields.items() if not is_comment(k)}
    is_told = {"fsdp", "distributed"} & zone.keys() or "fsdp_sharding_strategy" in entries
    if entries and not is_told:
        work.convert(zone, "distributed", "sharded", item)
    for name, entry in entries.items():
        if name not in FSDP_KEYS:
            zone[name] = entry  # reported as not used
        elif entry.value is not None:
            FSDP_KEYS[name](work, zone, entry)


def _deepspeed(work: Migration, zone: Entries, item: Item) -> None:
    """Convert a ZeRO config: its path, the object, or accelerate's deepspeed_config."""
    if item.value in (False, "", []) or item.value == {}:
        return
    item = _object(work, item, "the path of a ZeRO config, or an object")
    fields = {key: entry for key, entry in item.fields().items() if not is_comment(key)}
    file = take(fields, "deepspeed_config_file")
    if isinstance(file.value, str) and file.value not in ("", "none"):
        _deepspeed(work, zone, file)
    fields |= take(fields, "zero_optimization").fields()
    stage = fields.pop("stage", None) or fields.pop("zero_stage", None)
    if stage is not None:
        convert_values_to("distributed", _STAGES, "0, 1, 2 or 3")(work, zone, stage)
    for key, home in _DEEPSPEED_VALUES.items():
        entry = take(fields, key)
        if entry.value not in (None, "auto"):
            _set_or_compare(work, zone, home, entry)
    for key in ("bf16", "fp16"):
        enabled = take(fields, key).get("enabled") or Item(None)
        if isinstance(enabled.value, bool):
            _set_or_compare(work, zone, key, enabled, only_compare=not enabled.value)
    names = [name for name, entry in fields.items() if entry.value != "auto"]
    if names:
        work.unused(item, f"{', '.join(sorted(names))}")


def _set_or_compare(
    work: Migration, zone: Entries, home: str, item: Item, *, only_compare: bool = False
) -> None:
    """Set a key of training.config; a value of the manifest under any name must agree."""
    config = work.config.fields() if work.config is not None else {}
    for section in (zone, work.root, work.section("training"), config):
        for name, present in section.items():
            is_set = present.value not in (None, "auto")
            if CONFIG_ALIASES.get(name, name) == home and is_set:
                if present.plain() != item.plain():
                    work.conflict(item, present)
                return
    if not only_compare and "batch_tokens" not in {**zone, **config}:
        zone[home] = item
        work.read_as(item, f"training.config.{home}")


def _object(work: Migration, item: Item, expected: str) -> Item:
    """`item`, or the content of the JSON file it names; for a missing one, the ZeRO stage in its
    name. Anything but an object is a problem."""
    if isinstance(item.value, dict):
        return item
    if not isinstance(item.value, str):
        work.refuse(item, expected)
        return Item(None)
    named = Path(item.value.replace("\\", "/"))
    for file in (work.folder / named, named):
        try:
            if not file.is_file():
                continue
            content = read_json(file, _MAX_BYTES, encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            work.problem(item, f"{file} cannot be read: {error}")
            return Item(None)
        if not isinstance(content, dict):
            work.problem(item, f"{file} is not a JSON object")
        return as_item(content, item, named.name)
    stage = _STAGE_IN_A_NAME.search(named.stem)
    if stage is None or not item.key.startswith("deepspeed"):
        work.report("warning", item, f"there is no {item.value}: distributed: auto decides")
        return Item(None)
    work.report("note", item, f"there is no {item.value}: read as ZeRO-{stage[1]}, from its name")
    return as_item({"zero_optimization": {"stage": int(stage[1])}}, item, named.name)


FSDP_KEYS = {
    "fsdp_sharding_strategy": convert_values_to(
        "distributed", _STRATEGIES, "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD"
    ),
    "fsdp_cpu_offload": convert_values_to(
        "distributed", {True: "sharded", False: None}, "true or false"
    ),
    "fsdp_activation_checkpointing": convert_values_to(
        "gradient_checkpointing", {True: True, False: None}, "true or false"
    ),
}
DISTRIBUTED_KEYS = {
    "distributed_type": convert_values_to(
        "distributed", _TYPES, "NO, MULTI_GPU, FSDP or DEEPSPEED"
    ),
    "fsdp_config": _fsdp_config,
    "fsdp": _fsdp,
    **FSDP_KEYS,
    "deepspeed": _deepspeed,
    "deepspeed_config": _deepspeed,
}
"""In the order of conversion: each may look for more specific keys after it."""
