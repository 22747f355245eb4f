"""What a quantised base costs: the same real model and rows on each base, for several seeds.

    python benchmarks/base_parity.py --data FOLDER --out FILE [--model smollm2-135m]
        [--bases none fp8] [--seeds 1 2 3] [--steps 100] [--held-out 240]

FOLDER holds corpus.jsonl (a `text` column). LoRA r=16 on all linear layers, 32 rows a step, all
else as planned. Each run is evaluated on the held-out rows with the base it was trained on, and by
transformers and PEFT with the base in bfloat16, as an exported adapter is used.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from surroundings import environment
from transformers import AutoModelForCausalLM, AutoTokenizer

import expert
from expert.core.events import read_events
from expert.core.files import write_text_atomically

LONGEST = 1024


def texts_in(folder: Path) -> list[str]:
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def write_rows(path: Path, texts: list[str]) -> None:
    rows = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def trained(folder: Path, base: str, seed: int, args: argparse.Namespace) -> tuple[Path, float]:
    """The run's folder, and its loss on the held-out rows."""
    manifest = {
        "name": "parity",
        "base_model": {"name": args.model, "quantization": base},
        "training": {
            "dataset": {"path": "train.jsonl", "validation_path": "held-out.jsonl"},
            "config": {
                "adapter_type": "lora",
                "rank": 16,
                "alpha": 32,
                "target_modules": "all-linear",
                "batch_size": 32,
                "max_steps": args.steps,
                "epochs": 100,
                "seed": seed,
                "eval_steps": args.steps,
                "trackers": [],
            },
        },
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    done = expert.train(path)
    events = read_events(done.folder / "events.jsonl")
    return done.folder, [event["loss"] for event in events if event["event"] == "eval"][-1]


@torch.no_grad()
def loss_on_bf16(run: Path, model: Path, texts: list[str]) -> float:
    """Mean loss of a token, with the adapter of the run on the base in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(base, str(run / "final")).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    lost, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :LONGEST].to(device)
        lost += float(tuned(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return lost / tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bases", nargs="+", default=["none", "fp8"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--held-out", type=int, default=240)
    args = parser.parse_args()
    texts, folder = texts_in(args.data), Path(tempfile.mkdtemp(prefix="parity-"))
    held_out = texts[-args.held_out :]
    write_rows(folder / "train.jsonl", texts[: -args.held_out])
    write_rows(folder / "held-out.jsonl", held_out)
    record: dict[str, Any] = {"environment": environment(), "results": []}
    for seed in args.seeds:
        for base in args.bases:
            run, loss = trained(folder, base, seed, args)
            model = Path(json.loads((run / "plan.json").read_text())["model"]["location"])
            result = {
                "base": base,
                "seed": seed,
                "validation_loss": loss,
                "on_bf16_base": loss_on_bf16(run, model, held_out[:60]),
            }
            record["results"].append(result)
            print(json.dumps(result), flush=True)
            write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
