"""Batch sizes that count packed sequences, where ours count rows: their tokens are comparable."""

from __future__ import annotations

from expert.manifest.migrate.migration import Migration
from expert.manifest.text.item import Item

_LENGTHS = ("cutoff_len", "max_length", "max_seq_length", "max_seq_len")
_SIGNS_OF_LLAMA_FACTORY = ("stage", "finetuning_type", "lora_target", "cutoff_len", "neat_packing")
_DEFAULT_LENGTHS = {"LLaMA-Factory": 2048, "TRL": 1024}


def read_packed_batches(work: Migration) -> None:
    """`per_device_train_batch_size` of TRL and LLaMA-Factory, beside `packing: true`. Their files
    name the model so; in others the key is another word for our rows."""
    if "model_name_or_path" not in work.root:
        return
    count = work.root.get("per_device_train_batch_size")
    packing = [work.root[key] for key in ("packing", "neat_packing") if key in work.root]
    if count is None or not _is_number(count) or not any(item.value is True for item in packing):
        return
    if "batch_size" in work.root or "batch_tokens" in work.root or "streaming" in work.dataset:
        return
    theirs = any(sign in work.root for sign in _SIGNS_OF_LLAMA_FACTORY)
    length = next((work.root[key] for key in _LENGTHS if key in work.root), None)
    places = _DEFAULT_LENGTHS["LLaMA-Factory" if theirs else "TRL"]
    if length is not None:
        if not _is_number(length):
            return  # reported as any wrong value
        places = length.value
    del work.root["per_device_train_batch_size"]
    put_batch_tokens(work, count, places)


def put_batch_tokens(work: Migration, count: Item, places: int) -> None:
    """So many packed sequences of `places` tokens make a step."""
    tokens = count.value * places
    work.root["batch_tokens"] = Item(tokens, count.path, count.line)
    text = f"training.config.batch_tokens: {tokens} ({count.value} packed sequences of {places} "
    work.read_as(count, f"{text}tokens; rows by their mean length)")


def _is_number(item: Item) -> bool:
    return isinstance(item.value, int) and not isinstance(item.value, bool)
