"""Converts settings for several GPUs to training.config.distributed: FSDP, DeepSpeed, DDP,
strategies of Lightning, and accelerate's config file. The rows per step do not depend on the number
of GPUs, and the plan offloads what does not fit otherwise."""

from __future__ import annotations

import re
from pathlib import Path

from expert.core.files import read_json
from expert.manifest.migrate.migration import Entries, Migration, as_item, take, with_value
from expert.manifest.text.item import Item, is_comment, shown

_MAX_BYTES = 1_000_000
_AUTO = "replicated where everything fits each GPU, sharded where it does not"
_OFFLOADED = "the plan offloads to CPU memory only what does not fit otherwise"
_STRATEGIES: dict[str, str] = {
    **dict.fromkeys(("full_shard", "1", "hybrid_shard", "4"), "sharded"),
    **dict.fromkeys(
        ("shard_grad_op", "2", "hybrid_shard_zero2", "_hybrid_shard_zero2", "5"), "auto"
    ),
    **dict.fromkeys(("no_shard", "3"), "replicated"),
}
"""FSDP's sharding_strategy, by name and by number."""
_TYPES: dict[str, str | None] = {
    **dict.fromkeys(("multi_gpu", "multi_cpu", "ddp"), "replicated"),
    **dict.fromkeys(("fsdp", "fsdp2"), "sharded"),
    **dict.fromkeys(("no", "deepspeed"), None),  # deepspeed_config says more
}
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_sharded", "dp", "horovod")
_FSDP = ("fsdp", "fsdp_native", "fullyshardeddataparallel", "fsdp_cpu_offload", "modelparallel")
_STAGE_IN_A_NAME = re.compile(r"(?:zero|stage|z|ds)[-_]?([0-3])(?!\d)", re.IGNORECASE)
# Keys of a DeepSpeed file: the key of Expert, and the names under which a manifest may have it.
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "batch_size", "batch_tokens")
_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation", "grad_accum")
_CLIPPING = ("max_grad_norm", "gradient_clip", "grad_clip", "gradient_clipping")
_SHARED_VALUES = {
    "train_micro_batch_size_per_gpu": ("batch_size", _BATCH),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", _ACCUMULATION),
    "gradient_clipping": ("max_grad_norm", _CLIPPING),
}


def _set_engine(work: Migration, zone: Entries, value: str, item: Item, more: str = "") -> None:
    """Set `distributed`; for auto only report it, with `more` as the reason."""
    if value == "auto":
        work.read_as(item, f"training.config.distributed: auto ({more or _AUTO})")
    else:
        work.convert(zone, "distributed", value, item)


# --- FSDP ----------------------------------------------------------------------------------------


def read_fsdp(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `fsdp`: words such as `full_shard auto_wrap`, a list of them, or true."""
    if item.value is False or item.value in ("", []):
        return
    listed = item.value if isinstance(item.value, list) else None
    parts = [str(each.value) for each in listed] if listed is not None else str(item.value).split()
    words = {word.lower().strip(",") for word in parts}
    unknown = words - _STRATEGIES.keys() - {"true", "offload", "auto_wrap"}
    if unknown or isinstance(item.value, dict):
        work.refuse(item, "full_shard, shard_grad_op, hybrid_shard, no_shard, offload, auto_wrap")
        return
    for value in {_STRATEGIES[word] for word in words if word in _STRATEGIES} or {"sharded"}:
        _set_engine(work, zone, value, item)
    if "offload" in words:
        work.supersede(item, f"offload: {_OFFLOADED}")


def read_fsdp_config(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `fsdp_config`; its keys may start with `fsdp_`. Without an `fsdp` key it means FSDP;
    with one, even empty, that decides."""
    fields = _object(work, item, "an object, or the path of a JSON file").fields()
    keys = [key for key in fields if not is_comment(key)]
    means_fsdp = "fsdp" not in zone and bool(keys)
    strategy = any(key.removeprefix("fsdp_") == "sharding_strategy" for key in keys)
    if means_fsdp and not strategy and "distributed" not in zone:
        _set_engine(work, zone, "sharded", item)
    for key in keys:
        entry = fields[key]
        name = f"fsdp_{key.removeprefix('fsdp_')}"
        if name in FSDP_KEYS and entry.value is not None:
            FSDP_KEYS[name](work, zone, entry)
        elif name not in FSDP_KEYS:
            zone[name] = entry  # reported by unsupported_keys.py


def _strategy(work: Migration, zone: Entries, item: Item) -> None:
    value = _STRATEGIES.get(str(item.value).lower())
    if value is None:
        work.refuse(item, "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD")
    else:
        _set_engine(work, zone, value, item)


def _reshard(work: Migration, zone: Entries, item: Item) -> None:
    """A flag in FSDP2; accelerate also writes a strategy there."""
    if item.value is False:
        work.supersede(item, "blocks are always resharded after the forward pass")
    elif isinstance(item.value, str) and item.value.lower() not in ("true", "auto"):
        _strategy(work, zone, item)


def _offload(work: Migration, zone: Entries, item: Item) -> None:
    if item.value is True:
        is_alone = "fsdp_config" not in item.path and "distributed" not in zone
        if is_alone and item.key == "fsdp_cpu_offload":
            _set_engine(work, zone, "sharded", item)  # torchtune has no other key for FSDP
        work.supersede(item, _OFFLOADED)
    elif item.value is not False:
        work.refuse(item, "true or false")


def _checkpointing(work: Migration, zone: Entries, item: Item) -> None:
    if item.value is True:
        work.convert(zone, "gradient_checkpointing", True, item)
    elif item.value is not False:
        work.refuse(item, "true or false")


FSDP_KEYS = {
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _offload,
    "fsdp_cpu_offload": _offload,
    "fsdp_activation_checkpointing": _checkpointing,
}


# --- DeepSpeed -----------------------------------------------------------------------------------


def read_deepspeed(work: Migration, zone: Entries, item: Item) -> None:
    """Convert a ZeRO config: its path, the object, or accelerate's deepspeed_config."""
    if item.value in (False, "", []) or item.value == {}:
        return
    item = _object(work, item, "the path of a ZeRO config, or an object")
    if not isinstance(item.value, dict):
        return
    fields = {key: entry for key, entry in item.value.items() if not is_comment(key)}
    file = take(fields, "deepspeed_config_file")
    if isinstance(file.value, str) and file.value not in ("", "none"):
        read_deepspeed(work, zone, file)
    details = dict(take(fields, "zero_optimization").fields())
    stage = details.pop("stage", None) or fields.pop("zero_stage", None)
    if stage is not None:
        _stage(work, zone, stage)
    elif file.value is None:
        work.read_as(item, f"training.config.distributed: auto (no ZeRO stage: {_AUTO})")
    _offloads(work, {**details, **fields})
    _values(work, zone, fields)
    _unused(work, item, details, fields)


def _stage(work: Migration, zone: Entries, item: Item) -> None:
    """ZeRO-0 replicates; 1 and 2 shard gradients and optimizer state, which are small for adapters;
    3 shards the weights too."""
    meaning = {0: "replicated", 1: "auto", 2: "auto", 3: "sharded"}
    stage = item.value if isinstance(item.value, int) and not isinstance(item.value, bool) else None
    if stage not in meaning:
        work.refuse(item, "0, 1, 2 or 3")
        return
    _set_engine(work, zone, meaning[stage], item, f"ZeRO-{stage}; {_AUTO}")


def _offloads(work: Migration, fields: Entries) -> None:
    for key in ("offload_optimizer", "offload_param"):
        nested = fields.get(key, Item(None)).get("device")
        device = nested or fields.get(f"{key}_device", Item(None))
        word = str(device.value).lower()
        if word not in ("none", "null"):
            more = "; nvme is not supported" if word == "nvme" else ""
            work.supersede(device, f"{_OFFLOADED}{more}")


def _values(work: Migration, zone: Entries, fields: Entries) -> None:
    """Convert values that a manifest may also have; they must agree."""
    config = work.config.fields() if work.config is not None else {}
    zones = [zone, work.root, work.section("training"), config]
    for key, (home, names) in _SHARED_VALUES.items():
        item = take(fields, key)
        if item.value not in (None, "auto"):
            _set_or_compare(work, zones, names, home, item)
    for key in ("bf16", "fp16"):
        enabled = take(fields, key).get("enabled") or Item(None)
        in_manifest = any(key in section for section in zones)
        if enabled.value is True or (enabled.value is False and in_manifest):
            _set_or_compare(work, zones, (key,), key, enabled)
    total = take(fields, "train_batch_size")
    if total.value not in (None, "auto"):
        text = "rows per step are batch_size × gradient_accumulation_steps on any number of GPUs"
        work.supersede(total, text)


def _set_or_compare(
    work: Migration, zones: list[Entries], names: tuple[str, ...], home: str, item: Item
) -> None:
    present = next((zone[name] for zone in zones for name in names if name in zone), None)
    if present is None or present.value in (None, "auto"):
        zones[0][home] = item
        work.read_as(item, f"training.config.{home}: {shown(item.plain())}")
    elif present.plain() != item.plain():
        work.conflict(item, present)


def _unused(work: Migration, item: Item, details: Entries, fields: Entries) -> None:
    """Report all keys that only DeepSpeed needs."""
    for key, instead in (
        ("optimizer", "optim, learning_rate, betas, adam_epsilon and weight_decay"),
        ("scheduler", "lr_scheduler and warmup_steps"),
        ("activation_checkpointing", "gradient_checkpointing"),
    ):
        section = take(fields, key)
        if section.value:
            work.supersede(section, f"keys of training.config decide: {instead}")
    known = ("offload_optimizer", "offload_param")
    names = [key for key in (*details, *fields) if key.removesuffix("_device") not in known]
    if names:
        text = "weights are sharded block by block, which needs no"
        work.supersede(item, f"{text} {', '.join(sorted(names))}")


# --- DDP, strategies, accelerate -----------------------------------------------------------------


def read_strategy(work: Migration, zone: Entries, item: Item) -> None:
    """Convert `strategy` of Lightning and LitGPT: a name, or a class with its arguments."""
    name = item.get("class_path") if isinstance(item.value, dict) else item
    word = str(name.value).rpartition(".")[2] if name is not None else ""
    word = re.sub(r"strategy$", "", word.lower())
    stage = re.fullmatch(r"deepspeed(?:_stage_([123]))?(_offload)?", word)
    if word in ("", "auto", "single_device", "singledevice"):
        work.read_as(item, f"training.config.distributed: auto ({_AUTO})")
    elif word.startswith("ddp_find_unused_parameters") or word in _DDP:
        _set_engine(work, zone, "replicated", item)
    elif word in _FSDP:
        _set_engine(work, zone, "sharded", item)
        if word.endswith("offload"):
            work.supersede(item, _OFFLOADED)
    elif stage is not None:
        _stage(work, zone, with_value(item, int(stage[1] or 2)))
        if stage[2]:
            work.supersede(item, _OFFLOADED)
    else:
        work.refuse(item, "auto, ddp, fsdp or deepspeed_stage_1 to 3")


def read_distributed_type(work: Migration, zone: Entries, item: Item) -> None:
    word = str(item.value).lower()
    if item.value is False:
        return
    if word not in _TYPES:
        work.refuse(item, "NO, MULTI_GPU, FSDP or DEEPSPEED")
        return
    value = _TYPES[word]
    if value is not None:
        _set_engine(work, zone, value, item)
    elif word == "deepspeed" and not {"deepspeed", "deepspeed_config"} & zone.keys():
        work.read_as(item, f"training.config.distributed: auto (no ZeRO stage: {_AUTO})")
    elif word == "no":
        work.report("note", item, "one process, unless --gpus says otherwise")


# --- a file next to the manifest -----------------------------------------------------------------


def _object(work: Migration, item: Item, expected: str) -> Item:
    """`item`, or the content of the JSON file it names; anything but an object is a problem."""
    if isinstance(item.value, str):
        return _read_file(work, item)
    if not isinstance(item.value, dict):
        work.refuse(item, expected)
    return item


def _read_file(work: Migration, item: Item) -> Item:
    """The content of a JSON file; for a missing one, the ZeRO stage in its name."""
    named = Path(str(item.value).replace("\\", "/"))
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
    missing = f"there is no {item.value}"
    if stage is None or not item.key.startswith("deepspeed"):
        work.without_effect(item, f"{missing}; distributed: auto decides")
        return Item(None)
    work.report("note", item, f"{missing}: read as ZeRO-{stage[1]}, from its name")
    offload = {"device": "cpu"} if "offload" in named.stem else {}
    zero = {"stage": int(stage[1]), "offload_optimizer": offload}
    return as_item({"zero_optimization": zero}, item, named.name)


DISTRIBUTED_KEYS = {
    "distributed_type": read_distributed_type,
    "fsdp_config": read_fsdp_config,
    "fsdp": read_fsdp,
    **FSDP_KEYS,
    "deepspeed": read_deepspeed,
    "deepspeed_config": read_deepspeed,
    "strategy": read_strategy,
}
"""In the order of conversion: each may look for more specific keys after it."""
