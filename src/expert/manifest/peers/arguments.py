"""Files of TRL, Transformers, Unsloth and LLaMA-Factory, whose keys are arguments of Transformers:
their stages, parts of hub data sets, packed batches and lengths."""

from __future__ import annotations

from expert.manifest.migrate.aliases import canonical_path
from expert.manifest.migrate.migration import Migration, take, with_value
from expert.manifest.peers.llama_factory import read_named_sets
from expert.manifest.peers.rows import hub_path, put_rows
from expert.manifest.text.item import Item

# Model keys of TRL, Transformers, LLaMA-Factory and Unsloth.
_MODEL_NAMES = {"model_name_or_path", "model_name"}
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_LLAMA_FACTORY_KEYS = {
    *("stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing", "dataset_dir"),
    "quantization_bit",
}
_ARGUMENTS = {
    *("model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type"),
}
"""At least one of them is in a file with arguments of Transformers."""
_ADAPTER_KEYS = {
    *("adapter_type", "use_peft", "use_dora", "rank", "alpha", "dropout", "target_modules"),
    *("load_in_4bit", "load_in_8bit", "quantization"),
}
# Where ours would train differently.
_DEFAULTS = {
    **{"validation_split": 0, "load_best_model_at_end": False},
    **{"lr_scheduler": "linear", "warmup_steps": 0},
}
OTHER_METHODS = ("dpo", "ppo", "kto", "rm", "orpo", "ipo", "simpo", "grpo", "gdpo", "rloo")
"""Values of `stage` and `rl` that are not supervised fine-tuning."""


def read_arguments(work: Migration) -> None:
    _read_stages(work)
    has_mixture = "dataset_mixture" in work.root
    _read_hub_parts(work)
    _read_mixture(work)
    is_theirs = bool(_MODEL_NAMES & work.root.keys()) and not work.is_expert_manifest
    in_model = work.root.get("model", Item(None)).fields().keys()
    if is_theirs or _MODEL_NAMES & in_model:
        _read_packed_batches(work)
    if is_theirs:
        _read_lengths(work)
        _name_trainer(work, has_mixture=has_mixture)


def _read_stages(work: Migration) -> None:
    """Refuse methods in `stage` (LLaMA-Factory) and `rl` (Axolotl) other than SFT."""
    root, none = work.root, Item(None)
    is_factory = bool(_LLAMA_FACTORY_KEYS & root.keys()) and not work.is_expert_manifest
    if is_factory and {"stage", "finetuning_type"} & root.keys():
        work.trainer, work.defaults = "LLaMA-Factory", {"learning_rate": 5e-5, **_DEFAULTS}
        if root.get("finetuning_type", Item("lora")).value == "lora":
            work.defaults["rank"] = 8
    if is_factory:
        read_named_sets(work)
    for key in ("stage", "rl"):
        item = root.get(key, none)
        word = str(item.value).lower()
        if word in OTHER_METHODS:
            del root[key]
            work.seen.add("another method")
            what = f"{word} is not supported: only sft (supervised fine-tuning) is"
            work.problem(item, what, "use rows with answers, and leave the key out")
        elif key == "rl" and item.value in (None, False):
            root.pop(key, None)
        elif key == "stage" and word == "sft":  # in a whole manifest, others describe the expert
            work.read_as(root.pop(key), "training.config.method: sft")
        elif key == "stage" and word == "pt":
            text = work.dataset.setdefault("text_field", with_value(root.pop(key), "text"))
            home = f"training.dataset.text_field: {text.value} (all of it is trained on)"
            work.read_as(item, home)


def _name_trainer(work: Migration, *, has_mixture: bool) -> None:
    """Tell TRL from other files with arguments of Transformers. Without PEFT it trains all weights,
    and by itself cuts rows at 1024 tokens."""
    is_trl = has_mixture or "dataset_name" in work.root
    if work.trainer or not _ARGUMENTS & work.root.keys():
        return
    work.trainer, work.defaults = "TRL" if is_trl else "Transformers", dict(_DEFAULTS)
    if is_trl:
        work.defaults |= {"learning_rate": 2e-5, "max_seq_length": 1024}
        keys = {(canonical_path(key) or key).rpartition(".")[2] for key in work.root}
        if not keys & _ADAPTER_KEYS:
            work.defaults["adapter_type"] = "full"


def _read_hub_parts(work: Migration) -> None:
    """Convert dataset_config, dataset_train_split and dataset_test_split."""
    if work.root.get("dataset_mixer", Item(None)).value:
        work.seen.add("no rows")  # refused
    names = [f"dataset_{part}" for part in ("config", "train_split", "test_split")]
    config, train, test = (take(work.root, name) for name in names)
    given = [item for item in (config, train, test) if item.value is not None]
    path = work.root.get("dataset_name", Item(None))
    if given and not isinstance(path.value, str):
        for item in given:
            work.problem(item, "needs dataset_name, which is missing", "add dataset_name")
    elif given:
        work.root["dataset_name"] = hub_path(path, train, config)
        for item in (config, train):
            if item.value is not None:
                text = f"training.dataset.path: {work.root['dataset_name'].value}"
                work.read_as(item, text)
        if test.value is not None:
            held_out = work.dataset.setdefault("validation_path", hub_path(path, test, config))
            work.read_as(test, f"training.dataset.validation_path: {held_out.value}")


def _read_mixture(work: Migration) -> None:
    """Convert dataset_mixture, whose weights are shares of the rows, as here."""
    item = take(work.root, "dataset_mixture")
    fields, sets = item.fields(), []
    for entry in take(fields, "datasets").entries():
        keys = entry.fields()
        path, split, subset = (take(keys, key) for key in ("id", "split", "config"))
        found = {"path": hub_path(path, split, subset)}
        sets.append(found | ({"weight": keys.pop("weight")} if "weight" in keys else {}))
        for key in [key for key in keys if key != "columns"]:
            work.unused(keys[key])
    if item.value is not None and not any(each["path"].value for each in sets):
        work.refuse(item, "datasets: a list of entries with an id")
        work.seen.add("no rows")
    elif sets:
        put_rows(work, item, sets)
    size = take(fields, "test_split_size")
    if size.whole:
        text = "a number of rows there; here validation_split is a share, and 0.1 unless set"
        work.report("warning", size, text)
    elif size.value is not None:
        work.put("training.dataset.validation_split", size)


def _read_packed_batches(work: Migration) -> None:
    """With packing, per_device_train_batch_size counts packed sequences."""
    root = work.root
    count = root.get("per_device_train_batch_size", Item(None))
    packs = any(root.get(key, Item(None)).value is True for key in ("packing", "neat_packing"))
    if not count.whole or not packs or "streaming" in work.dataset:
        return  # the schema reports what is not a number
    if {"batch_size", "batch_tokens"} & root.keys():
        return
    default = 2048 if _LLAMA_FACTORY_KEYS & root.keys() else 1024
    length = next((root[name].whole for name in _LENGTHS if name in root), default)
    if length:
        del root["per_device_train_batch_size"]
        work.put_batch_tokens(count, length)


def _read_lengths(work: Migration) -> None:
    """There, steps overrule epochs and shares. In Expert the epochs may end a run first, so they
    are set high enough: an epoch has at least one step."""
    root = work.root
    limit, warmup = (root.get(key, Item(None)) for key in ("max_steps", "warmup_steps"))
    if limit.whole > 0 and "epochs" not in root:  # a key of Expert: whichever is reached first
        for key in [key for key in root if canonical_path(key) == "training.config.epochs"]:
            item = root.pop(key)
            if item.value is not None:
                work.unused(item, "max_steps alone ends a run there")
        root["epochs"] = with_value(limit, limit.value)
        text = f"training.config.epochs: {limit.value} (so that max_steps ends the run)"
        work.read_as(limit, text)
    if warmup.whole > 0 and root.get("warmup_ratio", Item(None)).value:
        work.unused(root.pop("warmup_ratio"), "warmup_steps takes precedence there")
