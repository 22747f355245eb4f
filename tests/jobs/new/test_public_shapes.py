"""Rows of our own in the shapes of public data sets, each with what a person reads in them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.core.errors import ExpertError
from expert.jobs.datasets.check import check_dataset
from expert.jobs.new.new_expert import new_expert
from expert.run.open import prepare
from tests.data.read.row_files import xlsx
from tests.data.shards import read_back
from tests.each import each

Rows = Sequence[dict[str, Any]]
Said = list[tuple[str, str]]


@dataclass(frozen=True)
class Shape:
    """A file, how `expert new` is called with it, and the contents of its first and last row."""

    file: str
    content: Callable[[Path], None]
    said: tuple[Said, ...] = ()
    """For each row that is trained on: (role, text); ("text", …) for plain text."""
    options: tuple[str, ...] = ()
    refused: str = ""
    """Part of the sentence with which it is refused."""
    warned: str = ""
    """Part of a warning of `dataset check`."""


def jsonl(rows: Rows) -> Callable[[Path], None]:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return lambda path: _write(path, text.encode())


def array(rows: Rows) -> Callable[[Path], None]:
    return lambda path: _write(path, json.dumps(rows).encode())


def of_lines(*rows: dict[str, Any], **about: Any) -> Shape:
    return Shape("a.jsonl", jsonl(rows), **about)


def of_array(*rows: dict[str, Any], **about: Any) -> Shape:
    return Shape("a.json", array(rows), **about)


def twice(
    row: dict[str, Any], said: Said | None = None, kind: str = "jsonl", **about: Any
) -> Shape:
    """A file of two equal rows."""
    write = {"jsonl": jsonl, "json": array, "parquet": parquet, "csv": table}[kind]
    both = (said,) * 2 if said is not None else ()
    return Shape(f"a.{kind}", write([row] * 2), both, **about)


def table(rows: Rows, delimiter: str = ",") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        _write(path, text.getvalue().encode())

    return write


def parquet(rows: Rows) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.Table.from_pylist(list(rows)), path)


def plain(text: str) -> Callable[[Path], None]:
    return lambda path: _write(path, text.encode())


def sheet(rows: Rows) -> Callable[[Path], None]:
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    return lambda path: (xlsx(path, cells), None)[1]


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def exchange(request: str, answer: str, system: str = "") -> Said:
    before = [("system", system)] if system else []
    return [*before, ("user", request), ("assistant", answer)]


# Two rows for everybody; a few words each, so that nothing is cut.
ASK, ANSWER = "Name a river in Peru.", "The Ucayali is one."
ASK2, ANSWER2 = "Sum up the text.", "It rains."
INPUT = "Clouds gather over the hills."
WITH_INPUT = f"{ASK2}\n\nInput:\n{INPUT}"
BOTH = (exchange(ASK, ANSWER), exchange(WITH_INPUT, ANSWER2))
PLAIN_BOTH = (exchange(ASK, ANSWER), exchange(ASK2, ANSWER2))

ALPACA = [
    {"instruction": ASK, "input": "", "output": ANSWER},
    {"instruction": ASK2, "input": INPUT, "output": ANSWER2},
]


def human(text: str) -> dict[str, Any]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, Any]:
    return {"from": "gpt", "value": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def pairs(**names: Any) -> list[dict[str, Any]]:
    return [
        {"q": ASK, "good": ANSWER, "bad": "No idea.", **names},
        {"q": ASK2, "good": ANSWER2, "bad": "Hm.", **names},
    ]


def renamed(rows: Rows, **names: str) -> list[dict[str, Any]]:
    return [{names.get(key, key): value for key, value in row.items()} for row in rows]


WEATHER = {
    "name": "weather",
    "description": "Weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Lima"}}}
TALK = [user(ASK), assistant(ANSWER), user(ASK2), assistant(ANSWER2)]
TALK_SAID = (exchange(ASK, ANSWER) + exchange(ASK2, ANSWER2),)
PREFERRED = ("--preferred",)
DPO = renamed(pairs(), q="prompt", good="chosen", bad="rejected")
KTO = [
    {"prompt": ASK, "completion": ANSWER, "label": True},
    {"prompt": ASK, "completion": "No idea.", "label": False},
    {"prompt": ASK2, "completion": ANSWER2, "label": True},
]
SPIDER: list[dict[str, Any]] = [
    {
        "db_id": "rivers",
        "query": f"SELECT {number} FROM river",
        "query_toks": ["SELECT", str(number)],
        "query_toks_no_value": ["select", "value"],
        "question": f"Which is river {number}?",
        "question_toks": ["Which", "is"],
        "sql": {"except": None, "from": {"conds": []}, "select": [False, []]},
    }
    for number in (1, 2)
]
SPIDER_SAID = tuple(exchange(row["question"], row["query"]) for row in SPIDER)

INSTRUCTIONS = {
    "alpaca": of_lines(*ALPACA, said=BOTH),
    "alpaca with system and history": of_array(
        {**ALPACA[0], "system": "Be brief.", "history": [["Hi.", "Hello."]]},
        ALPACA[1],
        said=(
            [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), *BOTH[0]],
            BOTH[1],
        ),
    ),
    "dolly": of_lines(
        {"instruction": ASK, "context": "", "response": ANSWER, "category": "open_qa"},
        {"instruction": ASK2, "context": INPUT, "response": ANSWER2, "category": "sum"},
        said=(BOTH[0], exchange(f"{ASK2}\n\nContext:\n{INPUT}", ANSWER2)),
    ),
    "columns that are named": of_lines(
        *renamed(pairs(), q="problem", good="solution"),
        said=PLAIN_BOTH,
        options=("--map", "instruction=problem", "--map", "response=solution"),
    ),
    "several tasks": of_lines(
        {"task": "t", "input": {"instruction": ASK}, "output": ANSWER},
        {"task": "t", "input": {"instruction": ASK2, "text": INPUT}, "output": ANSWER2},
        said=(BOTH[0], exchange(f"{ASK2}\n\nText:\n{INPUT}", ANSWER2)),
    ),
    "objects as answers, asked for": of_lines(
        {"prompt": ASK, "completion": {"a": 1}},
        {"prompt": ASK2, "completion": {"a": 2}},
        said=(exchange(ASK, '{"a":1}'), exchange(ASK2, '{"a":2}')),
        options=("--json-values",),
    ),
}

CHATS = {
    "sharegpt": of_array(
        {"id": "1", "conversations": [human(ASK), gpt(ANSWER), human(ASK2), gpt(ANSWER2)]},
        said=TALK_SAID,
    ),
    "sharegpt with tools": twice(
        {
            "conversations": [
                human(ASK),
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "Rain."},
                gpt(ANSWER),
            ],
            "tools": json.dumps([WEATHER]),
        },
        [("user", ASK), ("assistant", "weather"), ("tool", "Rain."), ("assistant", ANSWER)],
        "json",
    ),
    "hermes calls in the text": twice(
        {
            "conversations": [
                human(ASK),
                gpt('<tool_call>{"name": "weather"}</tool_call>'),
                {"from": "tool", "value": "Rain."},
                gpt(ANSWER),
            ]
        },
        refused="(write the call as tool_calls; where the answer has it in its text, give the ",
    ),
    "a conversation under another name": twice(
        {"id": 1, "talk": TALK},
        refused="columns found: id, talk  (--map messages=talk reads its conversations)",
    ),
    "openai with weights": of_lines(
        {"messages": [user(ASK), assistant("x", weight=0), user(ASK2), assistant(ANSWER2)]},
        said=([("user", ASK), ("context", "x"), ("user", ASK2), ("assistant", ANSWER2)],),
    ),
    "openai with tools in later rows": of_lines(
        {"messages": TALK[:2]},
        {
            "messages": [
                user(ASK2),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "name": "weather", "content": "Rain."},
                assistant(ANSWER2),
            ],
            "tools": [TOOL],
        },
        said=(
            BOTH[0],
            [
                ("tools", "Weather of a place"),
                ("user", ASK2),
                ("assistant", "weather"),
                ("tool", "Rain."),
                ("assistant", ANSWER2),
            ],
        ),
    ),
    "messages as JSON in a table": Shape(
        "a.csv", table([{"id": n, "messages": json.dumps(TALK)} for n in (1, 2)]), TALK_SAID * 2
    ),
    "chatml in text": twice(
        {"text": f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"},
        BOTH[0],
    ),
    "llama's markers in text": twice(
        {"text": f"[INST] {ASK} [/INST] {ANSWER}"},
        [("text", f"[INST] {ASK} [/INST] {ANSWER}")],
        warned="template remnant [INST]",
    ),
}

SHAREGPT_PAIR = {"conversations": [human(ASK)], "chosen": gpt(ANSWER), "rejected": gpt("x")}
PREFERENCES = {
    "dpo": of_lines(*DPO, said=PLAIN_BOTH),
    "dpo, preferred": of_lines(*DPO, said=PLAIN_BOTH, options=PREFERRED),
    "sharegpt pairs, preferred": twice(SHAREGPT_PAIR, BOTH[0], "json", options=PREFERRED),
    "kto, preferred": of_lines(*KTO, said=PLAIN_BOTH, options=PREFERRED),
}

IN_SQL = exchange(f"{ASK}\n\nSchema:\nCREATE TABLE t (a INT)", "SELECT a FROM t")
QUERIES = {
    "spider": of_array(*SPIDER, said=SPIDER_SAID),
    "sql with its tables": twice(
        {"question": ASK, "context": "CREATE TABLE t (a INT)", "answer": "SELECT a FROM t"},
        IN_SQL,
        "json",
    ),
    "gretel's sql": twice(
        {
            "id": 1,
            "domain": "geology",
            "sql_prompt": ASK,
            "sql_context": "CREATE TABLE t (a INT)",
            "sql": "SELECT a FROM t",
            "sql_explanation": "All of t.",
        },
        IN_SQL,
        "parquet",
    ),
    "calls as answers": twice(
        {"query": ASK, "tools": "[]", "answers": '[{"name": "weather"}]'},
        kind="json",
        refused="(name them in --map PART=COLUMN: instruction and response",
    ),
    "answers as objects": twice(
        {"prompt": ASK, "completion": {"river": ANSWER}},
        refused="to train on it as JSON text: --json-values)",
    ),
}

LONG = "".join(f"Line {number} of a long text about rivers.\n" for number in range(150))
TEXTS = {
    "a text": Shape("a.txt", plain("Rivers run.\n\nThey end.\n"), ([("text", "Rivers run.")],)),
    "a long text": Shape("a.txt", plain(LONG), ([("text", "Line 0 of")], [("text", "Line 149")])),
    "texts with turns": twice(
        {"text": f"### Human: {ASK}### Assistant: {ANSWER}"},
        [("text", ASK)],
        warned="template remnant ### Human:",
    ),
}

TABLES = {
    "csv": Shape("a.csv", table(ALPACA), BOTH),
    "csv with semicolons": Shape("a.csv", table(ALPACA, ";"), BOTH),
    "a spreadsheet": Shape("a.xlsx", sheet(ALPACA), BOTH),
}

SHAPES = {**INSTRUCTIONS, **CHATS, **PREFERENCES, **QUERIES, **TEXTS, **TABLES}


# --- the prepared tokens hold what the rows contain ----------------------------------------------


ALL_ROWS = ("training.dataset.validation_split=0",)
ACCEPTED = {name: shape for name, shape in SHAPES.items() if not shape.refused}
REFUSED = {name: shape for name, shape in SHAPES.items() if shape.refused}


def made_from(shape: Shape, folder: Path) -> Path:
    file = folder / shape.file
    shape.content(file)
    options: dict[str, Any] = {
        "mapping": [part for part in shape.options if "=" in part],
        "preferred": "--preferred" in shape.options,
        "json_values": "--json-values" in shape.options,
    }
    return new_expert("one", data=file, into=folder, **options).manifest


@each("shape", REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_trained_on_is_refused_in_words(shape, tmp_path):
    with pytest.raises(ExpertError) as caught:
        made_from(shape, tmp_path)
    assert shape.refused in str(caught.value)


@pytest.mark.parametrize("shape", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_trained_on_is_what_the_rows_say(shape, tmp_path):
    manifest = made_from(shape, tmp_path)
    report = check_dataset(manifest, overrides=ALL_ROWS)
    assert report.problems == []
    warnings = "\n".join(report.warnings())
    assert shape.warned in warnings
    assert ("columns that are not used: " in warnings) == (
        "columns that are not used: " in shape.warned
    )
    data = prepare(manifest, overrides=ALL_ROWS)
    documents = read_back(data)
    if shape.said[0][0][0] == "text":
        everything = "".join(trained for trained, _ in documents)
        assert all(said[0][1] in everything for said in shape.said)
        return
    assert len(documents) == len(shape.said)
    for (trained, around), said in zip(documents, shape.said, strict=True):
        left = trained
        for answer in [text for role, text in said if role == "assistant"]:
            assert answer in left
            left = left.replace(answer, "", 1)
        for role, text in said:
            if role == "context":
                assert text not in left.replace("<|im_end|>", "")
            elif role != "assistant":
                assert text in around, role
                assert text not in left
