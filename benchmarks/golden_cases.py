"""Rows and manifests whose results `goldens.py` records: small, made up, the same every time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = "red green blue amber teal – Straße naïve one two three four cat dog bird sea"
WORDS = TEXT.split()
CONFIG: dict[str, Any] = {
    "adapter_type": "lora",
    "rank": 4,
    "batch_size": 4,
    "max_seq_length": 96,
    "max_steps": 8,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_steps": 4,
    "evaluation_strategy": "no",
    "trackers": [],
    "device": "cpu",
}


def words(start: int, count: int) -> str:
    return " ".join(WORDS[(start * 7 + place * place) % len(WORDS)] for place in range(count))


def instructions(count: int = 48) -> list[dict[str, Any]]:
    return [
        {
            "instruction": f"Say {words(n, 3)} {n}",
            "response": json.dumps({"n": n, "say": words(n, n * 5 % 13)}),
        }
        for n in range(count)
    ]


def chats(count: int = 24) -> list[dict[str, Any]]:
    def turns(n: int) -> Iterator[dict[str, str]]:
        yield {"role": "system", "content": f"Be {words(n, 2)}."}
        for turn in range(1 + n % 3):
            yield {"role": "user", "content": words(n + turn, 4)}
            yield {"role": "assistant", "content": words(n * turn, 2 + n % 5)}

    return [{"messages": list(turns(n))} for n in range(count)]


def tool_calls(count: int = 16) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    tool = {"name": "weather", "description": "Weather of a place", "parameters": parameters}
    return [
        {
            "tools": [{"type": "function", "function": tool}],
            "messages": [
                {"role": "user", "content": f"Weather of {words(n, 2)}?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "type": "function",
                            "function": {"name": "weather", "arguments": {"place": words(n, 2)}},
                        }
                    ],
                },
                {"role": "tool", "name": "weather", "content": words(n, 1)},
                {"role": "assistant", "content": f"It is {words(n, 3)}."},
            ],
        }
        for n in range(count)
    ]


def texts(count: int = 30) -> list[dict[str, Any]]:
    return [{"text": words(n, 10 + n * 11 % 90)} for n in range(count)]


def csv_rows(count: int = 20) -> str:
    return "question,context,answer\n" + "".join(
        f'"What, {n}?",{words(n, n % 4)},"say ""{words(n, 4)}"""\n' for n in range(count)
    )


def case(config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"config": config or {}, **more}


RUNS: dict[str, dict[str, Any]] = {
    "lora": case(
        {
            "dropout": 0.1,
            "eval_steps": 3,
            "evaluation_strategy": "steps",
            "save_steps": 3,
            "max_steps": 14,
        }
    ),
    "dora": case({"adapter_type": "dora", "lr_scheduler": "linear"}),
    "nf4": case(model={"quantization": "int4"}),
    "int8": case(model={"quantization": "int8"}),
    "ia3": case({"adapter_type": "ia3", "rank": "auto", "lr_scheduler": "polynomial"}),
    "lokr": case({"adapter_type": "lokr"}),
    "full": case(
        {"adapter_type": "full", "weight_decay": 0.1, "lr_scheduler": "cosine_with_restarts"}
    ),
    "soft prompts": case(
        {"adapter_type": "none"},
        soft_prompts=[
            {"name": "style", "tokens": 6, "init_method": "text", "init_text": "Answer in JSON."},
            {"name": "more", "tokens": 3},
        ],
    ),
    "characters": case(
        {
            "adapter_type": "full",
            "batch_size": 8,
            "max_steps": 40,
            "max_seq_length": "auto",
            "rank": "auto",
        },
        rows="\n".join(words(n, 20) for n in range(120)),
        file="corpus.txt",
        model={
            "name": "char-gpt",
            "architecture": {
                "layers": 2,
                "heads": 2,
                "width": 64,
                "block_size": 32,
                "dropout": 0.1,
            },
        },
    ),
    "padded": case({"packing": False, "optim": "sgd"}),
    "grouped by length": case(
        {"packing": False, "group_by_length": True, "micro_batch_size": 2}, rows=chats()
    ),
    "streamed": case(
        {"eval_steps": 5, "evaluation_strategy": "steps", "max_steps": 14},
        dataset={"streaming": True},
    ),
    "accumulated": case(
        {
            "gradient_accumulation_steps": 2,
            "micro_batch_size": 1,
            "gradient_checkpointing": "full",
            "warmup_steps": 3,
        }
    ),
    "text, joined": case(
        {"packing": "concat", "overlong": "split", "max_seq_length": 48}, rows=texts()
    ),
    "tokens per step": case({"batch_size": "auto", "batch_tokens": 200, "train_on_prompt": True}),
    "tokenised late": case(
        {"tokenize": "late", "packing": False, "overlong": "drop", "max_seq_length": 40},
        rows=chats(),
    ),
}
INTERRUPTED = ("lora", "characters", "streamed")
SHAPES: dict[str, dict[str, Any]] = {
    "instructions": case(),
    "instructions, padded": case(
        {"packing": False}, dataset={"validation": {"deduplicate": True, "min_length": 20}}
    ),
    "chats": case(rows=chats()),
    "tools": case(
        {"max_seq_length": 512},
        rows=tool_calls(),
        model={"prompt_template": "chatml"},
        dataset={"validation_split": 0.25},
    ),
    "texts": case({"packing": "concat", "max_seq_length": 64}, rows=texts()),
    "text, cut": case({"overlong": "cut", "max_seq_length": 32}, rows=texts()),
    "text file": case(rows="\n\n".join(words(n, 40) for n in range(12)), file="rows.txt"),
    "table": case(
        {"train_on_prompt": True},
        rows=csv_rows(),
        file="rows.csv",
        dataset={
            "field_mapping": {"instruction": "question", "input": "context", "response": "answer"}
        },
    ),
    "alpaca": case(model={"prompt_template": "alpaca"}),
    "tasks": case(
        dataset={
            "path": None,
            "tasks": {"a": {"train": "rows.jsonl", "weight": 2.0}, "b": {"train": "rows.jsonl"}},
        }
    ),
    "characters": RUNS["characters"],
    "streamed": RUNS["streamed"],
}


def write_expert(folder: Path, made: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    rows, file = made.get("rows", instructions()), made.get("file", "rows.jsonl")
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    (folder / file).write_text(text, encoding="utf-8")
    dataset = {"path": file, "validation_split": 0.1, **made.get("dataset", {})}
    dataset = {key: value for key, value in dataset.items() if value is not None}
    manifest = {
        "name": "golden",
        "base_model": {"name": "tiny", **made.get("model", {})},
        "soft_prompts": made.get("soft_prompts", []),
        "training": {
            "dataset": dataset,
            "config": {**CONFIG, **made["config"]},
            "decoding": {"max_new_tokens": 16},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


# --- values to compare
