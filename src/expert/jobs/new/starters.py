"""What a new expert begins with: its manifest, a few rows to replace, and a README."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from expert.planning.choose.starting_points import StartingPoint
from expert.planning.models.resolve import TINY

Row = Mapping[str, str]

# Performance keys are written out so that they are seen; auto is settled for every machine.
PERFORMANCE = (
    "bf16",
    "use_tf32",
    "attention",
    "torch_compile",
    "optim",
    "gradient_checkpointing",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
)


@dataclass(frozen=True, kw_only=True)
class Template:
    """A kind of expert."""

    description: str
    capabilities: tuple[str, ...]
    grammar: str | None
    rows: tuple[Row, ...]


def row(instruction: str, given: str, output: str) -> Row:
    return {"instruction": instruction, "input": given, "output": output}


TEMPLATES = {
    "json": Template(
        description="Writes and repairs JSON.",
        capabilities=("format:json", "language:en"),
        grammar="json",
        rows=(
            row("Repair this JSON.", '{"name": "anna", "age": 31', '{"name": "anna", "age": 31}'),
            row("Repair this JSON.", "{'city': 'rome'}", '{"city": "rome"}'),
            row("Write this record as JSON.", "id=4; open=true", '{"id": 4, "open": true}'),
            row("Write this record as JSON.", "size: 12", '{"size": 12}'),
        ),
    ),
    "sql": Template(
        description="Writes SQL for questions about tables.",
        capabilities=("language:sql", "task:text2sql", "language:en"),
        grammar="sql",
        rows=(
            row(
                "How many users are there?",
                "CREATE TABLE users (name TEXT, age INTEGER)",
                "SELECT COUNT(*) FROM users",
            ),
            row(
                "Show the names of users older than 30.",
                "CREATE TABLE users (name TEXT, age INTEGER)",
                "SELECT name FROM users WHERE age > 30",
            ),
            row(
                "What is the highest price?",
                "CREATE TABLE books (title TEXT, price INTEGER)",
                "SELECT MAX(price) FROM books",
            ),
            row(
                "Show every title, the cheapest first.",
                "CREATE TABLE books (title TEXT, price INTEGER)",
                "SELECT title FROM books ORDER BY price",
            ),
        ),
    ),
    "cypher": Template(
        description="Writes Cypher for questions about graphs.",
        capabilities=("language:cypher", "task:text2cypher", "language:en"),
        grammar="cypher",
        rows=(
            row(
                "How many persons are there?",
                "Person {name: STRING, age: INTEGER}",
                "MATCH (n:Person) RETURN count(n)",
            ),
            row(
                "Show the names of persons older than 30.",
                "Person {name: STRING, age: INTEGER}",
                "MATCH (n:Person) WHERE n.age > 30 RETURN n.name",
            ),
            row(
                "Who lives in Rome?",
                "(:Person {name: STRING})-[:LIVES_IN]->(:City {name: STRING})",
                "MATCH (a:Person)-[:LIVES_IN]->(b:City) WHERE b.name = 'Rome' RETURN a.name",
            ),
            row(
                "What is the highest age?",
                "Person {name: STRING, age: INTEGER}",
                "MATCH (n:Person) RETURN max(n.age)",
            ),
        ),
    ),
    "typescript": Template(
        description="Writes TypeScript.",
        capabilities=("language:typescript", "task:code_generation", "language:en"),
        grammar="typescript",
        rows=(
            row(
                "Write the interface User for this JSON.",
                '{"name": "anna", "age": 31}',
                "interface User {\n  name: string;\n  age: number;\n}",
            ),
            row(
                "Write the interface Shop for this JSON.",
                '{"open": true}',
                "interface Shop {\n  open: boolean;\n}",
            ),
            row(
                "Mend the type that is wrong.",
                "const age: string = 3;",
                "const age: number = 3;",
            ),
            row(
                "Mend the type that is wrong.",
                'const name: number = "anna";',
                'const name: string = "anna";',
            ),
        ),
    ),
    "text": Template(
        description="Answers in plain text.",
        capabilities=("language:en",),
        grammar=None,
        rows=(
            row("What colour is the sky?", "", "Blue."),
            row("What colour is grass?", "", "Green."),
            row("Name a number below ten.", "", "Seven."),
            row("Name a day of the week.", "", "Monday."),
        ),
    ),
}


@dataclass(frozen=True)
class BaseOfNew:
    """The base model of a new expert, and what its settings start from."""

    name: str
    start: StartingPoint
    length: int | None = None
    """max_seq_length; None: left to the plan."""


def calling(template: Template) -> Template:
    """The same for rows whose answers call tools."""
    abilities = (*template.capabilities, "task:tool_calling")
    return replace(template, description="Calls tools, and answers.", capabilities=abilities)


def manifest_of(
    name: str,
    template: Template,
    dataset: Mapping[str, Any],
    *,
    base: BaseOfNew,
    epochs: int,
    calls: bool = False,
) -> dict[str, Any]:
    """A 2.0 manifest for one base model, with settings of its size. `calls`: rows have tools, which
    the templates of small models do not write; ChatML does for all of them."""
    decoding: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}
    if template.grammar:
        decoding |= {"validation": "parser", "grammar_type": template.grammar}
    written = {"prompt_template": "chatml"} if calls else {}
    start = base.start
    adapters = [{"type": "lora", "r": start.rank, "alpha": start.alpha}]
    length = {"max_seq_length": base.length} if base.length is not None else {}
    return {
        "schema_version": "2.0",
        "name": name,
        "version": "0.1.0",
        "description": template.description,
        "base_models": [{"name": base.name, **written, "adapters": adapters}],
        "capabilities": list(template.capabilities),
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
    name: str, template: Template, data: str, has_answers: bool = True, base: str = TINY
) -> str:
    """What to do with the folder, in few words."""
    rows, last = "Every row is a text that is learnt whole.", 'expert sample . --prompt "…"'
    if has_answers:
        rows = "Every row has a request, perhaps some material,\nand an answer."
        last = "expert validate --expert ."
    larger = (
        "\nThe settings are for `tiny`, which needs larger steps than any other model. For a "
        f"larger one make\nthe folder again: `expert new {name} --from ROWS --model "
        "smollm2-135m`, or `--model Qwen/Qwen3-0.6B`.\n"
    )
    return f"""# {name}

{template.description}

The rows are in `{data}`: replace or add to them. {rows}

    expert dataset check --manifest manifest.json
    expert plan --manifest manifest.json
    expert train --manifest manifest.json
    {last}
{larger if base == TINY else ""}"""
