"""Estimates rows and tokens from the files, without a tokenizer."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from expert.core.files import open_regular
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.file_formats import ALL_ENDINGS, ENDINGS

# Bytes of a JSONL file per token, measured with SmolLM2's tokenizer: 3.6 on JSON answers, 4.0 on
# SQL questions. Only for planning; preparing the data counts exactly.
FILE_BYTES_PER_TOKEN = 3.8
# Larger files are sampled in parts spread over them: counting lines runs at about 1 GB/s.
_COUNTED_BYTES = 64 * 2**20
_PARTS = 16
_LINES = {*ENDINGS["jsonl"], *ENDINGS["csv"]}
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class PackedRows:
    """The prepared training rows: what they were packed into, or one sequence for each."""

    rows: int
    sequences: int
    length: int
    """Positions in a sequence."""
    fill: float
    """Share of the positions that hold a token."""
    tokens: int
    """In all sequences together."""
    held_out: int | None = None
    """Sequences of the larger split that is evaluated."""

    @property
    def rows_per_sequence(self) -> float:
        """Mean rows per sequence."""
        return self.rows / max(1, self.sequences)

    def step_sequences(self, examples: int) -> int:
        """Sequences of a step that holds this many rows on average."""
        return sequences_for(examples, rows=self.rows, sequences=self.sequences)


def sequences_for(examples: int, *, rows: int, sequences: int) -> int:
    """How many of the sequences hold `examples` rows on average, at least one: packing does not
    change the batch size."""
    return max(1, round(examples * sequences / rows)) if rows else 1


@dataclass(frozen=True)
class Survey:
    """Training rows and tokens; None with the reason if not known yet."""

    rows: int | None
    tokens: int | None
    because: str
    tokens_from: str = f"from the file size: {FILE_BYTES_PER_TOKEN} bytes per token"
    """How the tokens were counted."""
    longest_tokens: int | None = None
    """Length of the longest row, if all were counted."""
    packed: PackedRows | None = None
    """If they have been prepared."""
    step_sequences: int | None = None
    """Sequences of a step of a stream, by its first rows."""

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.rows if self.rows and self.tokens else None

    def limited_to(self, most: int | None) -> Survey:
        """The survey of the first `most` rows; None: all."""
        if most is None or self.rows is None or self.rows <= most:
            return self
        tokens = self.tokens and round(self.tokens * most / self.rows)
        return replace(self, rows=most, tokens=tokens, because=f"max_samples; {self.because}")


def survey_data(spec: DatasetSpec, folder: Path, *, characters: bool) -> Survey:
    """Examine the training files; `characters`: a token is a character, not a word piece."""
    try:
        return _survey(spec, folder, characters)
    except OSError as error:
        return Survey(None, None, f"{spec.path} cannot be read: {error.strerror}")


def _survey(spec: DatasetSpec, folder: Path, characters: bool) -> Survey:
    if spec.streaming:
        return Survey(None, None, "streamed rows are not counted in advance")
    if spec.tasks:
        parts = [
            survey_file(local_path(task.train, folder)).limited_to(spec.max_samples)
            for task in spec.tasks.values()
        ]
        weights = [task.weight for task in spec.tasks.values()]
        missing = next((part for part in parts if part.rows is None), None)
        if missing is not None:
            return missing
        rows = sum(int((p.rows or 0) * w) for p, w in zip(parts, weights, strict=True))
        tokens = sum(int((p.tokens or 0) * w) for p, w in zip(parts, weights, strict=True))
        return Survey(rows, tokens, f"{len(parts)} tasks counted and weighted")
    path = spec.path or ""
    if path in CORPORA:
        if spec.max_chars and characters:
            return Survey(None, spec.max_chars, f"max_chars of {path}")
        return Survey(None, None, f"the corpus {path} has not been read yet")
    file = local_path(path, folder)
    if not file.exists():
        kind = "is not there" if looks_local(path, folder) else "is a hub id, not downloaded yet"
        return Survey(None, None, f"{path} {kind}")
    if characters and file.is_file():
        size = file.stat().st_size
        return Survey(None, min(size, spec.max_chars or size), f"size of {path}")
    return survey_file(file).limited_to(spec.max_samples)


def portable(path: str) -> Path:
    """A path in this machine's syntax; Windows separators and ~ work everywhere."""
    local = Path(path.replace("\\", "/"))
    with contextlib.suppress(RuntimeError):  # ~user of an unknown user: not found later
        local = local.expanduser()
    return local


def local_path(path: str, folder: Path) -> Path:
    """A path of the manifest on this machine."""
    return folder / portable(path.split("::")[0])


def cache_folder(named: str, folder: Path) -> tuple[Path, str]:
    """The folder of `pretokenized_cache`, and why: beside the manifest, or in the working
    directory if only that exists and holds tokens that another tool saved."""
    beside, here = local_path(named, folder), local_path(named, Path.cwd())
    if beside.exists() or beside.absolute() == here:
        return beside, "set in the manifest"
    if any((here / file).is_file() for file in ("dataset_dict.json", "state.json")):
        return here, "found in the working directory; there is none beside the manifest"
    return beside, f"made there: nothing is beside the manifest, and no saved tokens in {here}"


def looks_local(path: str, folder: Path) -> bool:
    """Whether a missing path was meant as a file rather than a hub id."""
    has_suffix = PureWindowsPath(path).suffix.lower() in ALL_ENDINGS
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(::.*)?", path) and not has_suffix
    return not is_hub_id or (folder / path.split("/")[0]).is_dir()


def has_one_row_per_line(path: Path) -> bool:
    """Whether the rows of a file can be counted by its lines: by its name, and unless it begins as
    a JSON array or in another encoding."""
    if path.suffix.lower() not in _LINES or path.is_dir():
        return False
    with open_regular(path) as stream:
        head = stream.read(64)
    return not (head.startswith(_WIDE_MARKS) or head.lstrip().startswith(b"["))


def survey_file(path: Path) -> Survey:
    """Count the lines of a file; other formats are counted when prepared."""
    if not path.exists():
        return Survey(None, None, f"{path.name} is not there")
    if not has_one_row_per_line(path):
        kind = "a folder" if path.is_dir() else path.suffix or "this format"
        return Survey(None, None, f"rows of {kind} are counted when they are prepared")
    size, counted, lines = path.stat().st_size, 0, 0
    for text in _sampled_lines(path, size):
        counted += len(text)
        lines += text.count(b"\n") + (not text.endswith(b"\n"))
    if size and not counted:
        return Survey(None, None, f"rows of {path.name} are too long to be counted in advance")
    if path.suffix.lower() == ".csv":
        lines = max(0, lines - 1)
    if not lines:
        is_headed = path.suffix.lower() == ".csv" and counted
        kind = "has a header and no rows" if is_headed else "is empty"
        return Survey(0, 0, f"{path.name} {kind}")
    how = "lines counted"
    if counted < size:
        how = f"estimated from the lines of {_COUNTED_BYTES // 2**20} MiB spread over the file"
    if path.suffix.lower() == ".csv":
        how += "; fewer rows if a quoted cell holds a line break"
    return Survey(round(lines * size / counted), int(size / FILE_BYTES_PER_TOKEN), how)


def _sampled_lines(path: Path, size: int) -> Iterator[bytes]:
    """The whole text of a file, or the whole lines of parts spread evenly over a large one."""
    with open_regular(path) as stream:
        if size <= _COUNTED_BYTES:
            yield from filter(None, [stream.read()])
            return
        length = _COUNTED_BYTES // _PARTS
        for number in range(_PARTS):
            start = max(0, (2 * number + 1) * size // (2 * _PARTS) - length // 2)
            stream.seek(start)
            text = stream.read(length)
            first = text.find(b"\n") + 1 or len(text) if start else 0
            last = len(text) if start + length >= size else text.rfind(b"\n") + 1
            if first < last:
                yield text[first:last]
