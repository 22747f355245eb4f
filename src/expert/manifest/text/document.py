"""A manifest file as written: every value with its line, its path and the comments around it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from expert.core.errors import ManifestError, Problem

ROWS = (".csv", ".tsv", ".jsonl", ".txt", ".md", ".parquet", ".arrow")
"""Names of files that hold rows and are named by mistake."""
# The largest manifest seen in the wild has 13 kB; a megabyte is a mistake or an attack.
MAX_BYTES = 1_000_000
MAX_DEPTH = 60
# It has 300 values; 5,000 are read, or refused, in under half a second.
MAX_ITEMS = 5_000

SUFFIXES = (".json", ".yaml", ".yml")
FILE_NAMES = ("manifest.json", "manifest.yaml", "manifest.yml", "config.yaml")
"""What a manifest is called where only its folder is named, in the order they are looked for."""

Scalar = str | int | float | bool | None
Format = Literal["json", "yaml"]


@dataclass(slots=True)
class Item:
    """One value of the file, and where and how the user wrote it."""

    value: Scalar | list[Item] | dict[str, Item]
    path: str = ""
    line: int | None = None
    above: list[str] = field(default_factory=list)
    """YAML comment lines that stand over the key."""
    beside: str = ""
    """YAML comment that follows on the same line."""
    from_command_line: bool = False
    """Said with --set: the user's own word, which a downloaded file is not."""

    def fields(self) -> dict[str, Item]:
        """The entries of a mapping; nothing for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def get(self, *keys: str) -> Item | None:
        """The item below, or None as soon as one key is missing."""
        found: Item | None = self
        for key in keys:
            found = found.fields().get(key) if found else None
        return found

    def plain(self) -> Any:
        """Python data without comment keys."""
        if isinstance(self.value, dict):
            return {k: item.plain() for k, item in self.value.items() if not is_comment(k)}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def below(self, step: str | int) -> Item | None:
        """The entry of a mapping or list, or None."""
        if isinstance(self.value, dict):
            return self.value.get(str(step))
        if isinstance(self.value, list) and isinstance(step, int) and step < len(self.value):
            return self.value[step]
        return None

    def walk(self) -> Iterator[Item]:
        """This item and all below it, in file order."""
        yield self
        if isinstance(self.value, dict):
            for item in self.value.values():
                yield from item.walk()
        elif isinstance(self.value, list):
            for item in self.value:
                yield from item.walk()


@dataclass
class Document:
    """A parsed file. `problems` are those that did not stop the parser, such as doubled keys."""

    source: str
    folder: Path
    format: Format
    root: Item
    problems: list[Problem] = field(default_factory=list)
    closing_comments: list[str] = field(default_factory=list)


def is_comment(key: str) -> bool:
    """Keys that begin with an underscore are comments, at any depth."""
    return key.startswith("_")


def shown(value: Any) -> str:
    """A value as an error names it: short, with true, false and null as the user writes them."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, list) and len(value) > 8:
        text = f"a list of {len(value)}"
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def join(path: str, step: str | int) -> str:
    """`training.config` + `epochs` -> `training.config.epochs`; `adapters` + 0 -> `adapters[0]`."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step


def add_entry(entries: dict[str, Item], key: str, item: Item, problems: list[Problem]) -> None:
    """Put `item` under `key`; a doubled key is a problem unless it is a comment, which is kept."""
    if key not in entries:
        entries[key] = item
        return
    if not is_comment(key):
        what = f"key appears twice (first on line {entries[key].line})"
        problems.append(Problem(item.path, what, "remove one", item.line))
        return
    number = 2 if f"{key}_2" not in entries else len(entries) + 1
    while f"{key}_{number}" in entries:
        number += 1
    entries[f"{key}_{number}"] = item


def manifest_in(folder: Path) -> Path | None:
    """The manifest of an expert's folder, by its name; None where there is none."""
    with contextlib.suppress(OSError):  # a name that no file system has; reading says so
        return next((path for name in FILE_NAMES if (path := folder / name).is_file()), None)
    return None


def read_document(path: Path) -> Document:
    """Parse a manifest file; ManifestError with file and line where it cannot be parsed.

    A folder means the manifest in it.
    """
    path = manifest_in(path) or path
    source = str(path)
    text = _decode(source, _read_bytes(path, source))
    if path.suffix.lower() in {".yaml", ".yml"}:
        kind: Format = "yaml"
    elif path.suffix.lower() == ".json":
        kind = "json"
    else:
        kind = "json" if text.lstrip()[:1] in {"{", "["} else "yaml"
    return parse_document(text, kind, source=source, folder=path.parent)


def parse_document(
    text: str, kind: Format, *, source: str = "manifest", folder: Path = Path()
) -> Document:
    """Parse manifest text of a known format."""
    # Only the parser that is needed is imported: PyYAML costs 30 ms.
    if kind == "json":
        from expert.manifest.text.json_text import parse_json

        root, problems = parse_json(text, source)
        closing: list[str] = []
    else:
        from expert.manifest.text.yaml_text import parse_yaml

        root, problems, closing = parse_yaml(text, source)
    if not isinstance(root.value, dict):
        what = "the file is empty"
        if root.value is not None:
            what = f"got {shown(root.plain())}, expected an object"
        fix = "start with a name and a base model"
        if source.lower().endswith(ROWS):
            fix = f"rows are no manifest: expert new NAME --from {source} makes one for them"
        raise ManifestError(source, [Problem("", what, fix, root.line)])
    return Document(source, folder, kind, root, problems, closing)


def _read_bytes(path: Path, source: str) -> bytes:
    try:
        size = path.stat().st_size
        if size <= MAX_BYTES and path.is_file():
            with path.open("rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
            if len(raw) <= MAX_BYTES:
                return raw
            size = len(raw)  # more than the file system says: it grows, or is not on a disk
    except FileNotFoundError:
        near = _near_manifest(path)
        fix = f"did you mean {near}?" if near else "check the path"
        raise ManifestError(source, [Problem("", "no such file", fix)]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ManifestError(source, [Problem("", f"cannot be read: {reason}")]) from None
    if path.is_dir():
        raise ManifestError(
            source, [Problem("", "is a folder", "name the manifest file inside it")]
        )
    if not path.is_file():
        raise ManifestError(source, [Problem("", "is not a regular file")])
    raise ManifestError(
        source,
        [
            Problem(
                "",
                f"the file has {size:,} bytes; a manifest has at most {MAX_BYTES:,}",
                "is this a data file?",
            )
        ],
    )


def _near_manifest(path: Path) -> Path | None:
    """A manifest beside a path that is not there, or a folder with one, whose name is nearly the
    same."""
    import difflib

    beside: list[str] = []
    with contextlib.suppress(OSError):
        beside = [
            entry.name
            for entry in path.parent.iterdir()
            if manifest_in(entry) or (entry.is_file() and entry.suffix in SUFFIXES)
        ]
    near = difflib.get_close_matches(path.name, beside, 1, 0.75)
    return path.with_name(near[0]) if near else None


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
