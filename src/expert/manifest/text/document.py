"""Reads a JSON or YAML manifest; each value keeps its line and path."""

from __future__ import annotations

import contextlib
import errno
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.errors import ManifestError, Problem
from expert.core.files import NotRegular, read_bytes
from expert.core.text import shell_quoted
from expert.manifest.schema.file_formats import ALL_ENDINGS
from expert.manifest.text.item import Item, shown
from expert.manifest.text.json_text import parse_json
from expert.manifest.text.yaml_text import parse_yaml

# The largest real manifest seen has 13 kB; a megabyte is a mistake or an attack.
MAX_BYTES = 1_000_000

SUFFIXES = (".json", ".yaml", ".yml")
_ROWS = tuple(ending for ending in ALL_ENDINGS if ending not in SUFFIXES)
"""Endings of data files, for users who pass one by mistake."""
FILE_NAMES = ("manifest.json", "manifest.yaml", "manifest.yml", "config.yaml")
"""File names of a manifest in a folder, in the order of preference."""

_OWN_KEYS = frozenset(
    {"base_model", "base_models", "model", "training", "dataset", "datasets", "schema_version"}
)

Format = Literal["json", "yaml"]


@dataclass
class Document:
    """A parsed file. `problems` did not stop the parser, such as duplicate keys."""

    source: str
    folder: Path
    format: Format
    root: Item
    problems: list[Problem] = field(default_factory=list)


def manifest_in(folder: Path) -> Path | None:
    """The manifest in a folder, or None."""
    with contextlib.suppress(OSError):  # an invalid name, reported when it is read
        return next((path for name in FILE_NAMES if (path := folder / name).is_file()), None)
    return None


def is_other_tools_file(file: Path) -> bool:
    """Whether a file only has the name of a manifest: other tools write manifest.json, too.
    Unreadable files are reported by whoever reads them."""
    try:
        keys = read_document(file).root.fields().keys()
    except ManifestError:
        return False
    return not keys & _OWN_KEYS


def read_document(path: Path) -> Document:
    """Parse a manifest file, or the manifest in a folder; ManifestError with the line."""
    path = manifest_in(path) or path
    source, suffix, raw = str(path), path.suffix.lower(), _read_bytes(path)
    try:
        text = _decode(source, raw)
        is_json = suffix == ".json" or (
            suffix not in SUFFIXES and text.lstrip().startswith(("{", "["))
        )
        return parse_document(
            text, "json" if is_json else "yaml", source=source, folder=path.parent
        )
    except ManifestError:
        if path.name.lower().endswith(_ROWS):
            raise _data_file(source) from None
        raise


def _data_file(source: str) -> ManifestError:
    fix = f"expert new NAME --from {shell_quoted(source)} makes a manifest for it"
    return ManifestError(source, [Problem("", "this is a data file, not a manifest", fix)])


def parse_document(
    text: str, kind: Format, *, source: str = "manifest", folder: Path = Path()
) -> Document:
    root, problems = (parse_json if kind == "json" else parse_yaml)(text, source)
    if not isinstance(root.value, dict):
        what = "the file is empty"
        if root.value is not None:
            what = f"got {shown(root.plain())}, expected an object"
        fix = "add a name, a base model and a dataset"
        rows = root.value if kind == "json" and isinstance(root.value, list) else []
        if rows and all(isinstance(row.value, dict) for row in rows):
            raise _data_file(source)
        raise ManifestError(source, [Problem("", what, fix, root.line)])
    return Document(source, folder, kind, root, problems)


def _read_bytes(path: Path) -> bytes:
    fix = ""
    try:
        return read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        what, fix = "no such file", "check the path"
    except IsADirectoryError:
        what, fix = "is a folder", "name the manifest file inside it"
    except NotRegular:
        what = "is not a regular file"
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if getattr(error, "errno", None) == errno.EFBIG:
            what = f"the file is too large: a manifest has at most {MAX_BYTES:,} bytes"
            fix = f"if these are rows: expert new NAME --from {shell_quoted(str(path))}"
    raise ManifestError(str(path), [Problem("", what, fix)])


def _decode(source: str, raw: bytes) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ManifestError(source, [Problem("", "the file is UTF-16", "save it as UTF-8")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise ManifestError(source, [Problem("", what, "save it as UTF-8", line)]) from None
    control = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    if control:
        line = text.count("\n", 0, control.start()) + 1
        what = f"control character U+{ord(control[0]):04X}"
        raise ManifestError(source, [Problem("", what, "remove it", line)])
    return text
