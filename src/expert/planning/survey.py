"""How many rows and tokens there are, from a look at the files without a tokenizer."""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from expert.core.files import open_regular
from expert.manifest.migrate.aliases import CORPORA
from expert.manifest.schema.dataset import DatasetSpec
from expert.manifest.schema.file_formats import ALL_ENDINGS, ENDINGS

# Bytes of a JSONL file per token, measured with SmolLM2's tokenizer: 3.6 on JSON answers, 4.0 on
# SQL questions. It only sizes a plan; preparing the data counts exactly.
FILE_BYTES_PER_TOKEN = 3.8
# More than this is judged by parts that are spread over it: counting lines runs at about 1 GB/s.
_COUNTED_BYTES = 64 * 2**20
_PARTS = 16
_LINES = {*ENDINGS["jsonl"], *ENDINGS["csv"]}
_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class PackedRows:
    """What the training rows were packed into."""

    rows: int
    sequences: int
    length: int
    """Places in a sequence."""
    fill: float
    """Share of the places that hold a token."""

    @property
    def rows_each(self) -> float:
        """Rows of a sequence on average."""
        return self.rows / max(1, self.sequences)


def sequences_for(examples: int, *, rows: int, sequences: int) -> int:
    """Of the sequences that hold all rows, as many as hold so many examples on average, at least
    one: packing changes no batch size."""
    return max(1, round(examples * sequences / rows)) if rows else 1


@dataclass(frozen=True)
class Survey:
    """Training rows and tokens; None with the reason where they cannot be known yet."""

    rows: int | None
    tokens: int | None
    because: str
    tokens_from: str = f"from the file size: {FILE_BYTES_PER_TOKEN} bytes per token"
    """How the tokens were counted."""
    longest_tokens: int | None = None
    """Of the longest row, where all of them were counted."""
    packed: PackedRows | None = None
    """Where they have been packed."""

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.rows if self.rows and self.tokens else None

    def of_first(self, most: int | None) -> Survey:
        """The same where at most so many rows are used, the first; None: all of them."""
        if most is None or self.rows is None or self.rows <= most:
            return self
        tokens = self.tokens and round(self.tokens * most / self.rows)
        return replace(self, rows=most, tokens=tokens, because=f"max_samples; {self.because}")


def survey_data(spec: DatasetSpec, folder: Path, *, characters: bool) -> Survey:
    """Look at the training files; `characters`: a token is a character, not a word piece."""
    try:
        return _survey(spec, folder, characters)
    except OSError as error:
        return Survey(None, None, f"{spec.path} cannot be read: {error.strerror}")


def _survey(spec: DatasetSpec, folder: Path, characters: bool) -> Survey:
    if spec.streaming:
        return Survey(None, None, "streamed rows are not counted in advance")
    if spec.tasks:
        parts = [
            survey_file(local_path(task.train, folder)).of_first(spec.max_samples)
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
    found = local_path(path, folder)
    if not found.exists():
        kind = "is not there" if looks_local(path, folder) else "is a hub id, not downloaded yet"
        return Survey(None, None, f"{path} {kind}")
    if characters and found.is_file():
        size = found.stat().st_size
        return Survey(None, min(size, spec.max_chars or size), f"size of {path}")
    return survey_file(found).of_first(spec.max_samples)


def portable(path: str) -> Path:
    """A path as this machine writes it; Windows separators and ~ are understood everywhere."""
    found = Path(path.replace("\\", "/"))
    with contextlib.suppress(RuntimeError):  # ~somebody who is not here is not found later
        found = found.expanduser()
    return found


def local_path(path: str, folder: Path) -> Path:
    """A path of the manifest on this machine."""
    return folder / portable(path.split("::")[0])


def looks_local(path: str, folder: Path) -> bool:
    """Whether a path that does not exist was meant as a file rather than as a hub id."""
    has_suffix = PureWindowsPath(path).suffix.lower() in ALL_ENDINGS
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(::.*)?", path) and not has_suffix
    return not is_hub_id or (folder / path.split("/")[0]).is_dir()


def has_a_row_a_line(path: Path) -> bool:
    """Whether the lines of a file can be counted for rows: by its name, and not where it begins as
    a JSON array or in another encoding."""
    if path.suffix.lower() not in _LINES or path.is_dir():
        return False
    with open_regular(path) as stream:
        head = stream.read(64)
    return not (head.startswith(_WIDE_MARKS) or head.lstrip().startswith(b"["))


def survey_file(path: Path) -> Survey:
    """Count the lines of a file; other formats are counted when they are prepared."""
    if not path.exists():
        return Survey(None, None, f"{path.name} is not there")
    if not has_a_row_a_line(path):
        kind = "a folder" if path.is_dir() else path.suffix or "this format"
        return Survey(None, None, f"rows of {kind} are counted when they are prepared")
    size = path.stat().st_size
    texts = [whole_lines(path, part) for part in parts_to_look_at([size])]
    counted, lines = sum(map(len, texts)), sum(map(count_lines, texts))
    if path.suffix.lower() == ".csv":
        lines = max(0, lines - 1)
    if not lines:
        is_headed = path.suffix.lower() == ".csv" and counted
        kind = "has a header and no rows" if is_headed else "is empty"
        return Survey(0, 0, f"{path.name} {kind}")
    return Survey(
        round(lines * size / counted),
        int(size / FILE_BYTES_PER_TOKEN),
        how_lines_were_counted([path], exact=counted == size),
    )


# --- looking at lines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A stretch of bytes in one of several files."""

    file: int
    start: int
    stop: int
    size: int
    """Of the whole file."""


def parts_to_look_at(sizes: Sequence[int]) -> list[Part]:
    """Every file whole, or parts that are spread evenly over all of them where they are large."""
    total = sum(sizes)
    if total <= _COUNTED_BYTES:
        return [Part(file, 0, size, size) for file, size in enumerate(sizes) if size]
    length = _COUNTED_BYTES // _PARTS
    parts = []
    for number in range(_PARTS):
        middle = (2 * number + 1) * total // (2 * _PARTS)
        file = 0
        while middle >= sizes[file]:
            middle -= sizes[file]
            file += 1
        start = max(0, middle - length // 2)
        parts.append(Part(file, start, min(sizes[file], start + length), sizes[file]))
    return parts


def whole_lines(path: Path, part: Part) -> bytes:
    """The lines that are whole within a part of a file; a line that its edge cuts is left out."""
    with open_regular(path) as stream:
        stream.seek(part.start)
        text = stream.read(part.stop - part.start)
    first = text.find(b"\n") + 1 if part.start else 0
    last = len(text) if part.stop == part.size else text.rfind(b"\n") + 1
    return text[first:last]


def count_lines(text: bytes) -> int:
    """Lines of a text, with or without a line break behind the last one."""
    return text.count(b"\n") + bool(text and not text.endswith(b"\n"))


def how_lines_were_counted(paths: Sequence[Path], *, exact: bool) -> str:
    """What there is to say about a number of rows that is one of lines."""
    spread = f"estimated from the lines of {_COUNTED_BYTES // 2**20} MiB spread over the file"
    how = "lines counted" if exact else spread
    if any(path.suffix.lower() == ".csv" for path in paths):
        how += "; fewer rows if a quoted cell holds a line break"
    return how
