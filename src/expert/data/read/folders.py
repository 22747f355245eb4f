"""The content of a folder: data files, assigned to splits by name, or a saved data set."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from expert.core.files import files_below, read_json
from expert.data.read.rows import FORMATS, suffix_format
from expert.data.read.streams import data_error
from expert.manifest.schema.file_formats import MARKDOWN, WITHOUT_ROWS
from expert.manifest.text.document import FILE_NAMES, is_other_tools_file

Split = Literal["train", "validation", "test"]

SPLIT_NAMES: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing", "holdout", "heldout"), "test"),
}
_HELD_OUT = re.compile(r"(hold|held)[^a-z]+out")
_OWN_CACHES = ("datasets_optimized", "__pycache__")
_ASKED_FORMATS = {"text": ("txt",), "csv": ("csv", "tsv")}


def _data_files(folder: Path, found: list[Path], format: str | None) -> list[Path]:
    """Those of the files found in a folder and its subfolders that have rows. Markdown and
    spreadsheets next to rows of another format are taken as documentation; folders of experts have
    rows of their own."""
    wanted = FORMATS if format is None else _ASKED_FORMATS.get(format, (format,))
    manifests = (path for path in found if path.name in FILE_NAMES and path.parent != folder)
    experts = {path.parent for path in manifests if not is_other_tools_file(path)}
    own = (path for path in found if experts.isdisjoint(path.parent.parents))
    formats = {path: suffix_format(path) for path in own}
    formats = {
        path: kind
        for path, kind in formats.items()
        if path.name.lower() not in WITHOUT_ROWS and kind in wanted
    }
    others = set(formats.values()) - {"txt", "excel"}
    left_out = {  # Markdown is read as text; next to other data it is usually documentation
        path
        for path, kind in formats.items()
        if kind == "excel" or any(suffix.lower() in MARKDOWN for suffix in path.suffixes[-2:])
    }
    return [path for path in formats if not others or path not in left_out]


def _visible_files(folder: Path, skipped: list[Path] | None = None) -> list[Path]:
    found = (path for path in files_below(folder, skipped) if not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def unread_files(folder: Path, format: str | None = None) -> list[str]:
    """Files of a data folder that are not read, and folders that are not looked into, as relative
    paths; of a saved data set, the splits that are none of the three."""
    saved = saved_splits(folder)
    if saved is not None:
        read_from = {SPLIT_NAMES[name]: name for name in reversed(saved) if name in SPLIT_NAMES}
        return sorted(f"{name}{os.sep}" for name in {*saved} - {*read_from.values(), ""})
    skipped: list[Path] = []
    found = _visible_files(folder, skipped)
    read = set(_data_files(folder, found, format))
    folders = [
        path for path in skipped if not path.name.startswith(".") and path.name not in _OWN_CACHES
    ]
    unread = [str(path.relative_to(folder)) for path in found if path not in read]
    return sorted([*unread, *(f"{path.relative_to(folder)}{os.sep}" for path in folders)])


def files_by_split(folder: Path, format: str | None) -> dict[Split | None, list[Path]]:
    """The data files of a folder and its subfolders, sorted; None: no split in the name."""
    files = _data_files(folder, _visible_files(folder), format)
    kinds = Counter(str(suffix_format(path)) for path in files)
    if len(kinds) > 1 and format is None:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        fix = "choose one with training.dataset.format"
        raise data_error(str(folder), f"files of several formats: {counts}", fix)
    parts: dict[Split | None, list[Path]] = {"train": [], "validation": [], "test": [], None: []}
    for path in files:
        names = reversed(path.relative_to(folder).parts)
        words = (word for name in names for word in words_of(name))
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
        parts[split].append(path)
    return parts


def words_of(name: str) -> list[str]:
    """The words of a file name, in which those of SPLIT_NAMES are looked for."""
    return re.split(r"[^a-z]+", _HELD_OUT.sub(r"\1out", name.lower()))


def saved_splits(folder: Path) -> dict[str, Path] | None:
    """The splits of a `save_to_disk` folder; a single data set has the name ""."""
    described = folder / "dataset_dict.json"
    if described.is_file():
        names = _read_description(described).get("splits")
        if not isinstance(names, list) or not all(_is_plain_name(name) for name in names):
            raise data_error(str(described), "it does not name the splits", "save it again")
        return {name: folder / name for name in names}
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {"": folder}
    return None


def _is_plain_name(name: object) -> bool:
    """Whether it is a plain file name, which cannot point outside the folder."""
    return isinstance(name, str) and bool(re.fullmatch(r"[\w.\-]*[\w\-][\w.\-]*", name))


def saved_files(folder: Path) -> tuple[Path, ...]:
    state = _read_description(folder / "state.json")
    fix = "save the data set again"
    try:
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        what = "it does not name the data files"
        raise data_error(str(folder / "state.json"), what, fix) from error
    if not all(map(_is_plain_name, names)) or state.get("_indices_data_files"):
        raise data_error(str(folder), "it was saved as a view of another data set", fix)
    return tuple(folder / name for name in names)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = read_json(path)
    except (OSError, ValueError) as error:
        raise data_error(str(path), f"it cannot be read: {error}", "save it again") from error
    if not isinstance(description, dict):
        raise data_error(str(path), "it does not describe a data set", "save it again")
    return description
