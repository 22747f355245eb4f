"""Reads JSON files that may come from someone else: plain files of limited size, with finite
numbers and limited nesting."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from expert.core.errors import ExpertError
from expert.core.links import LinkRefused, open_plain
from expert.core.text import gib

MAX_BYTES = 128 * 2**20
"""A validation of 100,000 cases takes about 50 MB; everything else is far smaller."""
MAX_DEPTH = 100
MAX_NUMBER = 10**50
"""Random generators store 128-bit numbers, up to 10**38; float() fails at 10**309."""
_NESTED = f"it is nested more than {MAX_DEPTH} deep"


class InvalidFileError(ExpertError, ValueError):
    """A file whose contents are not what its name promises."""


def read_stored_json(path: Path) -> Any:
    """Read a JSON file; InvalidFileError if it is invalid, OSError if it cannot be read."""
    with open(open_plain(path, os.O_RDONLY), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_BYTES:
            raise _bad(path, f"has {gib(size)}, at most {gib(MAX_BYTES)} are read")
        raw = stream.read(MAX_BYTES)
    try:
        return parse_json(raw)
    except ValueError as error:
        raise _bad(path, f"is not JSON as Expert writes it: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    value = read_stored_json(path)
    if not isinstance(value, dict):
        raise _bad(path, f"holds {json.dumps(value)[:20]}, expected an object")
    return value


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, InvalidFileError, LinkRefused):
        return {}


def parse_json(raw: bytes) -> Any:
    """Parse JSON with finite numbers and limited nesting; ValueError with the reason otherwise."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start:,} of the file is not UTF-8") from None
    except RecursionError:
        raise ValueError(_NESTED) from None
    _check([value])
    return value


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _check(value: list[Any]) -> None:
    """Check level by level: recursion would overflow on deep nesting."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = []
        for container in level:
            for item in container.values() if type(container) is dict else container:
                kind = type(item)
                if kind is dict or kind is list:
                    inner.append(item)
                elif (kind is float and not math.isfinite(item)) or (
                    kind is int and not -MAX_NUMBER < item < MAX_NUMBER
                ):
                    raise ValueError("a number is too large")
        if not inner:
            return
        level = inner
    raise ValueError(_NESTED)


def _bad(path: Path, what: str) -> InvalidFileError:
    fix = "it was changed after it was written, or comes from elsewhere: restore or remove it"
    return InvalidFileError(f"{path}: {what}  ({fix})")
