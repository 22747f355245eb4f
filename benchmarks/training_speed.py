"""Tokens a second of `expert.train` on real rows, with random weights of real shapes.

Every case is a whole run through the product: manifest, plan, prepared tokens, the loop, events.
Rates leave out the first updates, which compile; tokens are real ones, padding does not count.

    python benchmarks/training_speed.py --data FOLDER --out FILE [--only TEXT ...] [--steps N]

FOLDER holds corpus.jsonl (a `text` column) and tok/ (a tokenizer).
"""

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory_cases import SHAPES, SIZES
from surroundings import environment
from transformers import AutoModelForCausalLM

import expert
from expert.core.events import read_events
from expert.jobs.train import train
from expert.model import adapters
from expert.parallel.group import Group

LORA = {"adapter_type": "lora", "rank": 16, "alpha": 32}
ALL_LINES = {"logging_steps": 1, "trackers": ["tensorboard"]}
DORA = {"adapter_type": "dora", "rank": 14, "alpha": 28}
FAST = {**LORA, "torch_compile": True, "bf16": True}
CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("0.6b flash compiled", "qwen3-0.6b", 16, FAST),
    ("0.6b flex compiled", "qwen3-0.6b", 16, {**FAST, "attention": "flex"}),
    ("0.6b flex, few lines", "qwen3-0.6b", 16, {**FAST, "attention": "flex", "logging_steps": 20}),
    ("0.6b flex, all lines", "qwen3-0.6b", 16, {**FAST, "attention": "flex", **ALL_LINES}),
    ("0.6b flex, PEFT's sum", "qwen3-0.6b", 16, {**FAST, "attention": "flex", "as_peft": True}),
    (
        "0.6b flex, layer by layer",
        "qwen3-0.6b",
        16,
        {**FAST, "attention": "flex", "fused_blocks": False},
    ),
    ("0.6b alone", "qwen3-0.6b", 16, {**FAST, "attention": "flex"}),
    ("0.6b in a group of one", "qwen3-0.6b", 16, {**FAST, "attention": "flex", "grouped": True}),
    ("0.6b alone again", "qwen3-0.6b", 16, {**FAST, "attention": "flex"}),
    ("0.6b flash eager", "qwen3-0.6b", 16, {**FAST, "torch_compile": False}),
    ("8b flash compiled", "llama-8b", 8, FAST),
    ("8b flex compiled", "llama-8b", 8, {**FAST, "attention": "flex"}),
    (
        "8b flex, layer by layer",
        "llama-8b",
        8,
        {**FAST, "attention": "flex", "fused_blocks": False},
    ),
    ("1b flex compiled", "llama-1b", 16, {**FAST, "attention": "flex"}),
    ("8b nf4", "llama-8b", 8, {**FAST, "attention": "flex", "base": "int4"}),
    ("8b int8", "llama-8b", 8, {**FAST, "attention": "flex", "base": "int8"}),
    ("8b dora nf4", "llama-8b", 8, {**FAST, **DORA, "attention": "flex", "base": "int4"}),
    # Held to the memory of a small card: what goes at once and what is recomputed is the plan's.
    ("8b nf4 in 24GB", "llama-8b", 0, {**FAST, "base": "int4", "vram": "24GB"}),
    ("8b bf16 in 32GB", "llama-8b", 0, {**FAST, "vram": "32GB"}),
]


def write_model(shape: str, folder: Path, tokenizer: Path) -> None:
    """Random weights of a real shape, with the tokenizer of the data."""
    if folder.exists():
        return
    family, *sizes = SHAPES[shape]
    config = family(
        **dict(zip(SIZES, sizes, strict=True)),
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)


def run_case(
    name: str, shape: str, rows: int, settings: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    folder = args.work / name.replace(" ", "-")
    folder.mkdir(parents=True)
    models = (args.models or args.work / "models").resolve() / shape
    write_model(shape, models, args.data / "tok")
    settings = dict(settings)
    base = {"name": str(models), "quantization": settings.pop("base", "none")}
    vram = settings.pop("vram", None)
    as_peft, grouped = settings.pop("as_peft", False), settings.pop("grouped", False)
    manifest = {
        "name": "speed",
        "base_model": base,
        "training": {
            "dataset": {"path": "corpus.jsonl", "validation_split": 0},
            "config": {
                "max_seq_length": 2048,
                "train_on_prompt": True,
                "micro_batch_size": rows or "auto",
                "batch_size": rows or 32,  # made the rows that fill so many sequences below
                "max_steps": args.steps,
                "logging_steps": 5,
                "learning_rate": 2e-4,
                "save_strategy": "no",
                "trackers": [],
                "epochs": 100,
                **settings,
            },
        },
    }
    shutil.copyfile(args.data / "corpus.jsonl", folder / "corpus.jsonl")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    index = expert.prepare(folder / "manifest.json").train.index
    examples = round((rows or 8) * index.examples / index.bins)
    began = time.perf_counter()
    with (
        added_by_peft() if as_peft else nullcontext(),
        a_group_of_one() if grouped else nullcontext() as group,
    ):
        done = train(
            folder / "manifest.json",
            overrides=(f"training.config.batch_size={examples}",),
            vram=vram,
            group=group,
        )
    seconds = time.perf_counter() - began
    facts = facts_of(done.folder)
    shutil.rmtree(folder)
    gc.collect()
    torch.cuda.empty_cache()
    return {"case": name, "shape": shape, "settings": settings, "seconds": seconds, **facts}


@contextmanager
def added_by_peft() -> Iterator[None]:
    """LoRA is added to a product that is rounded already, as PEFT does it."""
    settle, adapters.settle_lora = adapters.settle_lora, lambda wrapped, adapter: None
    try:
        yield
    finally:
        adapters.settle_lora = settle


@contextmanager
def a_group_of_one() -> Iterator[Group]:
    """Everything that many ranks do, over NCCL and gloo, with one."""
    address = "tcp://127.0.0.1:29511"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=address, rank=0, world_size=1)
    try:
        yield Group(talks=True)
    finally:
        dist.destroy_process_group()


def facts_of(folder: Path) -> dict[str, Any]:
    """Medians over the second half of the step lines."""
    events = list(read_events(folder / "events.jsonl"))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]

    def median(key: str) -> float | None:
        values = [event[key] for event in late if event.get(key) is not None]
        return statistics.median(values) if values else None

    phases = {key: median(key) for key in late[-1] if key.startswith("time_")}
    return {
        "tokens_per_second": median("tokens_per_second"),
        "mfu": median("mfu"),
        "data_wait": median("data_wait"),
        "gpu_utilization": median("gpu_utilization"),
        "power_watts": median("power_watts"),
        "peak_reserved_bytes": late[-1].get("peak_reserved_bytes"),
        "most_card_bytes": max(event.get("gpu_memory_bytes") or 0 for event in steps),
        "most_process_bytes": max(event.get("gpu_process_memory_bytes") or 0 for event in steps),
        "memory": [event for event in events if event["event"] == "memory"],
        "syncs": [event for event in events if event["event"] == "syncs"],
        "ran_dry": median("ran_dry"),
        "recompiles": late[-1].get("recompiles"),
        "batch": plan["batch"],
        "recomputed_blocks": plan["kernels"]["recomputed_blocks"],
        "planned_bytes": plan["memory"]["peak_bytes"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "tokens_per_update": late[-1]["tokens"] / late[-1]["updates"],
        "step_phases": phases,
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where the models are kept for other runs")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="speed-"))
    results = []
    for name, shape, rows, settings in CASES:
        if args.only and not any(text in name for text in args.only):
            continue
        try:
            results.append(run_case(name, shape, rows, settings, args))
        except Exception as error:  # noqa: BLE001 - the other cases are still worth measuring
            results.append({"case": name, "error": f"{type(error).__name__}: {error}"[:2000]})
        shown = {k: v for k, v in results[-1].items() if k not in ("settings", "step_phases")}
        print(json.dumps(shown), flush=True)
        record = {
            "environment": environment(),
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
