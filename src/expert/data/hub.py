"""Rows of a data set on the Hugging Face hub, through the optional package `datasets`."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

from expert.data.records import BadRow, DataError, Row
from expert.data.streams import not_here, unusable

_BATCH_ROWS = 1000
_SLICE = re.compile(r"(?P<split>[^\[]+)\[(?P<start>\d*):(?P<end>\d*)\]")
_NETWORK = ("connect", "offline", "network", "resolve", "timed out", "max retries", "unreachable")


def read_hub(
    name: str, *, split: str, config: str | None, streaming: bool
) -> Iterator[Row | BadRow]:
    """The rows of `name`, downloaded into the hub's own cache or streamed."""
    dataset = _load(name, split=split, config=config, streaming=streaming)
    from expert.data.arrow_rows import rows_of_batches

    tables = dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    batches = (batch for table in tables for batch in table.to_batches())
    try:
        yield from rows_of_batches(batches, f"{name}::{split}")
    except OSError as error:
        raise _told(name, split, error) from error


def hub_fingerprint(name: str, *, split: str, config: str | None, streaming: bool) -> str:
    """What changes when the rows do. Streamed rows are not looked at: the name has to do."""
    if streaming:
        return hashlib.sha256(json.dumps([name, split, config]).encode()).hexdigest()
    fingerprint: str = _load(name, split=split, config=config, streaming=False)._fingerprint
    return hashlib.sha256(fingerprint.encode()).hexdigest()


def _load(name: str, *, split: str, config: str | None, streaming: bool) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise unusable(
            name,
            "reading from the hub needs the package 'datasets'",
            "pip install 'expert-cli[hub]'",
        ) from error
    sliced = _SLICE.fullmatch(split) if streaming else None
    if streaming and "[" in split and sliced is None:
        raise unusable(
            f"{name}::{split}",
            "streamed rows can be cut by their numbers only",
            "write the slice as [start:end], or set streaming: false",
        )
    try:
        dataset = datasets.load_dataset(
            name, config, split=sliced["split"] if sliced else split, streaming=streaming
        )
    except Exception as error:  # the hub's client raises dozens of kinds
        raise _told(name, split, error) from error
    if sliced:
        start = int(sliced["start"] or 0)
        dataset = dataset.skip(start)
        if sliced["end"]:
            dataset = dataset.take(max(0, int(sliced["end"]) - start))
    return dataset


def _told(name: str, split: str, error: Exception) -> DataError:
    """A failure of the hub in words."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 300:
        text = text[:300] + " …"
    lower = f"{type(error).__name__} {text}".lower()
    if any(word in lower for word in _NETWORK):
        what = f"the hub could not be reached: {text}"
        fix = "check the network, or download the data set elsewhere and name its folder as path"
        return not_here(f"{name}::{split}", what, fix)
    if "notfound" in lower or "gated" in lower or "doesn't exist" in lower:
        what = f"the hub does not give it: {text}"
        fix = "check the id; a private or gated data set needs HF_TOKEN in the environment"
    else:
        what = f"it could not be loaded from the hub: {text}"
        fix = "check the id, the split and the configuration: id::split::configuration"
    return unusable(f"{name}::{split}", what, fix)
