"""Converts sections of FSDP and DeepSpeed to training.config.distributed. The rows per step do not
depend on the number of GPUs, and the plan offloads what does not fit otherwise."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from expert.manifest.migrate.migration import (
    Entries,
    Migration,
    Rule,
    convert_values_to,
    take,
    with_value,
)
from expert.manifest.text.item import Item

# ZeRO-1 and 2 shard gradients and optimizer state, which are small for adapters.
_STAGES = {0: "replicated", 1: "auto", 2: "auto", 3: "sharded"}
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
    words = [word.lower().strip(",") for word in parts]
    kinds = [word for word in words if word not in ("offload", "auto_wrap", "true")]
    for kind in kinds or ["full_shard"]:
        work.place(zone, "fsdp_sharding_strategy", with_value(item, kind), item.path)
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
    for name, entry in entries.items():  # converted next, or reported as not used
        work.place(zone, name, entry, entry.path)


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


DISTRIBUTED_RULES: dict[str, Rule] = {
    "fsdp_config": _fsdp_config,
    "fsdp": _fsdp,
    **dict.fromkeys(("deepspeed", "deepspeed_config"), _deepspeed),
}
DISTRIBUTED_KEYS = (
    *("distributed_type", "fsdp_config", "fsdp", "fsdp_sharding_strategy", "fsdp_cpu_offload"),
    *("fsdp_activation_checkpointing", "deepspeed", "deepspeed_config"),
)
"""In the order of conversion: each may look for more specific keys after it."""
