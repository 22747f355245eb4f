"""What a new expert starts with: its manifest, a few rows to replace, and a README."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from expert.core.files import read_text
from expert.planning.choose.starting_points import StartingPoint

# Performance keys are written out to be visible; auto is decided on every machine.
PERFORMANCE = (
    *("bf16", "use_tf32", "attention", "torch_compile", "optim", "gradient_checkpointing"),
    *("dataloader_num_workers", "dataloader_prefetch_factor"),
)


class Starter(NamedTuple):
    """A kind of expert in starters.toml."""

    description: str
    capabilities: list[str]
    rows: list[dict[str, str]]
    grammar: str = ""


STARTERS = {
    name: Starter(**facts)
    for name, facts in tomllib.loads(read_text(Path(__file__).with_name("starters.toml"))).items()
}


def starter_of(name: str, *, calls: bool, own_rows: bool) -> Starter:
    """A starter; for rows whose answers call tools, and for rows whose language is unknown."""
    starter = STARTERS[name]
    able = [each for each in starter.capabilities if own_rows or each != "language:en"]
    if not calls:
        return starter._replace(capabilities=able)
    able.append("task:tool_calling")
    return starter._replace(description="Calls tools, and answers.", capabilities=able)


def manifest_of(
    name: str,
    starter: Starter,
    dataset: Mapping[str, Any],
    *,
    base: str,
    start: StartingPoint,
    epochs: int,
    calls: bool,
) -> dict[str, Any]:
    """A 2.0 manifest for one base model, with settings for its size. `calls`: rows have tools,
    which the templates of small models do not support; ChatML supports them for all models."""
    decoding: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 256}
    if starter.grammar:
        decoding |= {"validation": "parser", "grammar_type": starter.grammar}
    written = {"prompt_template": "chatml"} if calls else {}
    adapters = [{"type": "lora", "r": start.rank, "alpha": start.alpha}]
    return {
        "schema_version": "2.0",
        "name": name,
        "version": "0.1.0",
        "description": starter.description,
        "base_models": [{"name": base, **written, "adapters": adapters}],
        "capabilities": list(starter.capabilities),
        "training": {
            "dataset": dict(dataset),
            "config": {
                "adapter_type": "lora",
                "epochs": epochs,
                "learning_rate": start.learning_rate,
                "batch_size": 16,
                "max_seq_length": "auto",
                "packing": True,
                **dict.fromkeys(PERFORMANCE, "auto"),
            },
            "decoding": decoding,
        },
    }


def readme_of(**facts: Any) -> str:
    """What to do with the folder, in brief."""
    import jinja2

    template = read_text(Path(__file__).with_name("readme.jinja"))
    text = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True).from_string(template)
    return text.render(facts)
