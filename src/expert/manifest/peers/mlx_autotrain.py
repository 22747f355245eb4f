"""Converts files of mlx-lm; refuses those of AutoTrain."""

from __future__ import annotations

from expert.manifest.migrate.migration import Migration, beside, take
from expert.manifest.text.item import Item, shown

_NAMES = {
    "iters": "max_steps",
    "steps_per_eval": "eval_steps",
    "steps_per_report": "logging_steps",
    "save_every": "save_steps",
    "fine_tune_type": "adapter_type",
    "grad_checkpoint": "gradient_checkpointing",
    "grad_accumulation_steps": "gradient_accumulation_steps",
}
_SUPERSEDED = {
    "train": "expert train trains",
    "test": "expert validate judges a run",
    "val_batches": "all validation rows are evaluated",
    "test_batches": "expert validate judges all test rows",
    "adapter_path": "the adapter is kept in the run folder",
}


def read_mlx(work: Migration) -> None:
    """Convert mlx-lm's files, which count iterations and give adapters a scale."""
    if "iters" not in work.root:
        return
    work.rename(_NAMES)
    # mlx-lm's default is false
    work.root.setdefault("mask_prompt", Item(False, "mask_prompt", work.root["max_steps"].line))
    layers = take(work.root, "num_layers")
    if layers.value not in (None, -1):
        what = f"the last {shown(layers.plain())} blocks, but every block gets an adapter here"
        work.problem(layers, what, "write -1 for all blocks")
    for key, text in _SUPERSEDED.items():
        item = take(work.root, key)
        if item.value is not None:
            work.supersede(item, text)
    adapter = take(work.root, "lora_parameters").fields()
    rank, scale = (adapter.get(name, Item(None)) for name in ("rank", "scale"))
    if isinstance(rank.value, int) and isinstance(scale.value, int | float):
        alpha = round(rank.value * scale.value)
        work.root["lora_alpha"] = beside(scale, alpha)
        work.read_as(scale, f"training.config.alpha: {alpha} (rank × scale)")
    names = adapter.get("keys", Item(None))
    if isinstance(names.value, list):
        for name in names.value:
            name.value = str(name.value).rpartition(".")[2]
        work.place(work.root, "target_modules", names, "training.config.target_modules")
    for key in ("rank", "dropout"):
        if key in adapter:
            work.place(work.root, key, adapter[key], f"training.config.{key}")


def refuse_autotrain(work: Migration) -> None:
    params = work.root.get("params", Item(None))
    if params.fields() and str(work.root.get("task", Item(None)).value).startswith("llm"):
        what = "settings of AutoTrain are not read"
        work.problem(params, what, "write them at the top level; docs/COMING_FROM.md has the names")
