"""The rates of docs/benchmarks as one small table, which `expert diagnose` expects others from.

python benchmarks/measured_rates.py        writes src/expert/insight/rates.json
"""

import json
from pathlib import Path
from typing import Any

from expert.manifest.schema.manifest import CharGptShape
from expert.planning.machine.cards import find_card
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import char_gpt_shape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks"
TABLE = ROOT / "src" / "expert" / "insight" / "rates.json"
MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "llama-8b": "Llama-3.1-8B"}
CARDS = {"NVIDIA H200": "h200"}


def rates() -> list[dict[str, Any]]:
    """One record for every measured case that fell back to nothing."""
    return sorted(
        [*_training_speed(), *_characters()],
        key=lambda record: (record["parameters"], record["case"]),
    )


def _training_speed() -> list[dict[str, Any]]:
    name = "training-speed-h200.json"
    stored = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    found = []
    for run in stored["runs"]:
        for result in run["results"]:
            model = find_known_model(MODELS.get(result["shape"], result["shape"]))
            of_peft = "PEFT" in result["case"]  # measured for comparison
            if model is None or result["fallbacks"] or "vram" in result or of_peft:
                continue
            found.append(
                {
                    "card": CARDS[run["environment"]["card"]],
                    "model": result["shape"],
                    "parameters": model.shape.parameters,
                    "case": result["case"],
                    "tokens_per_second": round(result["tokens_per_second"]),
                    "share_of_peak": round(result["mfu"], 3),
                    "measured_on": run["environment"]["date"][:10],
                    "file": f"docs/benchmarks/{name}",
                }
            )
    return found


def _characters() -> list[dict[str, Any]]:
    name = "char-gpt-h200.json"
    stored = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    slug = CARDS[stored["environment"]["card"]]
    card = find_card(slug)
    assert card is not None
    assert card.bf16_tflops is not None
    size = CharGptShape()
    shape = char_gpt_shape(size)
    work = Workload(shape=shape, rows=1, row_tokens=size.block_size, adapter="full")
    flops = flops_per_token(work, size.block_size)
    found = []
    for entry in stored["speed"]:
        rate = entry["samples_per_second"] * size.block_size
        compiled = "eager" if entry.get("torch_compile") is False else "compiled"
        found.append(
            {
                "card": slug,
                "model": "char-gpt",
                "parameters": shape.parameters,
                "case": f"char-gpt batch {entry['batch']} {compiled}",
                "tokens_per_second": round(rate),
                "share_of_peak": round(rate * flops / (card.bf16_tflops * 1e12), 3),
                "measured_on": stored["environment"]["date"][:10],
                "file": f"docs/benchmarks/{name}",
            }
        )
    return found


if __name__ == "__main__":
    TABLE.write_text(json.dumps(rates(), indent=1) + "\n", encoding="utf-8")
    print(f"{len(rates())} rates in {TABLE}")
