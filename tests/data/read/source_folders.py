"""Data sets in folders written for tests, and what they are resolved to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from expert.data.read.sources import Source, Sources, iterate, resolve_sources
from expert.data.records import BadRow, DataError, Row
from expert.manifest.schema.dataset import DatasetSpec


def resolve(folder: Path, path: str | None = None, **fields: Any) -> Sources:
    return resolve_sources(DatasetSpec(path=path, **fields), folder)


def train_of(folder: Path, path: str, **fields: Any) -> Source:
    source = resolve(folder, path, **fields).train
    assert source is not None
    return source


def refusal(folder: Path, path: str | None = None, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        resolve(folder, path, **fields)
    return str(caught.value).replace(str(folder), "FOLDER").replace(os.sep, "/")


def names(source: Source | None, folder: Path) -> list[str] | None:
    if source is None:
        return None
    return [path.relative_to(folder).as_posix() for path in source.files]


def values(source: Source) -> list[dict[str, Any]]:
    found = list(iterate(source))
    assert [str(row) for row in found if isinstance(row, BadRow)] == []
    return [dict(row.values) for row in found if isinstance(row, Row)]


def fill(folder: Path, *files: str) -> None:
    """Files of one row each, which holds the file's own name."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"from": name}) + "\n", encoding="utf-8")


def refusal_while_reading(source: Source) -> str:
    with pytest.raises(DataError) as caught:
        list(iterate(source))
    return str(caught.value)
