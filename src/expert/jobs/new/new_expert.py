"""The job behind `expert new`: a folder to start with, from a template or from rows."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.files import read_text, write_text_atomically
from expert.core.text import counted, some_of
from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import (
    PAIRS,
    PREFERRED,
    detect_columns,
    pair_in,
    part_for_column,
)
from expert.data.examples.formats import example_of
from expert.data.examples.tools import has_tools
from expert.data.read.folders import files_by_split, saved_splits, unread_files
from expert.data.read.sources import Source, iterate, resolve_sources
from expert.data.records import BadRow, DataError, Example, Row
from expert.data.template.templates import INPUT_LABEL
from expert.jobs.new.row_lengths import MOST_LOST, LengthChoice, choose_length
from expert.judging.domain import NAMES
from expert.manifest.reader import read_manifest
from expert.manifest.schema.dataset import DatasetSpec, FieldMapping
from expert.manifest.schema.kinds import PREFERENCES
from expert.manifest.schema.manifest import CHAR_GPT, BaseModelSpec
from expert.planning.choose.starting_points import StartingPoint, starting_point
from expert.planning.models.resolve import (
    TINY,
    is_hub_id,
    is_model_folder,
    near_model,
    resolve_model,
)
from expert.planning.survey import looks_local
from expert.run.gguf_base import base_from_gguf
from expert.run.open import open_run

EPOCHS = 3
PREFERENCE_FACTOR = 40
"""Usual learning rates are 2e-4 for answers and 5e-6 for preferences."""
FEW_ROWS, EPOCHS_FOR_FEW_ROWS = 1000, 5
"""Few rows make few steps: trained on 360 rows of dates, `tiny` answers 91.7 % correctly after 3
epochs and 100 % after 5."""
MANY_ROWS, EPOCHS_FOR_MANY_ROWS = 20_000, 2
"""Of 25,116 SQL rows a third epoch made the validation loss worse in two runs, and one epoch
alone gave 78.1 % right answers where three gave 78.8 and 79.1 % (docs/QUALITY.md)."""
SAMPLED_ROWS = 50
"""Rows that are read closely to understand a file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTIONS = {
    r"training\.dataset\.json_values: true": "--json-values",
    r"--set training\.dataset\.encoding=": "--encoding ",
    r"set training\.dataset\.encoding": "name its --encoding",
    r"remove training\.dataset\.encoding": "leave out --encoding",
    r"training\.dataset\.field_mapping\.messages: (.+) reads": r"--map messages=\1 reads",
    r"training\.dataset\.field_mapping\.(\w+)": r"--map \1=COLUMN",
    r"training\.dataset\.field_mapping": "--map PART=COLUMN",
    r"set training\.dataset\.format to": "save the rows as",
    r"choose one with training\.dataset\.format": "name one of them",
    r"name its folder as path": "give its folder to --from",
    r"name one: path::split": "give the folder of one to --from",
}
"""What is written in a manifest, where there is none yet."""
_STARTS = {
    "sql": re.compile(r"\s*(?:SELECT|WITH|INSERT|UPDATE|DELETE|CREATE)\s", re.IGNORECASE),
    "cypher": re.compile(r"\s*(?:MATCH|OPTIONAL MATCH|MERGE|UNWIND|CREATE\s*\()\s*", re.IGNORECASE),
    "typescript": re.compile(
        r"\s*(?:export |declare |interface |type |function |const |let |class |import )"
    ),
}


# Performance keys are written out to be visible; auto is decided on every machine.
PERFORMANCE = (
    *("bf16", "use_tf32", "attention", "torch_compile", "optim", "gradient_checkpointing"),
    *("dataloader_num_workers", "dataloader_prefetch_factor"),
)


STARTERS = tomllib.loads(read_text(Path(__file__).with_name("starters.toml")))
"""Kinds of experts: description, capabilities, grammar, and rows to replace."""


class UnusableRows(ExpertError):
    """Rows of which nothing, or hardly anything, can be trained on."""

    exit_code = EXIT_RUN_FAILED


@dataclass(frozen=True, kw_only=True)
class NewExpert:
    folder: Path
    manifest: Path
    data: Path
    template: str
    model: str
    columns: dict[str, str] = field(default_factory=dict)
    """Which column of the rows holds which part; empty for a template's rows."""
    unused: dict[str, int] = field(default_factory=dict)
    """Unused columns, with the number of rows that fill each."""
    has_answers: bool = True
    """False if the rows are plain text: a model trained on it continues text."""
    calls: bool = False
    """Whether rows have tools."""
    length: LengthChoice | None = None
    """max_seq_length and why; None for a template's rows, which are to be replaced."""
    notes: list[str] = field(default_factory=list)
    """Which files are held out or not read, and why the settings are as they are."""
    warnings: list[str] = field(default_factory=list)


def new_expert(
    name: str,
    *,
    data: Path | None = None,
    template: str | None = None,
    into: Path | None = None,
    mapping: Sequence[str] = (),
    preferred: bool = False,
    json_values: bool = False,
    encoding: str | None = None,
    model: str = TINY,
) -> NewExpert:
    """Create a folder that `expert manifest check` and `expert plan` accept; nothing is replaced.

    A file of rows is copied, so that the folder can be moved and the original stays as it is. A hub
    dataset, as owner/name, is only named in the manifest.
    """
    import jinja2

    folder = (into or Path()) / name
    if not _NAME.fullmatch(name):
        fix = "letters, digits, dots and dashes; --output sets where the folder goes"
        raise ExpertError(f"{name!r}: is not a valid name  ({fix})")
    _refuse_full(folder)
    chosen = NAMES.get(template or "", template)
    if chosen is not None and chosen not in STARTERS:
        raise ExpertError(f"--template {template}: is not known  (known: {', '.join(STARTERS)})")
    base, start = _base(model, folder)
    rows_kept = PREFERRED if preferred else None
    asked: dict[str, Any] = {"field_mapping": _mapped(mapping), "preference_rows": rows_kept}
    asked |= {"json_values": json_values, "encoding": encoding}
    asked = {key: value for key, value in asked.items() if value}
    if asked and data is None:
        options = "--map, --preferred, --json-values and --encoding"
        raise ExpertError(f"{options} are about rows  (name a file with --from)")
    found, headings = dict[str, Any](), ""
    path, rows = "datasets/train.jsonl", folder / "datasets/train.jsonl"
    on_hub = data is not None and _is_on_hub(data)
    if data is not None:
        found, headings, domain = _examine_rows(data, asked)
        chosen = chosen or domain
        path = data.as_posix() if on_hub else f"datasets/{data.resolve().name}"
        rows = data if on_hub else folder / path
    made = NewExpert(
        folder=folder,
        manifest=folder / "manifest.json",
        data=rows,
        template=chosen or "text",
        model=base,
        **found,
    )
    with _removed_on_failure(folder):
        if data is None:
            rows.parent.mkdir(parents=True)
            lines = [f"{json.dumps(row)}\n" for row in STARTERS[made.template]["rows"]]
            write_text_atomically(rows, "".join(lines))
        elif not on_hub:
            _copy_rows(data, rows, folder)
        count = _count_rows(rows, encoding, FEW_ROWS if on_hub else MANY_ROWS)
        content = _manifest_content(made, start, {"path": path, **asked}, epochs_for(count))
        _write_manifest(made.manifest, content)
        made.notes.append(f"base model {base}: {start.because}")
        if data is not None:
            made = _with_length(made, content, data, headings)
        pages = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
        page = pages.from_string(read_text(Path(__file__).with_name("readme.jinja")))
        shown = {"name": folder.name, "description": content["description"], "data": path}
        shown |= {"on_hub": on_hub, "has_answers": made.has_answers, "is_tiny": base == TINY}
        write_text_atomically(folder / "README.md", page.render(shown))
        write_text_atomically(folder / ".gitignore", "runs/\ndatasets_optimized/\nprofile/\n")
    return made


def epochs_for(rows: int) -> int:
    if rows < FEW_ROWS:
        return EPOCHS_FOR_FEW_ROWS
    return EPOCHS if rows < MANY_ROWS else EPOCHS_FOR_MANY_ROWS


def _manifest_content(
    made: NewExpert, start: StartingPoint, dataset: dict[str, Any], epochs: int
) -> dict[str, Any]:
    """The starter's manifest, adapted to the rows."""
    starter, written = STARTERS[made.template], {}
    description, able = starter["description"], starter["capabilities"]
    if made.columns:  # of the user, whose language is unknown
        able = [each for each in able if each != "language:en"]
    if made.calls:
        description, able = "Calls tools, and answers.", [*able, "task:tool_calling"]
        # The templates of small models do not support tools; ChatML supports them for all models.
        written = {"prompt_template": "chatml"}
    decoding: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}
    if grammar := starter.get("grammar"):
        decoding |= {"validation": "parser", "grammar_type": grammar}
    config: dict[str, Any] = {
        "adapter_type": "lora",
        "epochs": epochs,
        "learning_rate": start.learning_rate,
        "batch_size": 16,
        "max_seq_length": "auto",
        "packing": True,
        **dict.fromkeys(PERFORMANCE, "auto"),
    }
    if dataset.get("preference_rows") == PAIRS:
        config["learning_rate"] = start.learning_rate / PREFERENCE_FACTOR
        config |= {"method": "dpo", "beta": PREFERENCES["dpo"].beta, "epochs": 1}
    adapters = [{"type": "lora", "r": start.rank, "alpha": start.alpha}]
    return {
        "schema_version": "2.0",
        "name": made.folder.name,
        "version": "0.1.0",
        "description": description,
        "base_models": [{"name": made.model, **written, "adapters": adapters}],
        "capabilities": able,
        "training": {"dataset": dataset, "config": config, "decoding": decoding},
    }


def _with_length(made: NewExpert, content: dict[str, Any], data: Path, headings: str) -> NewExpert:
    """Choose max_seq_length by the rows of the written manifest, and write it again."""
    try:
        opened = open_run(made.manifest, data="unread")
        shape = resolve_model(BaseModelSpec(name=opened.plan.model.name), made.folder).shape
        length = choose_length(opened, shape.context if shape else None)
    except DataError as error:
        raise _unusable(data, str(error).replace(str(made.data), str(data))) from None
    content["training"]["config"]["max_seq_length"] = length.length
    _write_manifest(made.manifest, content)
    name = "that of the tokenizer" if length.template == "tokenizer" else length.template
    made.notes.append(f"prompt template: {name}{headings}")
    made.notes.append(f"max_seq_length {length.length}: {length.because}")
    made.warnings.extend([length.warning] if length.warning else [])
    return replace(made, length=length)


def _write_manifest(file: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest, which must read without complaints."""
    write_text_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    read_manifest(file, strict=True)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove what was made in a new or empty folder if it cannot be finished, so that the same
    command can be run again."""
    existed = folder.is_dir()
    _refuse_full(folder)  # again: reading many rows takes minutes, in which it may have been made
    folder.mkdir(parents=True, exist_ok=existed)
    try:
        yield
    except BaseException:
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if folder.is_dir() and not existed:
            folder.rmdir()
        raise


def _refuse_full(folder: Path) -> None:
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ExpertError(f"{folder}: already exists  (choose another name, or remove it)")


def _base(name: str, folder: Path) -> tuple[str, StartingPoint]:
    """The base model under its name in the manifest, and settings for its size."""
    if name == CHAR_GPT:
        fix = "expert train --dataset FILE trains it on a text"
        raise ExpertError(f"--model {CHAR_GPT}: needs no manifest  ({fix})")
    if name.endswith(".gguf"):
        name = str(base_from_gguf(Path(name)))
    if is_model_folder(Path(name)):
        name = str(Path(name).absolute())  # relative paths would break: the manifest is elsewhere
    found = resolve_model(BaseModelSpec(name=name), folder)
    if found.place == "hub" and found.shape is None and not is_hub_id(name):
        near = near_model(name, folder)
        fix = f"did you mean {near!r}?" if near else "name a folder, or owner/model of the hub"
        raise ExpertError(f"--model {name}: is not on this machine, nor known by name  ({fix})")
    return name, starting_point(name, found.shape)


def _mapped(mapping: Sequence[str]) -> dict[str, str]:
    """The columns that --map names, by part."""
    mapped: dict[str, str] = {}
    for pair in mapping:
        name, sign, column = pair.partition("=")
        part = part_for_column(name)
        if part is None or not sign or not column:
            known = ", ".join(FieldMapping.model_fields)
            raise ExpertError(f"--map {pair}: expected PART=COLUMN  (PART is one of: {known})")
        if mapped.get(part, column) != column:
            raise ExpertError(f"--map {pair}: {part} is mapped to {mapped[part]} already")
        mapped[part] = column
    return mapped


# --- a file of rows ------------------------------------------------------------------------------


def _examine_rows(data: Path, asked: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """What the rows of a file hold, as fields of NewExpert, the headings that are put before their
    input, in words, and the domain of their answers; ExpertError if they cannot be used. Pairs of
    answers are added to what is `asked` of the rows."""
    encoding = asked.get("encoding")
    first = _first_rows(data, encoding)
    no_row = "no row" if len(first) < SAMPLED_ROWS else f"none of the first {SAMPLED_ROWS} rows"
    rows = [row for row in first if isinstance(row, Row)]
    if not rows:
        why = "it is empty  (put rows into it; without --from a few rows to start with are written)"
        if first and isinstance(first[0], BadRow):
            why = str(first[0])
        raise _unusable(data, f"{no_row} can be read: {why}")
    seen = survey_rows(iterate(_source(data, encoding)))
    is_mapped = "rejected" in asked.get("field_mapping", {})
    try:
        if "preference_rows" not in asked and (pair_in(seen) or is_mapped):
            asked["preference_rows"] = PAIRS
        columns = detect_columns(seen, DatasetSpec(**asked))
    except DataError as error:
        raise ExpertError(_in_own_words(data, str(error))) from None
    if no_choice := columns.preference_warning(asked.get("preference_rows")):
        raise ExpertError(f"--from {data}: --preferred: {no_choice}")
    read = [example_of(row, columns) for row in rows]
    examples = [example for example in read if isinstance(example, Example)]
    bad = [each for each in (*read, *first) if isinstance(each, BadRow)]
    if not examples:
        why = str(bad[0]) if bad else "none is preferred"
        raise _unusable(data, f"{no_row} can be trained on: {why}")
    unusable = f"{len(bad)} of the first {counted(len(first), 'row')} cannot be used"
    if len(bad) > MOST_LOST * len(first):
        raise _unusable(data, f"{unusable}: {bad[0]}")
    lost = f"{unusable}; fix them before training: expert dataset check lists them" if bad else ""
    turns = [turn for one in examples for turn in one.turns]
    notes = list(_notes_on_files(data)) if data.is_dir() else []
    if asked.get("preference_rows") == PAIRS:
        what = "method dpo: rows have a preferred and a rejected answer"
        notes.append(f"{what}  (--preferred trains on the preferred ones alone)")
    found = {
        "columns": columns.used(),
        "unused": columns.unused(seen),
        "has_answers": bool(turns),
        "calls": any(map(has_tools, examples)),
        "notes": notes,
        "warnings": list(filter(None, (columns.unused_warning(seen), lost))),
    }
    texts = "".join(turn.text for turn in turns if turn.role == "user") if columns.input else ""
    put = ", ".join(sorted({f'"{name}:"' for name in INPUT_LABEL.findall(texts)}))
    headings = f"; put before the column {columns.input}: {put}" if put else ""
    return found, headings, _domain([turn.text for turn in turns if turn.role == "assistant"])


def _first_rows(data: Path, encoding: str | None) -> list[Row | BadRow]:
    """The first rows of a file or folder; ExpertError if it cannot be read."""
    if not data.exists() and not _is_on_hub(data):
        hub = "a dataset of the Hub is written owner/name"
        raise ExpertError(f"--from {data}: there is no such file  ({hub})")
    try:
        return list(islice(iterate(_source(data, encoding)), SAMPLED_ROWS))
    except DataError as error:
        raise _unusable(data, str(error)) from None


def _count_rows(data: Path, encoding: str | None, most: int) -> int:
    """How many rows there are, up to `most`; of a damaged file those that can be read."""
    count = 0
    with suppress(DataError):
        for _ in islice(iterate(_source(data, encoding)), most):
            count += 1
    return count


def _unusable(data: Path, why: str) -> UnusableRows:
    return UnusableRows(f"✗ {_in_own_words(data, why)}")


def _in_own_words(data: Path, why: str) -> str:
    """What is wrong with rows, in the words of this command."""
    for key, option in _OPTIONS.items():
        why = re.sub(key, option, why)
    for place in (data.absolute(), data, f"{data.as_posix()}::train"):
        why = why.removeprefix(f"{place}: ")
    return f"--from {data}: {why}"


def _notes_on_files(folder: Path) -> Iterator[str]:
    """Which files of a folder are held out, and which are not read."""
    top = folder.absolute()
    sources = resolve_sources(DatasetSpec(path=str(top)), Path())
    for split, source in (("validation", sources.validation), ("test", sources.test)):
        if source is not None:
            files = [str(file.relative_to(top)) for file in source.files]
            yield f"held out as {split} rows, by name: {some_of(files)}"
    if unread := unread_files(folder):
        yield f"not read: {some_of(unread)}"


def _is_on_hub(data: Path) -> bool:
    """Whether it names a hub dataset: owner/name, owner/name::split and so on."""
    return not data.exists() and not looks_local(data.as_posix(), Path())


def _source(data: Path, encoding: str | None) -> Source:
    path = data.as_posix() if _is_on_hub(data) else str(data.absolute())
    source = resolve_sources(DatasetSpec(path=path, encoding=encoding), Path()).train
    assert source is not None
    return source


def _copy_rows(data: Path, rows: Path, folder: Path) -> None:
    """Copy a file of rows, the data files of a folder, or a whole saved dataset."""
    copies = {data: rows}
    if data.is_dir():
        files = [path for path in data.rglob("*") if path.is_file()]
        if saved_splits(data) is None:
            files = [file for files in files_by_split(data, None).values() for file in files]
        elif folder.resolve().is_relative_to(data.resolve()):
            fix = "--output sets where it goes"
            raise ExpertError(f"--from {data}: the new folder would be inside it  ({fix})")
        copies = {file: rows / file.relative_to(data) for file in files}
    for file, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def _domain(answers: Sequence[str]) -> str:
    """The domain that every answer looks like; text if they do not agree."""
    for name, starts in _STARTS.items():
        if answers and all(map(starts.match, answers)):
            return name
    try:  # a bare number or word could be anything
        is_json = all(isinstance(json.loads(text), dict | list) for text in answers)
    except (ValueError, RecursionError):
        is_json = False
    return "json" if answers and is_json else "text"
