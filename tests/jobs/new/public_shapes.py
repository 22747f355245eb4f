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

from tests.data.read.row_files import xlsx
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


def of_lines(*rows: dict[str, Any], **about: Any) -> Shape:
    return Shape("a.jsonl", jsonl(rows), **about)


def of_array(*rows: dict[str, Any], **about: Any) -> Shape:
    return Shape("a.json", array(rows), **about)


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
    "alpaca": of_lines(*ALPACA, said=BOTH),
    "alpaca as an array": Shape("a.json", array(ALPACA, 2), BOTH),
    "alpaca whose first row has no input": of_lines(
        {"instruction": ASK, "output": ANSWER}, ALPACA[1], said=BOTH
    ),
    "alpaca with its formatted text": of_lines(
        *([{**row, "text": "### Instruction: …"} for row in ALPACA]),
        said=BOTH,
        warned=wording("not-trained-on-text"),
    ),
    "alpaca with system and history": of_array(
        {**ALPACA[0], "system": "Be brief.", "history": [["Hi.", "Hello."]]},
        ALPACA[1],
        said=(
            [("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), *BOTH[0]],
            BOTH[1],
        ),
    ),
    "alpaca as parquet": Shape("a.parquet", parquet(ALPACA), BOTH),
    "alpaca packed": Shape("a.jsonl.gz", packed(jsonl(ALPACA)), BOTH),
    "alpaca array under .jsonl": Shape("a.jsonl", array(ALPACA), BOTH),
    "dolly": of_lines(
        {"instruction": ASK, "context": "", "response": ANSWER, "category": "open_qa"},
        {"instruction": ASK2, "context": INPUT, "response": ANSWER2, "category": "sum"},
        said=(BOTH[0], exchange(f"{ASK2}\n\nContext:\n{INPUT}", ANSWER2)),
    ),
    "gpt4all": of_lines(
        *renamed(pairs(source="web"), q="prompt", good="response", bad="note"), said=PLAIN_BOTH
    ),
    "openorca": of_lines(
        {"id": "1", "system_prompt": "", "question": ASK, "response": ANSWER},
        {"id": "2", "system_prompt": "Be brief.", "question": ASK2, "response": ANSWER2},
        said=(BOTH[0], exchange(ASK2, ANSWER2, "Be brief.")),
    ),
    "metamath": of_array(
        {"type": "GSM", "query": ASK, "original_question": "x", "response": ANSWER},
        {"type": "GSM", "query": ASK2, "original_question": "y", "response": ANSWER2},
        said=PLAIN_BOTH,
    ),
    "prompt and completion": of_lines(
        *renamed(pairs(), q="prompt", good="completion", bad="meta"), said=PLAIN_BOTH
    ),
    "columns that are named": of_lines(
        *renamed(pairs(), q="problem", good="solution"),
        said=PLAIN_BOTH,
        options=("--map", "instruction=problem", "--map", "response=solution"),
    ),
    "columns that nobody knows": of_lines(
        *renamed(pairs(), q="problem", good="solution"), refused="--map instruction"
    ),
    "several tasks": of_lines(
        {"task": "t", "input": {"instruction": ASK}, "output": ANSWER},
        {"task": "t", "input": {"instruction": ASK2, "text": INPUT}, "output": ANSWER2},
        said=(BOTH[0], exchange(f"{ASK2}\n\nText:\n{INPUT}", ANSWER2)),
    ),
    "objects as answers": of_lines(
        {"prompt": ASK, "completion": {"a": 1}},
        {"prompt": ASK2, "completion": {"a": 2}},
        refused="column 'completion' holds an object, not text",
    ),
    "objects as answers, asked for": of_lines(
        {"prompt": ASK, "completion": {"a": 1}},
        {"prompt": ASK2, "completion": {"a": 2}},
        said=(exchange(ASK, '{"a":1}'), exchange(ASK2, '{"a":2}')),
        options=("--json-values",),
    ),
    "gsm8k": of_lines(
        *([{"question": ASK, "answer": "48+24 = <<48+24=72>>72\n#### 72"}] * 2),
        said=(exchange(ASK, "48+24 = <<48+24=72>>72\n#### 72"),) * 2,
    ),
    "numbers as answers": Shape(
        "a.parquet",
        parquet([{"question": ASK, "answer": 42}, {"question": ASK2, "answer": 7}]),
        (exchange(ASK, "42"), exchange(ASK2, "7")),
    ),
}

CHATS = {
    "sharegpt": of_array(
        {"id": "1", "conversations": [human(ASK), gpt(ANSWER), human(ASK2), gpt(ANSWER2)]},
        said=TALK_SAID,
    ),
    "sharegpt with a system column in later rows": of_lines(
        {"conversations": [human(ASK), gpt(ANSWER)]},
        {"conversations": [human(ASK2), gpt(ANSWER2)], "system": "Be brief."},
        said=(BOTH[0], exchange(ASK2, ANSWER2, "Be brief.")),
    ),
    "sharegpt with a system turn": of_lines(
        *([{"conversations": [{"from": "system", "value": "S."}, human(ASK), gpt(ANSWER)]}] * 2),
        said=(exchange(ASK, ANSWER, "S."),) * 2,
    ),
    "sharegpt that begins with an answer": of_lines(
        *([{"conversations": [gpt(ANSWER)]}] * 2), refused=wording("answer-to-no")
    ),
    "sharegpt with tools": of_array(
        *(
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
        said=([("user", ASK), ("assistant", "weather"), ("tool", "Rain."), ("assistant", ANSWER)],)
        * 2,
    ),
    "ultrachat": of_lines(
        *([{"prompt": ASK, "prompt_id": "1", "messages": TALK}] * 2),
        said=TALK_SAID * 2,
        warned=wording("not-trained-on-prompt"),
    ),
    "openai": of_lines(*([{"messages": TALK}] * 2), said=TALK_SAID * 2),
    "openai with weights": of_lines(
        {"messages": [user(ASK), assistant("x", weight=0), user(ASK2), assistant(ANSWER2)]},
        said=([("user", ASK), ("context", "x"), ("user", ASK2), ("assistant", ANSWER2)],),
    ),
    "loss_weight": of_lines(
        {"messages": [user(ASK), assistant("x", loss_weight=0), user(ASK2), assistant("y")]},
        said=([("user", ASK), ("context", "x"), ("user", ASK2), ("assistant", "y")],),
    ),
    "openai with a developer": of_lines(
        *([{"messages": [{"role": "developer", "content": "S."}, *TALK[:2]]}] * 2),
        said=(exchange(ASK, ANSWER, "S."),) * 2,
    ),
    "openai with parts": of_lines(
        {"messages": [{**user(""), "content": [{"type": "text", "text": ASK}]}, TALK[1]]},
        said=(BOTH[0],),
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
    "a conversation in a column of its own name": of_lines(
        *([{"dialog": TALK}] * 2), said=TALK_SAID * 2, options=("--map", "messages=dialog")
    ),
    "messages of a tree": of_lines(
        *([{"message_id": "1", "parent_id": None, "text": ASK, "role": "prompter"}] * 2),
        refused=wording("single-message-tree"),
    ),
    "chatml in text": of_lines(
        *(
            [
                {
                    "text": f"<|im_start|>user\n{ASK}<|im_end|>\n"
                    f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
                }
            ]
            * 2
        ),
        said=(BOTH[0],) * 2,
    ),
    "legacy markers in text": of_lines(
        *([{"text": f"<|user|>\n{ASK}\n<|end|>\n<|assistant|>\n{ANSWER}\n<|end|>"}] * 2),
        said=(BOTH[0],) * 2,
    ),
    "llama's markers in text": of_lines(
        *([{"text": f"[INST] {ASK} [/INST] {ANSWER}"}] * 2),
        said=([("text", f"[INST] {ASK} [/INST] {ANSWER}")],) * 2,
        warned="template remnant [INST]",
    ),
}

PREFERENCES = {
    "dpo": of_lines(*DPO, refused="need DPO"),
    "dpo, preferred": of_lines(*DPO, said=PLAIN_BOTH, options=PREFERRED),
    "dpo with a mapped answer": of_lines(
        *DPO, said=PLAIN_BOTH, options=("--map", "response=chosen")
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
    "hh, preferred": of_lines(
        *(
            [
                {
                    "chosen": f"\n\nHuman: {ASK}\n\nAssistant: {ANSWER}",
                    "rejected": f"\n\nHuman: {ASK}\n\nAssistant: x",
                }
            ]
            * 2
        ),
        said=(BOTH[0],) * 2,
        options=PREFERRED,
    ),
    "sharegpt pairs, preferred": of_array(
        *([{"conversations": [human(ASK)], "chosen": gpt(ANSWER), "rejected": gpt("x")}] * 2),
        said=(BOTH[0],) * 2,
        options=PREFERRED,
    ),
    "sharegpt pairs, mapped": of_array(
        *([{"conversations": [human(ASK)], "chosen": gpt(ANSWER), "rejected": gpt("x")}] * 2),
        said=(BOTH[0],) * 2,
        options=("--map", "response=chosen"),
    ),
    "openai pairs": of_lines(
        *(
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
    "openai pairs, preferred": of_lines(
        *(
            [
                {
                    "input": {"messages": [user(ASK)], "tools": []},
                    "preferred_output": [assistant(ANSWER)],
                    "non_preferred_output": [assistant("x")],
                }
            ]
            * 2
        ),
        said=(BOTH[0],) * 2,
        options=PREFERRED,
    ),
    "kto": of_lines(*KTO, refused=wording("says-each-answer-whether")),
    "kto with mapped columns": of_lines(
        *KTO,
        options=("--map", "instruction=prompt", "--map", "response=completion"),
        refused=wording("says-each-answer-whether"),
    ),
    "kto, preferred": of_lines(*KTO, said=PLAIN_BOTH, options=PREFERRED),
    "kto as a table, preferred": Shape("a.csv", table(KTO), PLAIN_BOTH, PREFERRED),
    "kto messages": of_array(
        {"messages": TALK[:2], "label": True},
        {"messages": TALK[2:], "label": False},
        said=(BOTH[0],),
        options=PREFERRED,
    ),
    "kto messages mapped twice": of_array(
        *([{"messages": TALK[:2], "label": True}] * 2),
        options=("--map", "instruction=messages", "--map", "response=messages"),
        refused="are both 'messages'",
    ),
}

QUERIES = {
    "spider": of_array(*SPIDER, said=SPIDER_SAID),
    "sql with its tables": of_array(
        *(
            [{"question": ASK, "context": "CREATE TABLE t (a INT)", "answer": "SELECT a FROM t"}]
            * 2
        ),
        said=(exchange(f"{ASK}\n\nSchema:\nCREATE TABLE t (a INT)", "SELECT a FROM t"),) * 2,
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
    "wikisql, parsed alone": of_lines(
        *([{"question": ASK, "sql": {"agg": 0, "sel": 1}, "table": {"header": ["a"]}}] * 2),
        refused="column 'sql' holds an object, not text",
    ),
    "text2cypher": Shape(
        "a.csv",
        table([{"question": ASK, "schema": "(:River)", "cypher": "MATCH (r) RETURN r"}] * 2),
        (exchange(f"{ASK}\n\nSchema:\n(:River)", "MATCH (r) RETURN r"),) * 2,
    ),
    "calls as answers": of_array(
        *([{"query": ASK, "tools": "[]", "answers": '[{"name": "weather"}]'}] * 2),
        refused=wording("no-column-holds"),
    ),
    "calls as answers, mapped": of_array(
        *([{"query": ASK, "tools": "[{}]", "answers": '[{"name": "weather"}]'}] * 2),
        said=(exchange(ASK, '[{"name": "weather"}]'),) * 2,
        options=("--map", "response=answers"),
        warned=wording("not-trained-on-tools"),
    ),
    "squad": of_lines(
        *([{"context": INPUT, "question": ASK, "answers": {"text": ["x"], "start": [0]}}] * 2),
        refused=wording("no-column-holds"),
    ),
}

LONG = "".join(f"Line {number} of a long text about rivers.\n" for number in range(150))
TEXTS = {
    "a text": Shape("a.txt", plain("Rivers run.\n\nThey end.\n"), ([("text", "Rivers run.")],)),
    "a long text": Shape("a.txt", plain(LONG), ([("text", "Line 0 of")], [("text", "Line 149")])),
    "markdown": Shape("a.md", plain("# Rivers\n\nThey run.\n"), ([("text", "# Rivers")],)),
    "a text in UTF-16": Shape("a.txt", plain("Þjórsá runs.", "utf-16"), ([("text", "Þjórsá")],)),
    "texts of the web": of_lines(
        *([{"text": ASK, "url": "a.b", "timestamp": "2024-01-02T03:04:05"}] * 2),
        said=([("text", ASK)],) * 2,
    ),
    "texts with calls": of_lines(
        *([{"text": "It has [Calculator(2+2) → 4] banks."}] * 2),
        said=([("text", "It has [Calculator(2+2) → 4] banks.")],) * 2,
    ),
    "texts with labels": of_lines(*([{"text": ASK, "label": 1}] * 2), said=([("text", ASK)],) * 2),
    "texts in a column of another name": of_lines(
        *([{"content": ASK}] * 2), said=([("text", ASK)],) * 2, options=("--map", "text=content")
    ),
    "placeholders": of_lines(
        *([{"prompt": "Greet {{name}}.", "completion": "Hello!"}] * 2),
        said=(exchange("Greet {{name}}.", "Hello!"),) * 2,
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
    "llava": of_array(
        *([{"image": "1.jpg", "conversations": [human(f"<image>\n{ASK}"), gpt(ANSWER)]}] * 2),
        refused="the column 'image' holds images",
    ),
    "messages with images in later rows": of_array(
        {"messages": TALK[:2]},
        {"messages": [user(f"<image>{ASK}"), assistant(ANSWER)], "images": ["1.jpg"]},
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
    "parts with images": of_lines(
        *([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}, TALK[1]]}] * 2),
        refused=wording("a-part-of-type"),
    ),
}

SHAPES = {**INSTRUCTIONS, **CHATS, **PREFERENCES, **QUERIES, **TEXTS, **TABLES, **MEDIA}
