"""Makes the rows of expert-json: repair, conversion, picking, types of a schema.

    python experts/expert-json/make_data.py --rows 8000 --seed 7 --out datasets

Every row is about an object of two to four keys. The keys of the answer, in their order, are the
row's skeleton: an answer with the keys of a test row occurs in no training row.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from data_making.files import main
from data_making.rows import Made, Wanted

KEYS = (
    "name age city email id price color active country score title year size count status type "
    "level code rank total first last street phone"
).split()
WORDS = (
    "anna ben carla david emma paris london berlin rome madrid red green blue black white open "
    "closed new old small large first second high low north south east west book table chair phone "
    "music water sun moon tree river gold silver iron data user admin guest test main home work"
).split()
TYPES = {str: "string", int: "integer", bool: "boolean", type(None): "null", list: "array"}

Value = str | int | bool | None | list[str] | list[int]
Object = dict[str, Value]


def draw(source: random.Random, wanted: Wanted) -> Made:
    """One row of one of the tasks, each as likely as the others."""
    return source.choice(TASKS)(source)


def some_object(source: random.Random, *, most: int = 4, lists: bool = False) -> Object:
    """Two keys or more; one value in twelve is a list, where there may be any."""
    keys = source.sample(KEYS, source.randint(2, most))
    return {key: some_value(source, lists=lists) for key in keys}


def some_value(source: random.Random, *, lists: bool) -> Value:
    kind = source.random()
    if kind < 0.5:
        return source.choice(WORDS)
    if kind < 0.8:
        return source.randint(0, 99)
    if kind < 0.92 or not lists:
        return source.choice((True, False, None))
    if kind < 0.96:
        return source.sample(WORDS, 2)
    return [source.randint(0, 99) for _ in range(2)]


# --- the tasks ------------------------------------------------------------------------------------


def repair(source: random.Random) -> Made:
    """An object with one fault."""
    whole = some_object(source)
    broken = source.choice(FAULTS)(json.dumps(whole), whole, source)
    return made("repair", "Repair this JSON.", broken, whole)


def convert(source: random.Random) -> Made:
    """A record in `key: value` lines or in one line."""
    record = some_object(source)
    between, sign = source.choice(("\n", "; ")), source.choice((": ", "=", " = "))
    lines = between.join(f"{key}{sign}{plain(value)}" for key, value in record.items())
    return made("convert", "Write this record as JSON.", lines, record)


def pick(source: random.Random) -> Made:
    """One or two of the keys, in the order in which they are asked for."""
    whole = some_object(source, most=3)
    kept = source.sample(list(whole), source.randint(1, 2))
    asked = f"Keep only {' and '.join(kept)}."
    return made("pick", asked, json.dumps(whole), {key: whole[key] for key in kept})


def schema(source: random.Random) -> Made:
    """The type of every value, as JSON Schema names it."""
    whole = some_object(source, lists=True)
    types = {key: TYPES[type(value)] for key, value in whole.items()}
    return made("schema", "Name the JSON Schema type of each value.", json.dumps(whole), types)


TASKS: tuple[Callable[[random.Random], Made], ...] = (repair, convert, pick, schema)


def made(task: str, instruction: str, given: str, answer: dict[str, Any]) -> Made:
    return Made(
        task=task,
        instruction=instruction,
        input=given,
        output=json.dumps(answer),
        skeleton="json " + " ".join(answer),
        check={"equals": True},
    )


def plain(value: Value) -> str:
    """A value without quotation marks."""
    return value if isinstance(value, str) else json.dumps(value)


# --- faults: each can be mended in one way only ---------------------------------------------------


def without_one(sign: str) -> Callable[[str, Object, random.Random], str]:
    """A fault: one of these signs is missing."""

    def fault(text: str, whole: Object, source: random.Random) -> str:
        at = source.choice([place for place, found in enumerate(text) if found == sign])
        return text[:at] + text[at + 1 :]

    return fault


def no_closing_brace(text: str, whole: Object, source: random.Random) -> str:
    return text[:-1]


def comma_at_the_end(text: str, whole: Object, source: random.Random) -> str:
    return text[:-1] + ",}"


def single_quotes(text: str, whole: Object, source: random.Random) -> str:
    return text.replace('"', "'")


def bare_keys(text: str, whole: Object, source: random.Random) -> str:
    for key in whole:
        text = text.replace(f'"{key}":', f"{key}:")
    return text


FAULTS = (
    no_closing_brace,
    comma_at_the_end,
    single_quotes,
    bare_keys,
    without_one('"'),
    without_one(","),
    without_one(":"),
)

if __name__ == "__main__":
    main(draw, "json", Path(__file__).parent)
