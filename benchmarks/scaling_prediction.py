"""What plans expect of 2 to 64 cards: a prediction from one card's rate and the links, no run.

python benchmarks/scaling_prediction.py --out scaling-prediction.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from surroundings import environment

import expert

WORLDS = [(1, 1, None), (2, 1, "nvlink"), (4, 1, "nvlink"), (8, 1, "nvlink")]
WORLDS += [(16, 2, "nvlink,ib400"), (64, 8, "nvlink,ib400")]
CHEAP = [(1, 1, None), (2, 1, "pcie4"), (4, 1, "pcie4"), (8, 2, "pcie4,eth100")]
LORA = {"adapter_type": "lora", "rank": 16, "batch_size": 512}
FULL = {"adapter_type": "full", "batch_size": 512}
CASES: list[tuple[str, str, str, dict[str, Any], list[Any]]] = [
    ("Llama-3.1-8B, LoRA", "Llama-3.1-8B", "h200", LORA, WORLDS),
    (
        "Llama-3.1-8B, full",
        "Llama-3.1-8B",
        "h200",
        {"adapter_type": "full", "batch_size": 512},
        WORLDS,
    ),
    ("Qwen3-14B, full", "Qwen3-14B", "h200", FULL, WORLDS),
    ("Qwen3-0.6B, LoRA", "Qwen3-0.6B", "rtx-4090", LORA, CHEAP),
    ("Llama-3.1-8B, LoRA", "Llama-3.1-8B", "rtx-4090", LORA, CHEAP),
]
ROW = {"instruction": "say it", "response": "a word or two " * 120}


def planned(
    folder: Path, model: str, gpu: str, config: dict[str, Any], ranks: int, nodes: int, link: Any
) -> dict[str, Any]:
    manifest = {
        "name": "scaling",
        "base_model": {"name": model, "prompt_template": "chatml"},
        "training": {
            "dataset": {"path": "rows.jsonl"},
            "config": {
                "max_seq_length": 2048,
                "epochs": 1,
                "quantization": "none",
                "torch_compile": True,
                **config,
            },
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    plan = expert.plan(folder / "manifest.json", gpu=gpu, ranks=ranks, nodes=nodes, link=link)
    return {
        "gpus": ranks,
        "nodes": nodes,
        "link": link,
        "engine": plan.parallel.engine,
        "offload": plan.parallel.offload,
        "quantization": plan.model.quantization,
        "memory_bytes": plan.memory.peak_bytes,
        "fits": plan.memory.fits,
        "tokens_per_second": plan.parallel.tokens_per_second,
        "efficiency": plan.parallel.efficiency,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = "\n".join([json.dumps(ROW)] * 20_000)
        (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
        for name, model, gpu, config, worlds in CASES:
            cases = [planned(folder, model, gpu, config, *world) for world in worlds]
            found.append({"case": name, "gpu": gpu, "worlds": cases})
            for case in cases:
                print(name, gpu, json.dumps(case))
    record = {"environment": environment(), "kind": "prediction", "cases": found}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
