"""The text that `tiny` learns from: rows as conversations, rows as plain text, and documents.

Of every source a twenty-fifth is held out to judge by: whole tables of SQL and whole files of
Python at a time. Files of test rows are never opened.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, str]
HELD_OUT = 25
"""One group of rows in so many is held out."""

# Neither tests nor installed packages, nor tables of character codes, are worth imitating.
_NO_PYTHON = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
_MACHINE_FACTS = "_sysconfigdata"


class Mixture:
    """Rows by kind: to learn from, and held out."""

    def __init__(self) -> None:
        self.train: dict[str, list[Row]] = {}
        self.validation: dict[str, list[Row]] = {}

    def add(self, kind: str, row: Row, group: str) -> None:
        split = self.validation if _number(f"held out {group}") % HELD_OUT == 0 else self.train
        split.setdefault(kind, []).append(row)

    def texts(self) -> Iterator[str]:
        """Everything in `train` as text, for a tokenizer to learn from."""
        for rows in self.train.values():
            for row in rows:
                yield from row.values()

    def write(self, folder: Path) -> dict[str, dict[str, str]]:
        """One file for each kind and split; returns the tasks of a manifest that names them."""
        tasks: dict[str, dict[str, str]] = {}
        for split, kinds in (("train", self.train), ("valid", self.validation)):
            for kind, rows in kinds.items():
                file = folder / f"{kind}-{split}.jsonl"
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.write_text("".join(lines), encoding="utf-8")
                tasks.setdefault(kind, {})[split] = file.name
        return tasks


def make_mixture(data: Path, *, rows: int | None = None) -> Mixture:
    """The whole mixture, or at most so many rows of each source."""
    mixture = Mixture()
    for kind, (file, as_text) in _CONVERSATIONS.items():
        seen: set[str] = set()
        for row in _rows_of(data / file, rows):
            text = json.dumps(row, sort_keys=True)
            if text in seen:
                continue
            seen.add(text)
            # Half of the rows as conversations teach the form; the rest teaches the language and
            # leaves a fine-tune on these rows something to learn.
            group = row.get("table_id", text)
            if _number(f"form {text}") % 2:
                mixture.add(f"{kind}-text", {"text": as_text(row)}, group)
            else:
                mixture.add(f"{kind}-chat", _conversation(row), group)
    for kind, file in _DOCUMENTS.items():
        for row in _rows_of(data / file, rows):
            mixture.add(kind, {"text": row["text"]}, row["text"])
    for name, text in _some(python_sources(), rows):
        mixture.add("python", {"text": text}, name)
    return mixture


def python_sources(library: Path | None = None) -> Iterator[tuple[str, str]]:
    """Names and texts of the running Python's standard library, in the order of their names."""
    root = library or Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in found:
        parts = Path(name).parts
        if _NO_PYTHON.intersection(parts) or parts[-1].startswith(_MACHINE_FACTS):
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def _conversation(row: dict[str, Any]) -> Row:
    columns = ("system", "instruction", "input", "output")
    return {column: row[column] for column in columns if column in row}


def _sql_text(row: dict[str, Any]) -> str:
    return f"{row['input']};\n\n-- {row['instruction']}\n{row['output']};\n"


def _cypher_text(row: dict[str, Any]) -> str:
    """Without the schema: there are only fifteen, and the conversations repeat them enough."""
    return f"// {row['instruction']}\n{row['output']}\n"


def _json_text(row: dict[str, Any]) -> str:
    return f"{row['output']}\n"


AsText = Callable[[dict[str, Any]], str]
_CONVERSATIONS: dict[str, tuple[str, AsText]] = {
    "sql": ("sql/train.jsonl", _sql_text),
    "cypher": ("cypher/train.jsonl", _cypher_text),
    "json": ("json/train.jsonl", _json_text),
}
_DOCUMENTS = {
    "typescript": "typescript/handbook_text.jsonl",
    "shakespeare": "shakespeare/train.jsonl",
}


def _rows_of(file: Path, limit: int | None) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as stream:
        for line in _some(stream, limit):
            yield json.loads(line)


def _some(found: Iterable[Any], limit: int | None) -> Iterator[Any]:
    for number, item in enumerate(found):
        if number == limit:
            return
        yield item


def _number(text: str) -> int:
    """A number that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
