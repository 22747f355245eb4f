"""Files of TRL, Transformers, Unsloth and LLaMA-Factory, whose keys are arguments of Transformers:
their stages, parts of hub data sets, packed batches and lengths."""

from __future__ import annotations

from expert.manifest.migrate.aliases import canonical_path
from expert.manifest.migrate.migration import Entries, Migration, take, with_value
from expert.manifest.peers.llama_factory import read_named_sets
from expert.manifest.peers.preferences import read_preferences
from expert.manifest.peers.rows import hub_path, put_rows
from expert.manifest.text.item import Item

# Model keys of TRL, Transformers, LLaMA-Factory and Unsloth.
_MODEL_NAMES = {"model_name_or_path", "model_name"}
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_LLAMA_FACTORY_KEYS = {
    *("stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing", "dataset_dir"),
    "quantization_bit",
}
_SPLITS = ("train", "test")
# Where ours would train differently.
_DEFAULTS = {
    **{"validation_split": 0, "load_best_model_at_end": False},
    **{"lr_scheduler": "linear", "warmup_steps": 0},
}
_TRL_DEFAULTS = {"adapter_type": "full", "learning_rate": 2e-5, "max_seq_length": 1024}


def read_arguments(work: Migration) -> None:
    _read_stages(work)
    has_arguments = bool({"model_name_or_path", "per_device_train_batch_size"} & work.root.keys())
    is_trl = bool({"dataset_name", "dataset_mixture", "dataset_mixer"} & work.root.keys())
    _read_hub_parts(work)
    _read_mixer(work)
    _read_mixture(work)
    is_theirs = bool(_MODEL_NAMES & work.root.keys()) and not work.is_expert_manifest
    in_model = work.root.get("model", Item(None)).fields().keys()
    if is_theirs or _MODEL_NAMES & in_model:
        _read_packed_batches(work)
    if is_theirs:
        _read_lengths(work)
        if not work.trainer and has_arguments:
            work.trainer = "TRL" if is_trl else "Transformers"
            work.defaults = {**(_TRL_DEFAULTS if is_trl else {}), **_DEFAULTS}
    if not work.is_expert_manifest and (is_theirs or work.trainer or "rl" in work.root):
        is_axolotl = bool({"base_model", "datasets"} & work.root.keys())
        read_preferences(work, work.trainer or ("Axolotl" if is_axolotl else "TRL"))


def _read_stages(work: Migration) -> None:
    """Convert `stage` of LLaMA-Factory, except for preferences."""
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
        if key == "rl" and item.value in (None, False):
            root.pop(key, None)
        elif key == "stage" and word == "sft":  # in a whole manifest, others describe the expert
            work.read_as(root.pop(key), "training.config.method: sft")
        elif key == "stage" and word == "pt":
            text = work.dataset.setdefault("text_field", with_value(root.pop(key), "text")).value
            work.read_as(item, f"training.dataset.text_field: {text} (all of it is trained on)")


def _read_hub_parts(work: Migration) -> None:
    """Convert dataset_config, dataset_train_split and dataset_test_split."""
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


def _read_mixer(work: Migration) -> None:
    """Convert dataset_mixer, shares of data sets by their names, with the names of their splits."""
    item, splits = take(work.root, "dataset_mixer"), take(work.root, "dataset_splits")
    subsets = take(work.root, "dataset_configs")
    if item.value is None:
        return
    shares, names = item.fields(), splits.entries()
    of_kind = [[each for each in names if part in str(each.value)] for part in _SPLITS]
    if any(len(each) > 1 for each in of_kind) or len(names) > sum(map(len, of_kind)):
        what = "one split to train on and one to test on are read"
        work.problem(splits, what, "name the rows in training.dataset.tasks")
    configs = subsets.entries() or [Item(None)] * len(shares)
    if len(configs) != len(shares):
        work.problem(subsets, "is not one for each data set", "name one for each of dataset_mixer")
        return
    train, test = (next(iter(each), Item(None)) for each in of_kind)
    paths = [with_value(share, name) for name, share in shares.items()]
    sets = [
        {"path": hub_path(path, train, config), "weight": share}
        for path, config, share in zip(paths, configs, shares.values(), strict=True)
    ]
    put_rows(work, item, sets)
    if test.value is not None and len(paths) == 1:
        work.put("training.dataset.validation_path", hub_path(paths[0], test, configs[0]))
    elif test.value is not None:
        work.report("warning", splits, "rows are held out of the training rows instead")


def _read_mixture(work: Migration) -> None:
    """Convert dataset_mixture, whose weights are shares of the rows, as here."""
    item, sets = take(work.root, "dataset_mixture"), list[Entries]()
    for entry in (item.get("datasets") or Item(None)).entries():
        keys = entry.fields()
        path, split, subset = (take(keys, key) for key in ("id", "split", "config"))
        sets.append({"path": hub_path(path, split, subset), "weight": take(keys, "weight")})
        for key in keys.keys() - {"columns"}:
            work.unused(keys[key])
    if any(each["path"].value for each in sets):
        put_rows(work, item, sets)
    elif item.value is not None:
        work.refuse(item, "datasets: a list of entries with an id")
        work.seen.add("no rows")
    size = item.get("test_split_size") or Item(None)
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
