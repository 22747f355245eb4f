"""Finished runs that several tests look at, each made once in a process."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from expert.core.hashed import write_hashed
from tests.jobs.runs import base_model, place, run_undisturbed, write_expert

if TYPE_CHECKING:
    from expert.jobs.export.exported import Exported

SOFT = [{"name": "lead", "tokens": 4}]
CORPUS = "the cat sat on the mat.\nthe dog ran to the cat.\n" * 60


@cache
def finished(kind: str) -> Path:
    """The run folder of a small expert: lora, dora, full, soft, lora+soft, int8, fp8, or whole
    (PiSSA and LoRA+, with embedding and head)."""
    config: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "save_total_limit": None,
        "eval_steps": 3,
    }
    more: dict[str, Any] = {}
    if kind in ("dora", "full"):
        config["adapter_type"] = kind
    if kind == "whole":
        config |= {"adapter_init": "pissa", "loraplus_lr_ratio": 4}
        config["modules_to_save"] = ["embed_tokens", "lm_head"]
    if "soft" in kind:
        more["soft_prompts"] = SOFT
    if kind == "soft":
        config["adapter_type"] = "none"
    if kind in ("int8", "fp8"):
        more["model"] = {"quantization": kind}
    base = base_model(2)
    return run_undisturbed(write_expert(place() / kind, base, config, **more)).folder


def with_plan(run_folder: Path, to: Path, **changes: dict[str, Any]) -> Path:
    shutil.copytree(run_folder, to)
    settled = json.loads((to / "plan.json").read_text(encoding="utf-8"))
    for part, values in changes.items():
        settled[part] |= values
    write_hashed(to / "plan.json", json.dumps(settled))
    return to


def exported(kind: str, how: Literal["adapter", "merged"] = "adapter") -> Exported:
    """An export of such a run that tests only read."""
    return _exported(kind, how)


@cache
def _exported(kind: str, how: Literal["adapter", "merged"]) -> Exported:
    from expert.jobs.export.export import export

    return export(finished(kind), place() / "exports" / f"{kind}-{how}", kind=how, device="cpu")


@cache
def finished_characters() -> Path:
    """The run folder of a character model trained on two sentences."""
    folder = place() / "characters"
    folder.mkdir()
    (folder / "corpus.txt").write_text(CORPUS, encoding="utf-8")
    shape = "{layers: 1, heads: 2, width: 32, block_size: 16}"
    text = (
        f"name: letters\nbase_model: {{name: char-gpt, architecture: {shape}}}\n"
        "training:\n  dataset: {path: corpus.txt}\n  config: {adapter_type: full, epochs: 8, "
        "batch_size: 16, learning_rate: 1e-2, trackers: []}\n"
    )
    (folder / "manifest.yaml").write_text(text, encoding="utf-8")
    return run_undisturbed(folder / "manifest.yaml").folder
