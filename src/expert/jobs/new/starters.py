"""What a new expert starts with: its manifest, a few rows to replace, and a README."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from expert.planning.choose.starting_points import StartingPoint
from expert.planning.models.resolve import TINY

# Performance keys are written out to be visible; auto is decided on every machine.
PERFORMANCE = (
    *("bf16", "use_tf32", "attention", "torch_compile", "optim", "gradient_checkpointing"),
    *("dataloader_num_workers", "dataloader_prefetch_factor"),
)
USERS, BOOKS = (
    "CREATE TABLE users (name TEXT, age INTEGER)",
    "CREATE TABLE books (title TEXT, price INTEGER)",
)
PERSONS = "Person {name: STRING, age: INTEGER}"
CITIES = "(:Person {name: STRING})-[:LIVES_IN]->(:City {name: STRING})"


@dataclass(frozen=True, kw_only=True)
class Starter:
    description: str
    capabilities: tuple[str, ...]
    grammar: str | None
    examples: tuple[tuple[str, str, str], ...]
    """Instruction, input and output of a few rows."""

    @property
    def rows(self) -> list[dict[str, str]]:
        names = ("instruction", "input", "output")
        return [dict(zip(names, example, strict=True)) for example in self.examples]


STARTERS = {
    "json": Starter(
        description="Writes and repairs JSON.",
        capabilities=("format:json", "language:en"),
        grammar="json",
        examples=(
            ("Repair this JSON.", '{"name": "anna", "age": 31', '{"name": "anna", "age": 31}'),
            ("Repair this JSON.", "{'city': 'rome'}", '{"city": "rome"}'),
            ("Write this record as JSON.", "id=4; open=true", '{"id": 4, "open": true}'),
            ("Write this record as JSON.", "size: 12", '{"size": 12}'),
        ),
    ),
    "sql": Starter(
        description="Writes SQL for questions about tables.",
        capabilities=("language:sql", "task:text2sql", "language:en"),
        grammar="sql",
        examples=(
            ("How many users are there?", USERS, "SELECT COUNT(*) FROM users"),
            (
                "Show the names of users older than 30.",
                USERS,
                "SELECT name FROM users WHERE age > 30",
            ),
            ("What is the highest price?", BOOKS, "SELECT MAX(price) FROM books"),
            (
                "Show every title, the cheapest first.",
                BOOKS,
                "SELECT title FROM books ORDER BY price",
            ),
        ),
    ),
    "cypher": Starter(
        description="Writes Cypher for questions about graphs.",
        capabilities=("language:cypher", "task:text2cypher", "language:en"),
        grammar="cypher",
        examples=(
            ("How many persons are there?", PERSONS, "MATCH (n:Person) RETURN count(n)"),
            (
                "Show the names of persons older than 30.",
                PERSONS,
                "MATCH (n:Person) WHERE n.age > 30 RETURN n.name",
            ),
            (
                "Who lives in Rome?",
                CITIES,
                "MATCH (a:Person)-[:LIVES_IN]->(b:City) WHERE b.name = 'Rome' RETURN a.name",
            ),
            ("What is the highest age?", PERSONS, "MATCH (n:Person) RETURN max(n.age)"),
        ),
    ),
    "typescript": Starter(
        description="Writes TypeScript.",
        capabilities=("language:typescript", "task:code_generation", "language:en"),
        grammar="typescript",
        examples=(
            (
                "Write the interface User for this JSON.",
                '{"name": "anna", "age": 31}',
                "interface User {\n  name: string;\n  age: number;\n}",
            ),
            (
                "Write the interface Shop for this JSON.",
                '{"open": true}',
                "interface Shop {\n  open: boolean;\n}",
            ),
            ("Fix the wrong type.", "const age: string = 3;", "const age: number = 3;"),
            ("Fix the wrong type.", 'const name: number = "anna";', 'const name: string = "anna";'),
        ),
    ),
    "text": Starter(
        description="Answers in plain text.",
        capabilities=("language:en",),
        grammar=None,
        examples=(
            ("What colour is the sky?", "", "Blue."),
            ("What colour is grass?", "", "Green."),
            ("Name a number below ten.", "", "Seven."),
            ("Name a day of the week.", "", "Monday."),
        ),
    ),
}


@dataclass(frozen=True)
class NewBaseModel:
    """The base model of a new expert, and its initial settings."""

    name: str
    start: StartingPoint
    length: int | None = None
    """max_seq_length; None: left to the plan."""


def starter_of(name: str, *, calls: bool, own_rows: bool) -> Starter:
    """A starter; for rows whose answers call tools, and for rows whose language is unknown."""
    starter = STARTERS[name]
    abilities = [each for each in starter.capabilities if own_rows or each != "language:en"]
    if not calls:
        return replace(starter, capabilities=tuple(abilities))
    able = (*abilities, "task:tool_calling")
    return replace(starter, description="Calls tools, and answers.", capabilities=able)


def manifest_of(
    name: str,
    starter: Starter,
    dataset: Mapping[str, Any],
    *,
    base: NewBaseModel,
    epochs: int,
    calls: bool = False,
) -> dict[str, Any]:
    """A 2.0 manifest for one base model, with settings for its size. `calls`: rows have tools,
    which the templates of small models do not support; ChatML supports them for all models."""
    decoding: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}
    if starter.grammar:
        decoding |= {"validation": "parser", "grammar_type": starter.grammar}
    written = {"prompt_template": "chatml"} if calls else {}
    start = base.start
    adapters = [{"type": "lora", "r": start.rank, "alpha": start.alpha}]
    length = {"max_seq_length": base.length} if base.length is not None else {}
    return {
        "schema_version": "2.0",
        "name": name,
        "version": "0.1.0",
        "description": starter.description,
        "base_models": [{"name": base.name, **written, "adapters": adapters}],
        "capabilities": list(starter.capabilities),
        "training": {
            "dataset": dict(dataset),
            "config": {
                "adapter_type": "lora",
                "epochs": epochs,
                "learning_rate": start.learning_rate,
                "batch_size": 16,
                **length,
                "packing": True,
                **dict.fromkeys(PERFORMANCE, "auto"),
            },
            "decoding": decoding,
        },
    }


def readme_of(
    name: str, starter: Starter, data: str, has_answers: bool, base: str, *, on_hub: bool
) -> str:
    """What to do with the folder, in brief."""
    rows, last = "The model is trained on every row as a whole.", 'expert sample . --prompt "…"'
    if has_answers:
        rows = "Every row has a prompt, optional\ninput, and an answer."
        last = "expert validate ."
    larger = (
        "\n`tiny` is a toy model, and these settings suit no other. For a real one, create the "
        f"folder again:\n`expert new {name} --from ROWS --model Qwen/Qwen3-0.6B`.\n"
    )
    where = f"are in `{data}`: replace or add to them."
    if on_hub:
        where = f"are `{data}` of the Hugging Face Hub."
    return f"""# {name}

{starter.description}

The rows {where} {rows}

    expert dataset check --manifest manifest.json
    expert plan --manifest manifest.json
    expert train --manifest manifest.json
    {last}
{larger if base == TINY else ""}"""
