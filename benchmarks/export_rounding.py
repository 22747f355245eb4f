"""How far exports are from the trained model, by adapter, base and dtype, on a real model.

    python benchmarks/export_rounding.py --rows FILE --out FILE [--model smollm2-135m] [--steps 60]

Every kind is trained on the rows as planned, then exported in every way there is. The difference of
the logits is that of `expert export` (three texts): its root mean square and its largest value, as
shares of the logits' spread; beside it how far the adapter itself moves the logits, and how far the
trained model is from the same weights in float32.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from surroundings import environment

import expert
from expert.core.files import write_text_atomically
from expert.core.rundir import RunFolder
from expert.jobs.export import export as exporting
from expert.jobs.export.comparison import checked_ids, compare, logits_of_trained
from expert.run.stored.choose_checkpoint import choose
from expert.run.stored.load import load_trained, pick_device, read_plan

# adapter, base, learning rate
KINDS = {
    "lora": ("lora", "none", 5e-4),
    "lora, slowly": ("lora", "none", 1e-4),
    "dora": ("dora", "none", 5e-4),
    "ia3": ("ia3", "none", 5e-3),
    "lora on NF4": ("lora", "int4", 5e-4),
    "lora on int8": ("lora", "int8", 5e-4),
    "lora on FP8": ("lora", "fp8", 5e-4),
    "full": ("full", "none", 2e-5),
}
WAYS: tuple[dict[str, Any], ...] = (
    {"kind": "adapter"},
    {"kind": "merged", "dtype": "bf16"},
    {"kind": "merged", "dtype": "fp16"},
    {"kind": "merged", "dtype": "fp32"},
    {"gguf": "bf16"},
)


def trained(folder: Path, kind: str, args: argparse.Namespace) -> Path:
    adapter, base, rate = KINDS[kind]
    manifest = {
        "name": "rounding",
        "base_model": {"name": args.model, "quantization": base},
        "training": {
            "dataset": {"path": str(args.rows.resolve())},
            "config": {
                "adapter_type": adapter,
                **({"rank": 16, "alpha": 32} if adapter in ("lora", "dora") else {}),
                "learning_rate": rate,
                "max_steps": args.steps,
                "eval_strategy": "no",
                "trackers": [],
            },
        },
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return expert.train(path).folder


def from_float32(run: Path) -> dict[str, float]:
    """How far the trained model is from its own weights computed with in float32."""
    folder = RunFolder(run)
    plan, final = read_plan(folder), choose(folder, "final")
    exact = {"precision": "fp32", "attention": "sdpa", "fused_blocks": False, "tf32": False}
    in_float32 = plan.model_copy(update={"kernels": plan.kernels.model_copy(update=exact)})
    logits = []
    for each in (in_float32, plan):
        loaded = load_trained(folder, each, final, device=pick_device("auto"))
        logits.append(logits_of_trained(loaded, checked_ids(loaded)))
    found = compare(*logits)
    return {"rms": found.share, "largest": found.largest_share}


def exported(run: Path, to: Path, way: dict[str, Any]) -> dict[str, Any]:
    shutil.rmtree(to, ignore_errors=True)
    seen: list[Any] = []

    def kept(left: Any, right: Any) -> Any:
        seen.append(compare(left, right))
        return seen[-1]

    with (
        patch.object(exporting, "compare", kept),
        patch.dict(exporting.TOLERANCE, dict.fromkeys(exporting.TOLERANCE, 1e9)),
    ):
        try:
            done = exporting.export(run, to, judged_rows=0, **way)
        except expert.ExpertError as refused:
            return {"refused": str(refused)}
    found = {"rms": done.share, "adapter_effect": done.adapter_effect}
    return found if "gguf" in way else found | {"largest": seen[-1].largest_share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as place:
            run = trained(Path(place), kind, args)
            found[kind] = {"from float32": from_float32(run)} if "int8" not in kind else {}
            for way in WAYS:
                if KINDS[kind][0] != "full" or way != {"kind": "adapter"}:
                    asked = {} if KINDS[kind][0] == "full" and "gguf" not in way else way
                    asked = asked or {"dtype": way["dtype"]}
                    name = " ".join(way.values()) if "gguf" not in way else f"GGUF {way['gguf']}"
                    found[kind][name] = exported(run, Path(place) / "out", asked)
            for name, values in found[kind].items():
                print(f"{kind:14} {name:14} {json.dumps(values)}", flush=True)
        torch.cuda.empty_cache()
    record = {
        "environment": environment(),
        "model": args.model,
        "steps": args.steps,
        "kinds": found,
    }
    write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
