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
from expert.core.text import counted, gib

MAX_BYTES = 128 * 2**20
"""A validation of 100,000 cases has about 50 MB; everything else is far smaller."""
MAX_DEPTH = 100
MAX_DIGITS = 50
"""Of a whole number: 128 bits, as random generators keep them, have 39; float() fails at 310."""


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
        value = json.loads(
            raw.decode("utf-8"), parse_constant=_no_number, parse_int=_whole, parse_float=_float
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start:,} of the file is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {counted(len(digits), 'digit')}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is not finite")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "nothing", bool: "yes or no"}.get(
        type(value), "a number"
    )


def _bad(path: Path, what: str) -> BadFile:
    fix = "it was changed since it was written, or comes from elsewhere: restore it, or remove it"
    return BadFile(f"{path}: {what}  ({fix})")
