"""Files of TRL, Transformers and Unsloth: parts of hub data sets, packed batches, and defaults that
differ from those of Expert."""

from __future__ import annotations

import re

from expert.manifest.migrate.aliases import canonical_path
from expert.manifest.migrate.migration import Migration, with_value
from expert.manifest.peers.rows import NamedDataset
from expert.manifest.text.item import Item

# Model keys of TRL, Transformers, LLaMA-Factory and Unsloth.
_MODEL_NAMES = {"model_name_or_path", "model_name"}
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_LLAMA_FACTORY_KEYS = {"stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing"}
_ADAPTER_KEYS = re.compile(r".*(lora|dora|peft|adapter|finetun).*|r|rank")
_LOSS_KEYS = {
    *("completion_only_loss", "assistant_only_loss", "train_on_responses_only"),
    *("train_on_prompt", "train_on_inputs"),
}


def read_trl(work: Migration) -> None:
    _read_hub_parts(work)
    is_theirs = bool(_MODEL_NAMES & work.root.keys()) and not work.is_expert_manifest
    in_model = work.root.get("model", Item(None)).fields().keys()
    if is_theirs or _MODEL_NAMES & in_model:
        _read_packed_batches(work)
    if is_theirs:
        _note_defaults(work)
        _read_lengths(work)


def _read_hub_parts(work: Migration) -> None:
    """Convert dataset_config, dataset_train_split and dataset_test_split."""
    if any(work.root.get(key, Item(None)).value for key in ("dataset_mixture", "dataset_mixer")):
        work.seen.add("no rows")  # refused
    names = [f"dataset_{part}" for part in ("config", "train_split", "test_split")]
    config, train, test = (work.root.pop(name, Item(None)) for name in names)
    given = [item for item in (config, train, test) if item.value is not None]
    path = work.root.get("dataset_name", Item(None))
    if given and not isinstance(path.value, str):
        for item in given:
            work.problem(item, "needs dataset_name, which is missing", "add dataset_name")
    elif given:
        source = NamedDataset("rows", path, path, train, config).source or path
        held_out = NamedDataset("rows", path, path, test, config).source or path
        work.root["dataset_name"] = source
        if test.value is not None:
            work.dataset.setdefault("validation_path", held_out)
            work.read_as(test, f"training.dataset.validation_path: {held_out.value}")
        for item in given:
            if item is not test:
                work.read_as(item, f"training.dataset.path: {source.value}")


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


def _note_defaults(work: Migration) -> None:
    """Note the differences to TRL, which trains all weights, on prompts too."""
    at, keys = work.root.get("dataset_name"), {*work.root, *work.section("training")}
    if at is not None and not any(map(_ADAPTER_KEYS.fullmatch, keys)):
        text = "a lora adapter is trained; TRL's default is all weights, use_peft: false here"
        work.report("note", at, text)
    if at is not None and not _LOSS_KEYS & keys:
        text = "only answers are trained on; TRL's default for conversations: train_on_prompt: true"
        work.report("note", at, text)


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
    share = root.get("warmup_ratio", Item(None))
    if warmup.whole > 0 and share.value:
        work.unused(root.pop("warmup_ratio"), "warmup_steps takes precedence there")
