"""Writes the tables of docs/EXPERT_FORMAT.md from the manifest's schema.

    .venv/bin/python docs/draw_format.py

What stands outside the two marks is written by hand. A test holds the tables to the schema, and
every key to having an origin.
"""

from __future__ import annotations

import sys
from pathlib import Path

from expert.manifest.explain import SPECIAL_HOMES, KeyHelp, explain
from expert.manifest.migrate.aliases import CONFIG, DATASET
from expert.planning.models.architectures import MODEL_COLUMNS, model_rows

FILE = Path(__file__).parent / "EXPERT_FORMAT.md"
BEGIN = "<!-- keys: made by docs/draw_format.py, do not edit -->"
END = "<!-- end of keys -->"

# The documents that first named keys; the letter stands in the tables. The task list that goes with
# the first of them names no further ones.
DOCUMENTS = {
    "A": "Optimize Training Performance for RTX 4090",
    "B": "Training Optimization Notes",
    "C": "RTX 5090 Expert Optimization Guide",
    "D": "Performance Optimizations Guide",
}
ORIGINS = {
    "1.0": "manifests of schema 1.0, and what they grew before 2.0",
    "2.0": "manifests of schema 2.0",
    **{letter: f"first named in *{title}*" for letter, title in DOCUMENTS.items()},
    "new": "new in Expert 0.1.0",
}

# What is in none of these lists is new: a key added later needs no line here.
_CONFIG_SINCE = {
    "1.0": (
        *("method", "adapter_type", "rank", "alpha", "dropout", "target_modules"),
        *("feedforward_modules", "epochs", "max_steps", "learning_rate", "batch_size"),
        *("gradient_accumulation_steps", "warmup_steps", "warmup_ratio", "lr_scheduler"),
        *("lr_scheduler_kwargs", "memory_efficient_attention", "use_unsloth"),
        *("torch_compile_backend", "use_cuda_graphs", "cuda_graph_warmup_steps"),
        *("gradient_checkpointing_kwargs", "activation_checkpointing", "memory_clear_every"),
        *("save_strategy", "save_steps", "save_total_limit", "evaluation_strategy"),
        *("eval_steps", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "A": (
        *("bf16", "fp16", "use_tf32", "use_sdpa", "pretokenized_cache", "packing"),
        *("max_seq_length", "group_by_length", "dataloader_prefetch_factor"),
        *("dataloader_num_workers", "dataloader_persistent_workers"),
        *("gradient_checkpointing", "optim"),
    ),
    "B": ("dataloader_pin_memory", "torch_compile", "torch_compile_mode"),
    "C": ("attention", "flash_attention_2", "eval_batch_size"),
    "D": ("max_grad_norm", "logging_steps", "cudnn_benchmark", "device", "save_every_epochs"),
}
_DATASET_SINCE = {
    "1.0": (
        *("path", "validation_path", "test_path", "type", "format", "streaming"),
        *("max_in_memory_samples", "use_pretokenized", "text_field", "field_mapping", "tasks"),
        *("validation", "augmentation", "generation"),
    ),
    "D": ("max_chars",),
}
MODELS = """\
`expert machine --models` shows this table, too. OLMo's norms of all heads together are computed
by torch between the kernels.

Of a mixture of experts, `lora` adapts attention and the experts, whose names are `gate_up_proj`
and `down_proj` (`gate_proj` and `up_proj` mean the former); not the router, nor layers of an MLP
elsewhere if PEFT takes their names for the experts' (Qwen3, GLM-4.5). `rank` is that of each
expert. The adapter is saved in PEFT's format for parameters (`target_parameters`). Their weights
stay in 16 bits on a quantised base; published MXFP4 weights (gpt-oss) are read as 16 bits."""
_TABLES = {CONFIG: _CONFIG_SINCE, DATASET: _DATASET_SINCE}
_ELSEWHERE = {
    "base_models": "2.0",
    "base_models[].revision": "new",
    "base_models[].architecture": "D",
    "soft_prompts": "2.0",
    "training.decoding.min_p": "new",
    "training.decoding.repetition_penalty": "new",
}


def since(path: str) -> str:
    """Where a key comes from; what lies below a key shares its origin."""
    for home, table in _TABLES.items():
        if path.startswith(f"{home}."):
            key = path.removeprefix(f"{home}.").split(".")[0]
            return next((origin for origin, keys in table.items() if key in keys), "new")
    while path:
        if path in _ELSEWHERE:
            return _ELSEWHERE[path]
        path = path[:-2] if path.endswith("[]") else path.rpartition(".")[0]
    return "1.0"


def named_keys() -> list[str]:
    """Every key that the tables of origins speak of, for the test that they exist."""
    below = [
        f"{home}.{key}"
        for home, table in _TABLES.items()
        for keys in table.values()
        for key in keys
    ]
    return [*below, *_ELSEWHERE]


SECTIONS = {
    "": "The expert",
    "base_models[]": "base_models[]: what it is trained on",
    "base_models[].architecture": "base_models[].architecture: the built-in character model",
    "base_models[].adapters[]": "base_models[].adapters[]: released adapters",
    "soft_prompts[]": "soft_prompts[]",
    "training": "training",
    DATASET: f"{DATASET}: where the rows come from",
    f"{DATASET}.field_mapping": f"{DATASET}.field_mapping",
    f"{DATASET}.tasks.<name>": f"{DATASET}.tasks.<name>",
    f"{DATASET}.validation": f"{DATASET}.validation: rows that are left out",
    CONFIG: f"{CONFIG}: how it is trained",
    f"{CONFIG}.lr_scheduler_kwargs": f"{CONFIG}.lr_scheduler_kwargs",
    f"{CONFIG}.gradient_checkpointing_kwargs": f"{CONFIG}.gradient_checkpointing_kwargs",
    "training.decoding": "training.decoding: how it answers",
}


def made() -> str:
    """The legend, a table for each section, and the names that become something else."""
    legend = ["The last column of each table shows where a key comes from:", ""]
    legend += ["| since | means |", "|---|---|"]
    legend += [f"| {origin} | {text} |" for origin, text in ORIGINS.items()]
    parts = ["\n".join(legend)]
    by_section: dict[str, list[KeyHelp]] = {}
    for key in explain():
        by_section.setdefault(key.path.rpartition(".")[0], []).append(key)
    for section in [*SECTIONS, *(name for name in by_section if name not in SECTIONS)]:
        if section in by_section:
            parts.append(table(SECTIONS.get(section, section), by_section[section]))
    return "\n\n".join([*parts, specials(), models()])


def table(title: str, keys: list[KeyHelp]) -> str:
    lines = [
        f"### {title}",
        "",
        "| key | may be | by default | means | also written | since |",
        "|---|---|---|---|---|---|",
    ]
    for key in keys:
        name = f"`{key.path.rpartition('.')[2]}`"
        others = ", ".join(f"`{other}`" for other in key.also_written)
        default = f"`{key.default}`" if key.default not in ("", "required") else key.default
        cells = (name, key.expected, default, key.meaning, others, since(key.path))
        lines.append("| " + " | ".join(escaped(cell) for cell in cells) + " |")
    return "\n".join(lines)


def specials() -> str:
    lines = [
        "### Names that become something else",
        "",
        "| name | sets |",
        "|---|---|",
    ]
    for name, homes in SPECIAL_HOMES.items():
        lines.append(f"| `{name}` | {', '.join(f'`{home}`' for home in homes)} |")
    return "\n".join(lines)


def models() -> str:
    lines = ["### Models", "", MODELS, ""]
    lines += [f"| {' | '.join(MODEL_COLUMNS)} |", "|---" * len(MODEL_COLUMNS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in model_rows())])


def escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def document(text: str) -> str:
    """The document with the tables between their marks; without marks it is an error."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{FILE.name} has no place for them: {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{made()}\n\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(document(FILE.read_text(encoding="utf-8")), encoding="utf-8")
