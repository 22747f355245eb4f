"""The text that `tiny` learns from: rows as conversations, rows as plain text, and documents.

Of every source a twenty-fifth is held out to judge by: whole tables of SQL and whole files of
Python at a time. Files of test rows are never opened.

To these come rows that are made here. Some teach copying, which every expert needs and 3.8 million
weights learn slowly: texts that repeat themselves, and conversations that ask for a part of what
they show. Others show how the answers of the experts in experts/ look, as plain text, without the
questions: what is to be learnt by a fine-tune is left to it.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, str]
HELD_OUT = 25
"""One group of rows in so many is held out."""

MADE = 4000
"""Rows that are made of each kind: together 1.4 of the 9.2 million tokens of an epoch."""
MADE_SEED = 9001
"""Experts make their rows from other seeds."""
EXPERTS = Path(__file__).parents[1] / "experts"
ANSWERS = ("expert-json", "expert-sql", "expert-neo4j", "expert-typescript")

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
    count = MADE if rows is None else min(rows, MADE)
    for kind, make in _MADE.items():
        source = random.Random(f"{MADE_SEED} {kind}")
        for _ in range(count):
            row = make(source)
            mixture.add(kind, row, json.dumps(row))
    for name in ANSWERS:
        for group, text in answers_of(name, count):
            mixture.add(f"{name.removeprefix('expert-')}-answers", {"text": text}, group)
    return mixture


def answers_of(name: str, count: int) -> Iterator[tuple[str, str]]:
    """Skeletons and answers of an expert's training rows; those of its tests are of other forms."""
    if str(EXPERTS) not in sys.path:
        sys.path.insert(0, str(EXPERTS))
    from data_making.loading import generator_of
    from data_making.rows import make_rows

    draw = generator_of(EXPERTS / name).draw
    for made in make_rows(draw, count, "train", MADE_SEED):
        yield made.skeleton, f"{made.output}\n"


# --- copying --------------------------------------------------------------------------------------


def some_word(source: random.Random) -> str:
    """Letters in an order that no language has: it can be copied, not guessed."""
    return "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 7)))


def some_entry(source: random.Random) -> str:
    return some_word(source) if source.random() < 0.6 else str(source.randint(0, 9999))


def repeated(source: random.Random) -> Row:
    """A line of words and numbers, and the same line again, once or twice."""
    entries = [some_entry(source) for _ in range(source.randint(3, 12))]
    line = source.choice((" ", ", ", " | ", "; ")).join(entries)
    return {"text": "\n".join([line] * source.randint(2, 3)) + "\n"}


def written_in_two_ways(source: random.Random) -> Row:
    """A record in two of the ways in which records are written."""
    record = {some_word(source): some_entry(source) for _ in range(source.randint(2, 5))}
    ways = source.sample(
        [
            json.dumps(record),
            "\n".join(f"{key}: {value}" for key, value in record.items()),
            "; ".join(f"{key}={value}" for key, value in record.items()),
            "{" + ", ".join(f"{key}: '{value}'" for key, value in record.items()) + "}",
            ", ".join(f"{key} {value}" for key, value in record.items()),
        ],
        2,
    )
    return {"text": "\n\n".join(ways) + "\n"}


def asked_again(source: random.Random) -> Row:
    """A conversation that asks for all of a text."""
    entries = [some_entry(source) for _ in range(source.randint(2, 10))]
    text = source.choice((" ", ", ", "\n")).join(entries)
    request = source.choice(("Repeat this.", "Write this again.", "Copy the text."))
    return {"instruction": request, "input": text, "output": text}


def asked_for_one(source: random.Random) -> Row:
    """A conversation that asks for what stands beside a word."""
    keys = list({some_word(source) for _ in range(source.randint(2, 6))})
    keys.sort()
    source.shuffle(keys)
    pairs = {key: some_entry(source) for key in keys}
    asked = source.choice(keys)
    between, sign = source.choice(("\n", "; ", ", ")), source.choice((": ", "=", " is "))
    text = between.join(f"{key}{sign}{value}" for key, value in pairs.items())
    request = source.choice(("What is {}?", "Say what {} is.", "Look up {}.")).format(asked)
    return {"instruction": request, "input": text, "output": pairs[asked]}


_MADE: dict[str, Callable[[random.Random], Row]] = {
    "copy-text": repeated,
    "record-text": written_in_two_ways,
    "copy-chat": asked_again,
    "recall-chat": asked_for_one,
}


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
