"""The job behind `expert new`: a folder to begin with, from a template or from a file of rows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically

if TYPE_CHECKING:
    from expert.data.columns import Columns
    from expert.data.records import BadRow, Example, Row

EPOCHS = 3
FEW_ROWS, EPOCHS_OF_FEW = 1000, 5
"""Few rows make few updates: of 360 rows of dates, `tiny` answers 91.7 % right after 3 epochs and
100 % after 5."""
LOOKED_AT = 50
"""Rows of a file that are read to tell what it holds."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STARTS = {
    "sql": re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE|CREATE)\s", re.IGNORECASE),
    "cypher": re.compile(r"\s*(?:MATCH|OPTIONAL MATCH|MERGE|UNWIND|CREATE\s*\()\s*", re.IGNORECASE),
    "typescript": re.compile(
        r"\s*(?:export |declare |interface |type |function |const |let |class |import )"
    ),
}
_OTHER_NAMES = {"neo4j": "cypher", "ts": "typescript"}


class CannotMake(ExpertError):
    """A new expert that cannot be made as asked."""


@dataclass(frozen=True, kw_only=True)
class NewExpert:
    """What was made."""

    folder: Path
    manifest: Path
    data: Path
    template: str
    columns: dict[str, str]
    """Which column of the rows holds which part; empty where they are a template's."""
    has_answers: bool
    """False where the rows are plain text: what learnt it continues a text."""
    unused: tuple[str, ...] = ()
    """Columns that nothing is read from."""
    unread: tuple[str, ...] = ()
    """Files of a folder that are not read."""
    calls: bool = False
    """Whether rows have tools."""
    looked_at: int = 0
    """Rows that were read to tell what they hold."""
    bad_rows: int = 0
    """Those of them that cannot be learnt from."""


@dataclass(frozen=True)
class _Looked:
    """What the first rows of a file hold."""

    columns: Columns
    names: Sequence[str]
    """Of all columns."""
    examples: Sequence[Example]
    rows: int

    @property
    def bad_rows(self) -> int:
        return self.rows - len(self.examples)


def new_expert(
    name: str,
    *,
    data: Path | None = None,
    template: str | None = None,
    into: Path | None = None,
    mapping: Sequence[str] = (),
) -> NewExpert:
    """Make a folder that `expert manifest check` and `expert plan` accept; nothing is replaced.

    A file of rows is copied: what is in the folder can be moved, and the original stays as it is.
    """
    from expert.data.folders import unread_files
    from expert.data.tools import has_tools
    from expert.jobs.expert_templates import TEMPLATES, calling, manifest_of, readme_of
    from expert.manifest.reader import read_manifest

    folder = (into or Path()) / name
    _refuse(name, folder)
    chosen = _OTHER_NAMES.get(template or "", template)
    if chosen is not None and chosen not in TEMPLATES:
        raise CannotMake(f"--template {template}: is not known  (known: {', '.join(TEMPLATES)})")
    mapped = _mapped(mapping)
    if mapped and data is None:
        raise CannotMake("--map: says which column of --from holds what  (name a file with --from)")
    columns: dict[str, str] = {}
    has_answers, calls = True, False
    unused: tuple[str, ...] = ()
    looked = _look(data, mapped) if data is not None else None
    if looked is not None:
        columns, unused = looked.columns.used(), looked.columns.unused(looked.names)
        has_answers = any(one.turns for one in looked.examples)
        calls = any(map(has_tools, looked.examples))
        chosen = chosen or _domain(looked.examples)
    chosen = chosen or "text"
    kind = calling(TEMPLATES[chosen]) if calls else TEMPLATES[chosen]
    if data is not None:  # whose language nobody knows
        kind = replace(kind, capabilities=tuple(c for c in kind.capabilities if c != "language:en"))
    path = f"datasets/{data.resolve().name if data else 'train.jsonl'}"
    rows = folder / path
    if data is not None:
        _copy_rows(data, rows, folder)
    else:
        rows.parent.mkdir(parents=True)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kind.rows)
        write_text_atomically(rows, "".join(lines))
    dataset = {"path": path, **({"field_mapping": mapped} if mapped else {})}
    manifest = folder / "manifest.json"
    epochs = EPOCHS_OF_FEW if len(_first_rows(rows, FEW_ROWS)) < FEW_ROWS else EPOCHS
    made = manifest_of(folder.name, kind, dataset, epochs=epochs, calls=calls)
    text = json.dumps(made, indent=2, ensure_ascii=False)
    write_text_atomically(manifest, text + "\n")
    write_text_atomically(folder / "README.md", readme_of(folder.name, kind, path, has_answers))
    write_text_atomically(folder / ".gitignore", "runs/\ndatasets_optimized/\nprofile/\n")
    read_manifest(manifest, strict=True)
    return NewExpert(
        folder=folder,
        manifest=manifest,
        data=rows,
        template=chosen,
        columns=columns,
        has_answers=has_answers,
        unused=unused,
        unread=tuple(unread_files(data)) if data is not None and data.is_dir() else (),
        calls=calls,
        looked_at=looked.rows if looked else 0,
        bad_rows=looked.bad_rows if looked else 0,
    )


def _refuse(name: str, folder: Path) -> None:
    """Names that make no folder, and folders that hold something."""
    if not _NAME.fullmatch(name):
        raise CannotMake(
            f"{name!r}: is no name for an expert  (letters, digits, dots and dashes; --output says "
            "where the folder goes)"
        )
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CannotMake(f"{folder}: is there already  (choose another name, or remove it)")


def _mapped(mapping: Sequence[str]) -> dict[str, str]:
    """`instruction=question` and the like, taken apart."""
    from expert.manifest.dataset import FieldMapping

    found = {}
    for pair in mapping:
        part, sign, column = pair.partition("=")
        if part not in FieldMapping.model_fields or not sign or not column:
            known = ", ".join(FieldMapping.model_fields)
            raise CannotMake(f"--map {pair}: is not PART=COLUMN  (parts: {known})")
        found[part] = column
    return found


def _look(data: Path, mapped: Mapping[str, str]) -> _Looked:
    """What the first rows of a file hold; CannotMake where they are of no use."""
    from expert.data.columns import PREFERENCE, understand_columns
    from expert.data.formats import example_of
    from expert.data.records import BadRow, DataError, Row
    from expert.manifest.dataset import FieldMapping

    found = _first_rows(data)
    rows = [row for row in found if isinstance(row, Row)]
    if not rows:
        why = "it is empty  (put rows into it; without --from there are some to begin with)"
        if found and isinstance(found[0], BadRow):
            why = str(found[0])
        raise CannotMake(f"--from {data}: no row can be read: {why}")
    _refuse_columns(data, mapped, list(rows[0].values))
    try:
        columns = understand_columns(
            list(rows[0].values),
            rows[0].values,
            mapping=FieldMapping.model_validate(mapped) if mapped else None,
        )
    except DataError as error:
        what = str(error).partition("  (")[0]
        how = "--map instruction=COLUMN --map response=COLUMN says which hold what"
        if what == PREFERENCE:
            how = "--map response=chosen learns the preferred answers alone"
        raise CannotMake(f"--from {data}: {what}  ({how})") from None
    read = [example_of(row, columns) for row in rows]
    examples = [example for example in read if not isinstance(example, BadRow)]
    if not examples:
        first = next(bad for bad in read if isinstance(bad, BadRow))
        raise CannotMake(f"--from {data}: no row can be learnt from: {first.reason}")
    return _Looked(columns, list(rows[0].values), examples, len(found))


def _refuse_columns(data: Path, mapped: Mapping[str, str], names: Sequence[str]) -> None:
    """Columns that --map names and the rows have not, all at once."""
    from expert.data.columns import columns_found, near_column

    wrong = []
    for part, column in mapped.items():
        if column not in names:
            near = near_column(column, names)
            meant = f"  (did you mean {near!r}?)" if near else ""
            wrong.append(f"--map {part}={column}: {data} has no such column{meant}")
    if wrong:
        raise CannotMake("\n".join([*wrong, f"  {columns_found(names)}"]))


def _first_rows(data: Path, most: int = LOOKED_AT) -> list[Row | BadRow]:
    """The beginning of a file or folder; CannotMake where it is none that can be read."""
    from expert.data.records import DataError
    from expert.data.rows import FORMATS, suffix_format
    from expert.data.sources import iterate, resolve_sources
    from expert.manifest.dataset import DatasetSpec

    if not data.exists():
        hub = "a data set of the hub is named in a manifest: training.dataset.path"
        raise CannotMake(f"--from {data}: there is no such file  ({hub})")
    if data.is_file() and suffix_format(data) is None:
        known = ", ".join(FORMATS)
        raise CannotMake(
            f"--from {data}: its name tells no format that is read  (save the rows as one of "
            f"{known}, and name the file so; a spreadsheet as csv)"
        )
    try:
        source = resolve_sources(DatasetSpec(path=str(data.absolute())), Path()).train
        assert source is not None
        return list(islice(iterate(source), most))
    except DataError as error:
        what, gap, fix = str(error).partition("  (")
        if "training.dataset" in fix:  # there is no manifest yet
            fix = "name one of the files, or a folder with files of one format)"
        what = what.removeprefix(f"{data.absolute()}: ").removeprefix(f"{data}: ")
        raise CannotMake(f"--from {data}: {what}{gap}{fix}") from None


def _copy_rows(data: Path, rows: Path, folder: Path) -> None:
    """A file or a folder of rows into the new folder."""
    files = _files_in(data, folder) if data.is_dir() else []
    rows.parent.mkdir(parents=True)
    if not data.is_dir():
        shutil.copy2(data, rows)
    for file in files:
        copy = rows / file.relative_to(data)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def _files_in(data: Path, folder: Path) -> list[Path]:
    """What is copied of a folder of rows: its data files, or all of a saved data set."""
    from expert.data.folders import files_by_split, saved_splits

    if saved_splits(data) is None:
        return [file for files in files_by_split(data, None).values() for file in files]
    if folder.resolve().is_relative_to(data.resolve()):
        raise CannotMake(
            f"--from {data}: the new folder would lie inside of it  (--output says where it goes)"
        )
    return [path for path in data.rglob("*") if path.is_file()]


def _domain(examples: Sequence[Example]) -> str:
    """The domain that every answer looks like; text where they do not agree."""
    answers = [turn.text for one in examples for turn in one.turns if turn.role == "assistant"]
    if answers and all(map(_is_json, answers)):
        return "json"
    for domain, start in _STARTS.items():
        if answers and all(start.match(answer) for answer in answers):
            return domain
    return "text"


def _is_json(text: str) -> bool:
    """Whether a text is an object or a list: a bare number or word is anything."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)
