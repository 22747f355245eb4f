"""Batch sizes that count packed sequences, where ours count rows: their tokens are comparable."""

from __future__ import annotations

from expert.core.text import counted
from expert.manifest.migrate.migration import Migration
from expert.manifest.text.item import Item

_MODEL_NAMES = ("model_name_or_path", "model_name")
_PACKING = ("packing", "neat_packing", "sample_packing")
_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_SIGNS_OF_LLAMA_FACTORY = ("stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing")
_DEFAULT_LENGTHS = {"LLaMA-Factory": 2048, "TRL": 1024}


def read_packed_batches(work: Migration) -> None:
    """`per_device_train_batch_size` of TRL, Unsloth and LLaMA-Factory, beside `packing: true`.
    Their files name the model so; in others the key is another word for our rows."""
    key = "per_device_train_batch_size"
    named = {*work.root, *work.root.get("model", Item(None)).fields()}
    if named.isdisjoint(_MODEL_NAMES) or key not in work.root:
        return
    packing = [work.root[name] for name in _PACKING if name in work.root]
    if not any(item.value is True for item in packing) or "streaming" in work.dataset:
        return
    if "batch_size" in work.root or "batch_tokens" in work.root:
        return
    theirs = any(sign in work.root for sign in _SIGNS_OF_LLAMA_FACTORY)
    length = next((work.root[name] for name in _LENGTHS if name in work.root), None)
    places = _DEFAULT_LENGTHS["LLaMA-Factory" if theirs else "TRL"]
    places = places if length is None else number_in(length)
    if number_in(work.root[key]) and places:  # else reported as any wrong value
        put_batch_tokens(work, work.root.pop(key), places)


def put_batch_tokens(work: Migration, count: Item, places: int) -> None:
    """So many packed sequences of `places` tokens make a step."""
    sequences = number_in(count)
    tokens = sequences * places
    work.root["batch_tokens"] = Item(tokens, count.path, count.line)
    packed = counted(sequences, "packed sequence")
    text = f"training.config.batch_tokens: {tokens} ({packed} of {places} tokens; rows by their "
    work.read_as(count, f"{text}mean length)")


def number_in(item: Item) -> int:
    """The whole number that is given; 0 where it is none."""
    value = item.value
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
