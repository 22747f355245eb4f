"""How many rows and tokens there are, as far as a look at the files tells without a tokenizer."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from expert.manifest.dataset import DatasetSpec
from expert.manifest.names import CORPORA

# Bytes of a JSONL file per token, measured with SmolLM2's tokenizer: 3.6 on JSON answers, 4.0 on
# SQL questions. It only sizes a plan; preparing the data counts exactly.
FILE_BYTES_PER_TOKEN = 3.8
# Larger files are judged by their first part: counting lines runs at about 1 GB/s.
_COUNTED_BYTES = 64 * 2**20
_LINES = {".jsonl", ".ndjson", ".csv"}


@dataclass(frozen=True)
class Survey:
    """Training rows and tokens; None with the reason where they cannot be known yet."""

    rows: int | None
    tokens: int | None
    because: str
    tokens_from: str = f"from bytes: {FILE_BYTES_PER_TOKEN} of the file a token"
    """How the tokens were told."""

    @property
    def mean_tokens(self) -> float | None:
        return self.tokens / self.rows if self.rows and self.tokens else None


def survey_data(spec: DatasetSpec, folder: Path, *, characters: bool) -> Survey:
    """Look at the training files; `characters`: a token is a character, not a word piece."""
    try:
        return _survey(spec, folder, characters)
    except OSError as error:
        return Survey(None, None, f"{spec.path} cannot be looked at: {error.strerror}")


def _survey(spec: DatasetSpec, folder: Path, characters: bool) -> Survey:
    if spec.streaming:
        return Survey(None, None, "streamed rows are not counted beforehand")
    if spec.tasks:
        parts = [survey_file(local_path(task.train, folder)) for task in spec.tasks.values()]
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
    return survey_file(found)


def local_path(path: str, folder: Path) -> Path:
    """A path of the manifest on this machine; Windows separators work everywhere."""
    portable = Path(path.split("::")[0].replace("\\", "/"))
    with contextlib.suppress(RuntimeError):  # ~somebody who is not here is not found later
        portable = portable.expanduser()
    return portable if portable.is_absolute() else folder / portable


def looks_local(path: str, folder: Path) -> bool:
    """Whether a path that does not exist was meant as a file rather than as a hub id."""
    has_suffix = PureWindowsPath(path).suffix.lower() in _LINES | {
        *(".json", ".txt", ".parquet", ".gz", ".zst", ".arrow")
    }
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(::.*)?", path) and not has_suffix
    return not is_hub_id or (folder / path.split("/")[0]).is_dir()


def survey_file(path: Path) -> Survey:
    """Count the lines of a file; other formats are counted when they are prepared."""
    if not path.exists():
        return Survey(None, None, f"{path.name} is not there")
    if path.is_dir() or path.suffix.lower() not in _LINES:
        kind = "a folder" if path.is_dir() else path.suffix or "this format"
        return Survey(None, None, f"rows of {kind} are counted when they are prepared")
    size = path.stat().st_size
    lines = counted = 0
    with path.open("rb") as stream:
        while counted < _COUNTED_BYTES:
            block = stream.read(4 * 2**20)
            if not block:
                break
            counted += len(block)
            lines += block.count(b"\n")
            last = block
    if counted and not last.endswith(b"\n") and counted == size:
        lines += 1
    if path.suffix.lower() == ".csv":
        lines = max(0, lines - 1)
    if not lines:
        return Survey(0, 0, f"{path.name} has no rows")
    exact = counted == size
    rows = lines if exact else int(lines * size / counted)
    how = "lines counted" if exact else f"lines of the first {_COUNTED_BYTES // 2**20} MiB"
    if path.suffix.lower() == ".csv":
        how += ", fewer rows where a quoted cell holds a line break"
    return Survey(rows, int(size / FILE_BYTES_PER_TOKEN), how)
