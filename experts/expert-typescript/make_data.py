"""Makes the rows of expert-typescript: types from samples, functions, mistakes to mend.

    python experts/expert-typescript/make_data.py --rows 8000 --seed 7 --out datasets

The names and types of an answer, without its values, are the skeleton: a program like a test row's
occurs in no training row.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from data_making.files import main
from data_making.rows import Made, Wanted

NAMES = (
    "User Book City Song Team Game Order Shop Film Room Car Ticket Message Event Item Page Card "
    "Task Note Job"
).split()
KEYS = (
    "name age city email id price color active country score title year size count status level "
    "code rank total street phone open ready done"
).split()
WORDS = (
    "anna ben carla david emma paris london berlin rome madrid red green blue black white open "
    "closed new old small large north south east west gold silver iron"
).split()
TYPES = ("string", "number", "boolean", "string[]", "number[]")


@dataclass(frozen=True)
class Field:
    """A property or parameter."""

    name: str
    type: str

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


def draw(source: random.Random, wanted: Wanted) -> Made:
    """One row of one of the tasks, each as likely as the others."""
    return source.choice(TASKS)(source)


def some_fields(source: random.Random, fewest: int, most: int) -> list[Field]:
    names = source.sample(KEYS, source.randint(fewest, most))
    # Lists are rarer than plain values, as they are in programs.
    kinds = source.choices(TYPES, weights=(4, 4, 3, 1, 1), k=len(names))
    return [Field(name, kind) for name, kind in zip(names, kinds, strict=True)]


def some_value(source: random.Random, kind: str) -> Any:
    """A value of a type."""
    if kind.endswith("[]"):
        return [some_value(source, kind[:-2]) for _ in range(2)]
    if kind == "string":
        return source.choice(WORDS)
    return source.randint(0, 99) if kind == "number" else source.random() < 0.5


def interface(name: str, fields: list[Field]) -> str:
    return "\n".join([f"interface {name} {{", *(f"  {field};" for field in fields), "}"])


def made(task: str, instruction: str, given: str, answer: str) -> Made:
    return Made(
        task=task,
        instruction=instruction,
        input=given,
        output=answer,
        skeleton="typescript " + without_values(answer),
        check={"equals": True},
    )


def without_values(program: str) -> str:
    return re.sub(r'"\w*"|\b\d+\b|\b(?:true|false)\b', "?", program)


# --- the tasks ------------------------------------------------------------------------------------


def types_from_sample(source: random.Random) -> Made:
    """An interface for a JSON object."""
    name, fields = source.choice(NAMES), some_fields(source, 2, 4)
    sample = {field.name: some_value(source, field.type) for field in fields}
    asked = f"Write the interface {name} for this JSON."
    return made("types", asked, json.dumps(sample), interface(name, fields))


def getter(source: random.Random) -> Made:
    """A function that returns a property, with the type that its interface says."""
    name, fields = source.choice(NAMES), some_fields(source, 2, 3)
    field = source.choice(fields)
    variable = name.lower()
    called = f"get{field.name.capitalize()}"
    answer = (
        f"function {called}({variable}: {name}): {field.type} {{\n"
        f"  return {variable}.{field.name};\n}}"
    )
    asked = f"Write the function {called} that returns the {field.name} of the {name}."
    return made("function", asked, interface(name, fields), answer)


def signature(source: random.Random) -> Made:
    """A declaration from its description."""
    fields = some_fields(source, 1, 3)
    result = source.choice(TYPES)
    called = f"{source.choice(('find', 'make', 'check', 'load'))}{source.choice(NAMES)}"
    takes = ", ".join(f"{field.name} ({field.type})" for field in fields)
    answer = f"declare function {called}({', '.join(map(str, fields))}): {result};"
    given = f"name: {called}\ntakes: {takes}\nreturns: {result}"
    return made("signature", "Declare this function.", given, answer)


def syntax_fix(source: random.Random) -> Made:
    """An interface with one sign missing."""
    whole = interface(source.choice(NAMES), some_fields(source, 2, 3))
    sign = source.choice(("{", "}", ":"))
    at = source.choice([place for place, found in enumerate(whole) if found == sign])
    broken = (whole[:at] + whole[at + 1 :]).strip()
    return made("syntax", "Mend the syntax of this TypeScript.", broken, whole)


def type_fix(source: random.Random) -> Made:
    """Two constants, one of which has a type that is not its value's."""
    fields = some_fields(source, 2, 2)
    values = [json.dumps(some_value(source, field.type)) for field in fields]
    at = source.randrange(2)
    other = source.choice([kind for kind in TYPES if kind != fields[at].type])
    mistaken = [*fields]
    mistaken[at] = Field(fields[at].name, other)
    broken, whole = (
        "\n".join(f"const {field} = {value};" for field, value in zip(one, values, strict=True))
        for one in (mistaken, fields)
    )
    return made("type-fix", "Mend the type that is wrong.", broken, whole)


TASKS: tuple[Callable[[random.Random], Made], ...] = (
    types_from_sample,
    getter,
    signature,
    syntax_fix,
    type_fix,
)

if __name__ == "__main__":
    main(draw, "typescript", Path(__file__).parent)
