"""Rows of a data set on the Hugging Face hub, read with the optional package `datasets`."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from expert.core.install import pip_install
from expert.data.read.streams import data_error, data_not_found
from expert.data.records import BadRow, DataError, Row

_NETWORK = ("connect", "offline", "network", "resolve", "timed out", "max retries", "unreachable")


def read_hub(
    name: str, *, split: str, config: str | None, streaming: bool
) -> Iterator[Row | BadRow]:
    """The rows of `name`, downloaded into the hub's cache or streamed."""
    dataset = _opened(name, config, split, streaming)
    from expert.data.read.arrow_rows import rows_of_batches

    tables = dataset.with_format("arrow").iter(batch_size=1000)
    batches = (batch for table in tables for batch in table.to_batches())
    try:
        yield from rows_of_batches(batches, f"{name}::{split}")
    except OSError as error:
        raise _hub_error(name, split, error) from error


def hub_fingerprint(name: str, *, split: str, config: str | None, streaming: bool) -> str:
    """Changes when the rows do. Of a stream only the name is hashed, not the rows."""
    if streaming:
        return hashlib.sha256(json.dumps([name, split, config]).encode()).hexdigest()
    fingerprint: str = _opened(name, config, split, False)._fingerprint
    return hashlib.sha256(fingerprint.encode()).hexdigest()


@cache
def _opened(name: str, config: str | None, split: str, streaming: bool) -> Any:
    """Open a data set. Cached, because a command opens it several times (to plan, hash and read):
    the hub is asked once, and all see the same rows."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        what = "reading from the hub needs the package 'datasets'"
        raise data_error(name, what, pip_install("hub")) from error
    if streaming and "[" in split:
        what = "streamed rows cannot be sliced"
        raise data_error(f"{name}::{split}", what, "set max_samples, or streaming: false")
    if not _answers():  # the client would try six times, for 25 s, before it uses its cache
        constants: Any = importlib.import_module("huggingface_hub.constants")
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the hub's client raises dozens of types
        raise _hub_error(name, split, error) from error


@cache
def _answers() -> bool:
    """Whether the hub answers within some seconds, asked once for all data sets."""
    try:
        endpoint = importlib.import_module("huggingface_hub.constants").ENDPOINT
        importlib.import_module("huggingface_hub").get_session().head(endpoint, timeout=5)
    except Exception:  # noqa: BLE001 - of two clients with different exceptions
        return False
    return True


def _hub_error(name: str, split: str, error: Exception) -> DataError:
    """A failure of the hub as an error with a fix."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text[:300] + " …" if len(text) > 300 else text
    lower = f"{type(error).__name__} {text}".lower()
    if any(word in lower for word in _NETWORK):
        fix = (
            "check the network; or download the data set elsewhere and name its folder as path, or "
            "set HF_HOME to a cache that holds it"
        )
        return data_not_found(f"{name}::{split}", f"the hub could not be reached: {text}", fix)
    fix = (
        "check the id, the split and the configuration: id::split::configuration; a private or "
        "gated data set needs HF_TOKEN in the environment"
    )
    return data_error(f"{name}::{split}", f"it could not be loaded from the hub: {text}", fix)
