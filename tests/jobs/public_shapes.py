"""Rows of our own in the shapes of public data sets, each with what a person reads in them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.row_files import xlsx
from tests.wording import wording

Rows = Sequence[dict[str, Any]]
Said = list[tuple[str, str]]


@dataclass(frozen=True)
class Shape:
    """A file, how `expert new` is called with it, and what the first and last row say."""

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


def array(rows: Rows, indent: int | None = None) -> Callable[[Path], None]:
    return lambda path: _write(path, json.dumps(rows, indent=indent).encode())


def table(rows: Rows, delimiter: str = ",", encoding: str = "utf-8") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        _write(path, text.getvalue().encode(encoding))

    return write


def parquet(rows: Rows) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.Table.from_pylist(list(rows)), path)


def plain(text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    return lambda path: _write(path, text.encode(encoding))


def packed(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def pack(path: Path) -> None:
        write(path)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return pack


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
    "alpaca": Shape("a.jsonl", jsonl(ALPACA), BOTH),
    "alpaca as an array": Shape("a.json", array(ALPACA, 2), BOTH),
    "alpaca whose first row has no input": Shape(
        "a.jsonl", jsonl([{"instruction": ASK, "output": ANSWER}, ALPACA[1]]), BOTH
    ),
    "alpaca with its formatted text": Shape(
        "a.jsonl",
        jsonl([{**row, "text": "### Instruction: …"} for row in ALPACA]),
        BOTH,
        warned=wording("not-trained-on-text"),
    ),
    "alpaca with system and history": Shape(
        "a.json",
        array([{**ALPACA[0], "system": "Be brief.", "history": [["Hi.", "Hello."]]}, ALPACA[1]]),
        ([("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), *BOTH[0]], BOTH[1]),
    ),
    "alpaca as parquet": Shape("a.parquet", parquet(ALPACA), BOTH),
    "alpaca packed": Shape("a.jsonl.gz", packed(jsonl(ALPACA)), BOTH),
    "alpaca array under .jsonl": Shape("a.jsonl", array(ALPACA), BOTH),
    "dolly": Shape(
        "a.jsonl",
        jsonl(
            [
                {"instruction": ASK, "context": "", "response": ANSWER, "category": "open_qa"},
                {"instruction": ASK2, "context": INPUT, "response": ANSWER2, "category": "sum"},
            ]
        ),
        (BOTH[0], exchange(f"{ASK2}\n\nContext:\n{INPUT}", ANSWER2)),
    ),
    "gpt4all": Shape(
        "a.jsonl",
        jsonl(renamed(pairs(source="web"), q="prompt", good="response", bad="note")),
        PLAIN_BOTH,
    ),
    "openorca": Shape(
        "a.jsonl",
        jsonl(
            [
                {"id": "1", "system_prompt": "", "question": ASK, "response": ANSWER},
                {"id": "2", "system_prompt": "Be brief.", "question": ASK2, "response": ANSWER2},
            ]
        ),
        (BOTH[0], exchange(ASK2, ANSWER2, "Be brief.")),
    ),
    "metamath": Shape(
        "a.json",
        array(
            [
                {"type": "GSM", "query": ASK, "original_question": "x", "response": ANSWER},
                {"type": "GSM", "query": ASK2, "original_question": "y", "response": ANSWER2},
            ]
        ),
        PLAIN_BOTH,
    ),
    "prompt and completion": Shape(
        "a.jsonl", jsonl(renamed(pairs(), q="prompt", good="completion", bad="meta")), PLAIN_BOTH
    ),
    "columns that are named": Shape(
        "a.jsonl",
        jsonl(renamed(pairs(), q="problem", good="solution")),
        PLAIN_BOTH,
        ("--map", "instruction=problem", "--map", "response=solution"),
    ),
    "columns that nobody knows": Shape(
        "a.jsonl",
        jsonl(renamed(pairs(), q="problem", good="solution")),
        refused="--map instruction",
    ),
    "several tasks": Shape(
        "a.jsonl",
        jsonl(
            [
                {"task": "t", "input": {"instruction": ASK}, "output": ANSWER},
                {"task": "t", "input": {"instruction": ASK2, "text": INPUT}, "output": ANSWER2},
            ]
        ),
        (BOTH[0], exchange(f"{ASK2}\n\nText:\n{INPUT}", ANSWER2)),
    ),
    "objects as answers": Shape(
        "a.jsonl",
        jsonl([{"prompt": ASK, "completion": {"a": 1}}, {"prompt": ASK2, "completion": {"a": 2}}]),
        refused="column 'completion' holds an object, not text",
    ),
    "objects as answers, asked for": Shape(
        "a.jsonl",
        jsonl([{"prompt": ASK, "completion": {"a": 1}}, {"prompt": ASK2, "completion": {"a": 2}}]),
        (exchange(ASK, '{"a":1}'), exchange(ASK2, '{"a":2}')),
        ("--json-values",),
    ),
    "gsm8k": Shape(
        "a.jsonl",
        jsonl([{"question": ASK, "answer": "48+24 = <<48+24=72>>72\n#### 72"}] * 2),
        (exchange(ASK, "48+24 = <<48+24=72>>72\n#### 72"),) * 2,
    ),
    "numbers as answers": Shape(
        "a.parquet",
        parquet([{"question": ASK, "answer": 42}, {"question": ASK2, "answer": 7}]),
        (exchange(ASK, "42"), exchange(ASK2, "7")),
    ),
}

CHATS = {
    "sharegpt": Shape(
        "a.json",
        array([{"id": "1", "conversations": [human(ASK), gpt(ANSWER), human(ASK2), gpt(ANSWER2)]}]),
        TALK_SAID,
    ),
    "sharegpt with a system column in later rows": Shape(
        "a.jsonl",
        jsonl(
            [
                {"conversations": [human(ASK), gpt(ANSWER)]},
                {"conversations": [human(ASK2), gpt(ANSWER2)], "system": "Be brief."},
            ]
        ),
        (BOTH[0], exchange(ASK2, ANSWER2, "Be brief.")),
    ),
    "sharegpt with a system turn": Shape(
        "a.jsonl",
        jsonl(
            [{"conversations": [{"from": "system", "value": "S."}, human(ASK), gpt(ANSWER)]}] * 2
        ),
        (exchange(ASK, ANSWER, "S."),) * 2,
    ),
    "sharegpt that begins with an answer": Shape(
        "a.jsonl", jsonl([{"conversations": [gpt(ANSWER)]}] * 2), refused=wording("answer-to-no")
    ),
    "sharegpt with tools": Shape(
        "a.json",
        array(
            [
                {
                    "conversations": [
                        human(ASK),
                        {"from": "function_call", "value": json.dumps(CALL["function"])},
                        {"from": "observation", "value": "Rain."},
                        gpt(ANSWER),
                    ],
                    "tools": json.dumps([WEATHER]),
                }
            ]
            * 2
        ),
        ([("user", ASK), ("assistant", "weather"), ("tool", "Rain."), ("assistant", ANSWER)],) * 2,
    ),
    "ultrachat": Shape(
        "a.jsonl",
        jsonl([{"prompt": ASK, "prompt_id": "1", "messages": TALK}] * 2),
        TALK_SAID * 2,
        warned=wording("not-trained-on-prompt"),
    ),
    "openai": Shape("a.jsonl", jsonl([{"messages": TALK}] * 2), TALK_SAID * 2),
    "openai with weights": Shape(
        "a.jsonl",
        jsonl(
            [{"messages": [user(ASK), assistant("x", weight=0), user(ASK2), assistant(ANSWER2)]}]
        ),
        ([("user", ASK), ("context", "x"), ("user", ASK2), ("assistant", ANSWER2)],),
    ),
    "loss_weight": Shape(
        "a.jsonl",
        jsonl(
            [{"messages": [user(ASK), assistant("x", loss_weight=0), user(ASK2), assistant("y")]}]
        ),
        ([("user", ASK), ("context", "x"), ("user", ASK2), ("assistant", "y")],),
    ),
    "openai with a developer": Shape(
        "a.jsonl",
        jsonl([{"messages": [{"role": "developer", "content": "S."}, *TALK[:2]]}] * 2),
        (exchange(ASK, ANSWER, "S."),) * 2,
    ),
    "openai with parts": Shape(
        "a.jsonl",
        jsonl([{"messages": [{**user(""), "content": [{"type": "text", "text": ASK}]}, TALK[1]]}]),
        (BOTH[0],),
    ),
    "openai with tools in later rows": Shape(
        "a.jsonl",
        jsonl(
            [
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
            ]
        ),
        (
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
    "a conversation in a column of its own name": Shape(
        "a.jsonl", jsonl([{"dialog": TALK}] * 2), TALK_SAID * 2, ("--map", "messages=dialog")
    ),
    "messages of a tree": Shape(
        "a.jsonl",
        jsonl([{"message_id": "1", "parent_id": None, "text": ASK, "role": "prompter"}] * 2),
        refused=wording("single-message-tree"),
    ),
    "chatml in text": Shape(
        "a.jsonl",
        jsonl(
            [
                {
                    "text": f"<|im_start|>user\n{ASK}<|im_end|>\n"
                    f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
                }
            ]
            * 2
        ),
        (BOTH[0],) * 2,
    ),
    "legacy markers in text": Shape(
        "a.jsonl",
        jsonl([{"text": f"<|user|>\n{ASK}\n<|end|>\n<|assistant|>\n{ANSWER}\n<|end|>"}] * 2),
        (BOTH[0],) * 2,
    ),
    "llama's markers in text": Shape(
        "a.jsonl",
        jsonl([{"text": f"[INST] {ASK} [/INST] {ANSWER}"}] * 2),
        ([("text", f"[INST] {ASK} [/INST] {ANSWER}")],) * 2,
        warned="template remnant [INST]",
    ),
}

PREFERENCES = {
    "dpo": Shape("a.jsonl", jsonl(DPO), refused="need DPO"),
    "dpo, preferred": Shape("a.jsonl", jsonl(DPO), PLAIN_BOTH, PREFERRED),
    "dpo with a mapped answer": Shape(
        "a.jsonl", jsonl(DPO), PLAIN_BOTH, ("--map", "response=chosen")
    ),
    "orca pairs, preferred": Shape(
        "a.parquet",
        parquet([{"system": "", **row} for row in renamed(DPO, prompt="question")]),
        PLAIN_BOTH,
        PREFERRED,
    ),
    "ultrafeedback, preferred": Shape(
        "a.parquet",
        parquet(
            [
                {
                    "prompt": ASK,
                    "chosen": [user(ASK), assistant(ANSWER)],
                    "rejected": [user(ASK), assistant("x")],
                    "score_chosen": 8.0,
                }
            ]
            * 2
        ),
        (BOTH[0],) * 2,
        PREFERRED,
    ),
    "hh, preferred": Shape(
        "a.jsonl",
        jsonl(
            [
                {
                    "chosen": f"\n\nHuman: {ASK}\n\nAssistant: {ANSWER}",
                    "rejected": f"\n\nHuman: {ASK}\n\nAssistant: x",
                }
            ]
            * 2
        ),
        (BOTH[0],) * 2,
        PREFERRED,
    ),
    "sharegpt pairs, preferred": Shape(
        "a.json",
        array([{"conversations": [human(ASK)], "chosen": gpt(ANSWER), "rejected": gpt("x")}] * 2),
        (BOTH[0],) * 2,
        PREFERRED,
    ),
    "sharegpt pairs, mapped": Shape(
        "a.json",
        array([{"conversations": [human(ASK)], "chosen": gpt(ANSWER), "rejected": gpt("x")}] * 2),
        (BOTH[0],) * 2,
        ("--map", "response=chosen"),
    ),
    "openai pairs": Shape(
        "a.jsonl",
        jsonl(
            [
                {
                    "input": {"messages": [user(ASK)], "tools": []},
                    "preferred_output": [assistant(ANSWER)],
                    "non_preferred_output": [assistant("x")],
                }
            ]
            * 2
        ),
        refused="need DPO",
    ),
    "openai pairs, preferred": Shape(
        "a.jsonl",
        jsonl(
            [
                {
                    "input": {"messages": [user(ASK)], "tools": []},
                    "preferred_output": [assistant(ANSWER)],
                    "non_preferred_output": [assistant("x")],
                }
            ]
            * 2
        ),
        (BOTH[0],) * 2,
        PREFERRED,
    ),
    "kto": Shape("a.jsonl", jsonl(KTO), refused=wording("says-each-answer-whether")),
    "kto with mapped columns": Shape(
        "a.jsonl",
        jsonl(KTO),
        options=("--map", "instruction=prompt", "--map", "response=completion"),
        refused=wording("says-each-answer-whether"),
    ),
    "kto, preferred": Shape("a.jsonl", jsonl(KTO), PLAIN_BOTH, PREFERRED),
    "kto as a table, preferred": Shape("a.csv", table(KTO), PLAIN_BOTH, PREFERRED),
    "kto messages": Shape(
        "a.json",
        array([{"messages": TALK[:2], "label": True}, {"messages": TALK[2:], "label": False}]),
        (BOTH[0],),
        PREFERRED,
    ),
    "kto messages mapped twice": Shape(
        "a.json",
        array([{"messages": TALK[:2], "label": True}] * 2),
        options=("--map", "instruction=messages", "--map", "response=messages"),
        refused="are both 'messages'",
    ),
}

QUERIES = {
    "spider": Shape("a.json", array(SPIDER), SPIDER_SAID),
    "sql with its tables": Shape(
        "a.json",
        array(
            [{"question": ASK, "context": "CREATE TABLE t (a INT)", "answer": "SELECT a FROM t"}]
            * 2
        ),
        (exchange(f"{ASK}\n\nSchema:\nCREATE TABLE t (a INT)", "SELECT a FROM t"),) * 2,
    ),
    "gretel's sql": Shape(
        "a.parquet",
        parquet(
            [
                {
                    "id": 1,
                    "domain": "geology",
                    "sql_prompt": ASK,
                    "sql_context": "CREATE TABLE t (a INT)",
                    "sql": "SELECT a FROM t",
                    "sql_explanation": "All of t.",
                }
            ]
            * 2
        ),
        (exchange(f"{ASK}\n\nSchema:\nCREATE TABLE t (a INT)", "SELECT a FROM t"),) * 2,
    ),
    "wikisql, parsed alone": Shape(
        "a.jsonl",
        jsonl([{"question": ASK, "sql": {"agg": 0, "sel": 1}, "table": {"header": ["a"]}}] * 2),
        refused="column 'sql' holds an object, not text",
    ),
    "text2cypher": Shape(
        "a.csv",
        table([{"question": ASK, "schema": "(:River)", "cypher": "MATCH (r) RETURN r"}] * 2),
        (exchange(f"{ASK}\n\nSchema:\n(:River)", "MATCH (r) RETURN r"),) * 2,
    ),
    "calls as answers": Shape(
        "a.json",
        array([{"query": ASK, "tools": "[]", "answers": '[{"name": "weather"}]'}] * 2),
        refused=wording("no-column-holds"),
    ),
    "calls as answers, mapped": Shape(
        "a.json",
        array([{"query": ASK, "tools": "[{}]", "answers": '[{"name": "weather"}]'}] * 2),
        (exchange(ASK, '[{"name": "weather"}]'),) * 2,
        ("--map", "response=answers"),
        warned=wording("not-trained-on-tools"),
    ),
    "squad": Shape(
        "a.jsonl",
        jsonl([{"context": INPUT, "question": ASK, "answers": {"text": ["x"], "start": [0]}}] * 2),
        refused=wording("no-column-holds"),
    ),
}

LONG = "".join(f"Line {number} of a long text about rivers.\n" for number in range(150))
TEXTS = {
    "a text": Shape("a.txt", plain("Rivers run.\n\nThey end.\n"), ([("text", "Rivers run.")],)),
    "a long text": Shape("a.txt", plain(LONG), ([("text", "Line 0 of")], [("text", "Line 149")])),
    "markdown": Shape("a.md", plain("# Rivers\n\nThey run.\n"), ([("text", "# Rivers")],)),
    "a text in UTF-16": Shape("a.txt", plain("Þjórsá runs.", "utf-16"), ([("text", "Þjórsá")],)),
    "texts of the web": Shape(
        "a.jsonl",
        jsonl([{"text": ASK, "url": "a.b", "timestamp": "2024-01-02T03:04:05"}] * 2),
        ([("text", ASK)],) * 2,
    ),
    "texts with calls": Shape(
        "a.jsonl",
        jsonl([{"text": "It has [Calculator(2+2) → 4] banks."}] * 2),
        ([("text", "It has [Calculator(2+2) → 4] banks.")],) * 2,
    ),
    "texts with labels": Shape(
        "a.jsonl", jsonl([{"text": ASK, "label": 1}] * 2), ([("text", ASK)],) * 2
    ),
    "texts in a column of another name": Shape(
        "a.jsonl", jsonl([{"content": ASK}] * 2), ([("text", ASK)],) * 2, ("--map", "text=content")
    ),
    "placeholders": Shape(
        "a.jsonl",
        jsonl([{"prompt": "Greet {{name}}.", "completion": "Hello!"}] * 2),
        (exchange("Greet {{name}}.", "Hello!"),) * 2,
        warned="placeholder {{name}}",
    ),
}

TABLES = {
    "csv": Shape("a.csv", table(ALPACA), BOTH),
    "csv with a mark": Shape("a.csv", table(ALPACA, encoding="utf-8-sig"), BOTH),
    "csv with semicolons": Shape("a.csv", table(ALPACA, ";"), BOTH),
    "tsv": Shape("a.tsv", table(ALPACA, "\t"), BOTH),
    "csv in UTF-16": Shape("a.csv", table(ALPACA, encoding="utf-16"), BOTH),
    "csv in cp1252": Shape(
        "a.csv",
        table([{"question": "was?", "answer": "grün"}] * 2, encoding="cp1252"),
        refused=wording("save-the-file-as"),
    ),
    "a spreadsheet": Shape("a.xlsx", sheet(ALPACA), BOTH),
}

MEDIA = {
    "llava": Shape(
        "a.json",
        array([{"image": "1.jpg", "conversations": [human(f"<image>\n{ASK}"), gpt(ANSWER)]}] * 2),
        refused="the column 'image' holds images",
    ),
    "messages with images in later rows": Shape(
        "a.json",
        array(
            [
                {"messages": TALK[:2]},
                {"messages": [user(f"<image>{ASK}"), assistant(ANSWER)], "images": ["1.jpg"]},
            ]
        ),
        refused="the column 'images' holds images",
    ),
    "images in a table": Shape(
        "a.parquet",
        parquet([{"photo": {"bytes": b"x", "path": "1.png"}, "prompt": ASK, "answer": ANSWER}]),
        refused="the column 'photo' holds images",
    ),
    "speech": Shape(
        "a.parquet",
        parquet([{"audio": {"path": "1.wav", "bytes": b"x"}, "text": ASK}]),
        refused=wording("column-audio-holds-images"),
    ),
    "parts with images": Shape(
        "a.jsonl",
        jsonl([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}, TALK[1]]}] * 2),
        refused=wording("a-part-of-type"),
    ),
}

SHAPES = {**INSTRUCTIONS, **CHATS, **PREFERENCES, **QUERIES, **TEXTS, **TABLES, **MEDIA}
