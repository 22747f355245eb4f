"""How near the memory of a plan comes to what its run takes, on a card.

Every kind of run (adapter, base, kernels) is planned and run with several batch sizes, and held to
its plan. Real rows, random weights of real shapes, four updates each.

    python benchmarks/memory_plans.py --data FOLDER --out FILE [--only TEXT ...]

FOLDER holds corpus.jsonl (a `text` column) and tok/ (a tokenizer).
"""

import argparse
import gc
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from surroundings import environment
from training_speed import write_model

import expert
from expert.core.events import read_events
from expert.planning.memory.memory import CONTEXT_BYTES, estimate
from expert.planning.memory.workload import workload_of
from expert.planning.run_plan import RunPlan

LORA = {"adapter_type": "lora", "rank": 16, "alpha": 32}
FULL = {"adapter_type": "full"}
FAST = {"torch_compile": True, "attention": "flex"}
PLAIN = {"torch_compile": False, "attention": "flash"}
KEPT = {"gradient_checkpointing": False}
AGAIN = {"gradient_checkpointing": True}
# name, shape, settings, rows
KINDS: list[tuple[str, str, dict[str, Any], tuple[int, ...]]] = [
    ("0.6b lora", "qwen3-0.6b", {**LORA, **FAST, **KEPT}, (4, 8, 16, 24)),
    ("0.6b lora recomputed", "qwen3-0.6b", {**LORA, **PLAIN, **AGAIN}, (8, 16, 32)),
    ("0.6b lora uncompiled", "qwen3-0.6b", {**LORA, **PLAIN, **KEPT}, (4, 8, 16)),
    ("0.6b nf4", "qwen3-0.6b", {**LORA, **PLAIN, **KEPT, "base": "int4"}, (4, 8, 16)),
    ("0.6b full", "qwen3-0.6b", {**FULL, **PLAIN, **KEPT}, (4, 8, 16)),
    ("0.6b full recomputed", "qwen3-0.6b", {**FULL, **PLAIN, **AGAIN}, (4, 16)),
    ("8b lora", "llama-8b", {**LORA, **FAST, **KEPT}, (1, 4, 8)),
    ("8b lora recomputed", "llama-8b", {**LORA, **PLAIN, **AGAIN}, (4, 8, 16)),
    ("8b nf4", "llama-8b", {**LORA, **PLAIN, **KEPT, "base": "int4"}, (1, 4)),
    ("8b nf4 recomputed", "llama-8b", {**LORA, **PLAIN, **AGAIN, "base": "int4"}, (4, 8, 16)),
]


def run_once(
    shape: str, rows: int, settings: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """One run: what its plan said, and what it took."""
    folder = args.work / "run"  # the same for all: tokens are prepared once
    folder.mkdir(parents=True, exist_ok=True)
    models = (args.models or args.work / "models").resolve() / shape
    write_model(shape, models, args.data / "tok")
    settings = dict(settings)
    base = {"name": str(models), "quantization": settings.pop("base", "none")}
    manifest = {
        "name": "memory",
        "base_model": base,
        "training": {
            "dataset": {"path": str(args.data / "corpus.jsonl"), "validation_split": 0},
            "config": {
                "max_seq_length": 2048,
                "train_on_prompt": True,
                "micro_batch_size": rows,
                "batch_size": 5 * rows,
                "max_steps": 4,
                "logging_steps": 1,
                "save_strategy": "no",
                "trackers": [],
                **settings,
            },
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    done = expert.train(folder / "manifest.json")
    events = list(read_events(done.folder / "events.jsonl"))
    plan = RunPlan.model_validate_json((done.folder / "plan.json").read_text(encoding="utf-8"))
    work = workload_of(plan)
    assert work is not None
    shutil.rmtree(done.folder)
    gc.collect()
    torch.cuda.empty_cache()
    told = [event for event in events if event["event"] == "step" and event["peak_reserved_bytes"]]
    if not told:
        kinds = ", ".join(f"{event['event']} {event.get('reason', '')}" for event in events)
        return {"rows": rows, "error": f"no step with memory among {kinds}"[:2000]}
    reserved, process = told[-1]["peak_reserved_bytes"], told[-1]["gpu_process_memory_bytes"]
    # A container may hide the memory per process.
    context = CONTEXT_BYTES if process is None else max(0, process - reserved)
    return {
        "shape": shape,
        "rows": rows,
        "settings": settings,
        "workload": plan.memory.workload and {**plan.memory.workload, "rows": work.rows},
        "planned_bytes": plan.memory.peak_bytes,
        "counted_bytes": estimate(work).total,
        "measured_bytes": reserved + context,
        "reserved_bytes": reserved,
        "allocated_bytes": told[-1]["peak_allocated_bytes"],
        "context_bytes": context,
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where the models are kept for other runs")
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="memory-"))
    args.data = args.data.resolve()
    results: list[dict[str, Any]] = []
    for name, shape, settings, batches in KINDS:
        if args.only and not any(text in name for text in args.only):
            continue
        for rows in batches:
            try:
                result = run_once(shape, rows, settings, args)
            except Exception as error:  # noqa: BLE001 - the others are still worth measuring
                result = {"rows": rows, "error": f"{type(error).__name__}: {error}"[:2000]}
            results.append({"case": name, **result})
            print(line_of(results[-1]), flush=True)
            record = {"environment": environment(), "results": results}
            args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def line_of(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['case']:24} {result['rows']:3}  {result['error']}"
    measured = result["measured_bytes"]
    planned, counted = (result[key] / measured - 1 for key in ("planned_bytes", "counted_bytes"))
    return (
        f"{result['case']:24} {result['rows']:3} rows  {measured / 1e9:6.1f} GB  "
        f"plan {planned:+6.1%}  counted {counted:+6.1%}"
    )


if __name__ == "__main__":
    main()
