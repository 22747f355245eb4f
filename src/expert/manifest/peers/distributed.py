"""Converts sections of FSDP and DeepSpeed to training.config.distributed. The rows per step do not
depend on the number of GPUs, and the plan offloads what does not fit otherwise."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from expert.manifest.migrate.migration import Entries, Migration, convert_values_to, take
from expert.manifest.text.item import Item

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
FSDP_DOES_IT = "FSDP2, a part of torch, does the work of DeepSpeed here"
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
    if not isinstance(item.value, dict) and item.value != "":
        work.refuse(item, "an object")
    entries = {f"fsdp_{key.removeprefix('fsdp_')}": entry for key, entry in item.fields().items()}
    is_told = {"fsdp", "distributed"} & zone.keys() or "fsdp_sharding_strategy" in entries
    if entries and not is_told:
        work.convert(zone, "distributed", "sharded", item)
    for name, entry in entries.items():
        if name not in FSDP_KEYS:
            zone[name] = entry  # reported as not used
        elif entry.value is not None:
            FSDP_KEYS[name](work, zone, entry)


def _deepspeed(work: Migration, zone: Entries, item: Item) -> None:
    """Convert a ZeRO config, or accelerate's deepspeed_config. Of a file, only the stage in its
    name is read."""
    if item.value in (False, "", "none") or item.value in ([], {}):
        return
    if isinstance(item.value, str):
        name = PurePosixPath(item.value.replace("\\", "/")).stem
        if stage := _STAGE_IN_A_NAME.search(name):
            work.convert(zone, "distributed", _STAGES[int(stage[1])], item)
            work.unused(item, f"only the stage in its name is read: {FSDP_DOES_IT}")
        else:
            work.report("warning", item, f"not read, distributed: auto decides: {FSDP_DOES_IT}")
        return
    if not isinstance(item.value, dict):
        work.refuse(item, "the path of a ZeRO config, or an object")
        return
    fields = dict(item.value)
    file = take(fields, "deepspeed_config_file")
    if file.value is not None:
        _deepspeed(work, zone, file)
    fields |= take(fields, "zero_optimization").fields()
    stage_item = fields.pop("stage", None) or fields.pop("zero_stage", None)
    if stage_item is not None:
        convert_values_to("distributed", _STAGES, "0, 1, 2 or 3")(work, zone, stage_item)
    for key, home in _DEEPSPEED_VALUES.items():
        entry = take(fields, key)
        if entry.value not in (None, "auto"):
            work.place(zone, home, entry, f"training.config.{home}")
    for key in ("bf16", "fp16"):
        enabled = take(fields, key).get("enabled") or Item(None)
        if enabled.value is True:
            work.place(zone, key, enabled, f"training.config.{key}")
    names = [name for name, entry in fields.items() if entry.value != "auto"]
    if names:
        work.unused(item, f"{', '.join(sorted(names))}")


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
