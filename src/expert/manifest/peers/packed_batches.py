"""Converts batch sizes in packed sequences to batch_tokens: batch_size of Expert counts rows."""

from __future__ import annotations

from expert.core.text import counted
from expert.manifest.migrate.migration import Migration, with_value
from expert.manifest.text.item import Item

MODEL_NAMES = ("model_name_or_path", "model_name")
"""Model keys of TRL, Transformers, LLaMA-Factory and Unsloth."""
_PACKING = ("packing", "neat_packing", "sample_packing")
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_LLAMA_FACTORY_KEYS = ("stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing")
_DEFAULT_LENGTHS = {"LLaMA-Factory": 2048, "TRL": 1024}


def read_packed_batches(work: Migration) -> None:
    """Convert `per_device_train_batch_size` with `packing: true` in files of TRL, Unsloth and
    LLaMA-Factory, recognised by their model key; in others it is an alias of batch_size."""
    key = "per_device_train_batch_size"
    keys = {*work.root, *work.root.get("model", Item(None)).fields()}
    if keys.isdisjoint(MODEL_NAMES) or key not in work.root:
        return
    packing = [work.root[name] for name in _PACKING if name in work.root]
    if not any(item.value is True for item in packing) or "streaming" in work.dataset:
        return
    if "batch_size" in work.root or "batch_tokens" in work.root:
        return
    is_llama_factory = any(sign in work.root for sign in _LLAMA_FACTORY_KEYS)
    length = next((work.root[name] for name in _LENGTHS if name in work.root), None)
    places = _DEFAULT_LENGTHS["LLaMA-Factory" if is_llama_factory else "TRL"]
    places = places if length is None else int_or_zero(length)
    if int_or_zero(work.root[key]) and places:  # else the schema reports it
        put_batch_tokens(work, work.root.pop(key), places)


def put_batch_tokens(work: Migration, count: Item, places: int) -> None:
    """Set batch_tokens to `count` packed sequences of `places` tokens."""
    sequences = int_or_zero(count)
    tokens = sequences * places
    work.root["batch_tokens"] = with_value(count, tokens)
    packed = counted(sequences, "packed sequence")
    text = f"training.config.batch_tokens: {tokens} ({packed} of {places} tokens; rows by their "
    work.read_as(count, f"{text}mean length)")


def int_or_zero(item: Item) -> int:
    """The value if it is a whole number, else 0."""
    value = item.value
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
