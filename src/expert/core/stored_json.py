"""JSON that may come from somebody else, read in one place: a plain file of a sane size, whose
numbers are finite and whose nesting ends. Whoever reads a run folder can rely on that."""

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
"""A validation of 100,000 cases has about 50 MB; everything else is far smaller."""
MAX_DEPTH = 100
MAX_NUMBER = 10**50
"""Random generators keep numbers of 128 bits, which is 10**38; float() fails at 10**309."""
_NESTED = f"it is nested more than {MAX_DEPTH} deep"


class BadFile(ExpertError, ValueError):
    """A file that is not what its name says: where, what, and what to do."""


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """What a JSON file holds; BadFile where it is not one, OSError where it cannot be read."""
    with open(open_plain(path, os.O_RDONLY), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise _bad(path, f"has {gib(size)}, at most {gib(max_bytes)} are read")
        raw = stream.read(max_bytes)
    try:
        return parse_json(raw)
    except ValueError as error:
        raise _bad(path, f"is not JSON as Expert writes it: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise _bad(path, f"holds {_kind(found)}, expected an object")
    return found


def object_in(path: Path) -> dict[str, Any]:
    """The same where the file may be missing or damaged: nothing is known then."""
    try:
        return read_object(path)
    except (OSError, BadFile, LinkRefused):
        return {}


def parse_json(raw: bytes) -> Any:
    """A value of finite numbers that is not nested without end; ValueError says what is wrong."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start:,} of the file is not UTF-8") from None
    except RecursionError:
        raise ValueError(_NESTED) from None
    _check([value])
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def _check(value: list[Any]) -> None:
    """Level by level: a recursion would end where nesting does not."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = []
        for each in level:
            for item in each.values() if type(each) is dict else each:
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


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "nothing", bool: "yes or no"}.get(
        type(value), "a number"
    )


def _bad(path: Path, what: str) -> BadFile:
    fix = "it was changed since it was written, or comes from elsewhere: restore it, or remove it"
    return BadFile(f"{path}: {what}  ({fix})")
