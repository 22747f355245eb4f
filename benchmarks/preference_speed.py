"""DPO with nothing set beside TRL on one card: pairs a second, memory, losses.

    python benchmarks/preference_speed.py --data FOLDER --out FILE [--cases 0.6b,8b] [--steps 24]

FOLDER holds corpus.jsonl (a `text` column, with <|assistant|> before the answer and "JSON:" before
the broken text) and tok/. A pair is such a row, and the broken text as the rejected answer. Weights
are X Planned as a run of 2,000 steps, and stopped after --steps.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from surroundings import environment
from training_speed import write_model

HERE = Path(__file__).parent
PAIRS = 400
"""Rows, trained on again and again: measuring the reference of more would only take time."""
CASES: dict[str, dict[str, Any]] = {
    "0.6b": {"shape": "qwen3-0.6b", "pairs": 16, "peer": ""},
    "0.6b alone": {"shape": "qwen3-0.6b", "pairs": 16, "alone": True},
    "8b": {"shape": "llama-8b", "pairs": 16},
    "8b nf4 in 24GB": {"shape": "llama-8b", "pairs": 16, "base": "int4", "vram": "24GB"},
    "chat": {"shape": "qwen3-0.6b", "pairs": 2, "ratio": 1, "answer": 150},
    "0.6b kto": {"shape": "qwen3-0.6b", "pairs": 32, "config": {"method": "kto"}},
    "0.6b evaluated": {
        "shape": "qwen3-0.6b",
        "pairs": 16,
        "held_out": 0.5,
        "config": {"evaluation_strategy": "steps", "eval_steps": 8},
    },
    **{
        f"{ratio}:1{alone}": {
            "shape": "qwen3-0.6b",
            "pairs": 16,
            "ratio": ratio,
            "alone": bool(alone),
        }
        for ratio in (1, 4, 8)
        for alone in ("", " alone")
    },
}


def pairs_of(case: dict[str, Any], data: Path) -> list[dict[str, str]]:
    texts = [json.loads(line)["text"] for line in (data / "corpus.jsonl").open(encoding="utf-8")]
    found = []
    for text in texts:
        prompt, mark, answer = text.partition("<|assistant|>\n")
        if mark and "JSON:\n" in prompt:
            broken = prompt.split("JSON:\n", 1)[1].replace("<|end|>", "").strip() + "\n<|end|>"
            found.append({"prompt": prompt + mark, "chosen": answer, "rejected": broken})
    if "ratio" not in case:
        return found[:PAIRS]
    words = " ".join(texts[:400]).split()
    draw, size = random.Random(0), case.get("answer", 100)

    def text(count: int) -> str:
        first = draw.randrange(len(words) - count)
        return " ".join(words[first : first + count])

    return [
        {"prompt": text(case["ratio"] * size), "chosen": text(size), "rejected": text(size)}
        for _ in range(PAIRS)
    ]


def single_answers(pair: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"prompt": pair["prompt"], "completion": pair[which], "label": which == "chosen"}
        for which in ("chosen", "rejected")
    ]


def train_case(name: str, args: argparse.Namespace) -> None:
    """One case of ours, in this process."""
    import torch

    from expert.core.events import read_events
    from expert.data.tokens import encoder
    from expert.jobs.train import train

    case, folder = CASES[name], Path(tempfile.mkdtemp(prefix="preferences-"))
    pairs: list[dict[str, Any]] = list(pairs_of(case, args.data))
    if case.get("config", {}).get("method") == "kto":
        pairs = [answer for pair in pairs for answer in single_answers(pair)]
    if case.get("alone"):
        encoder.shared_tokens = lambda answers: 0
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8"
    )
    write_model(case["shape"], args.models / case["shape"], args.data / "tok")
    manifest = {
        "name": "preferences",
        "base_model": {
            "name": str(args.models / case["shape"]),
            "quantization": case.get("base", "none"),
            "prompt_template": "chatml",
        },
        "training": {
            "dataset": {"path": "pairs.jsonl", "validation_split": case.get("held_out", 0)},
            "config": {
                "method": "dpo",
                "batch_size": case["pairs"],
                "max_seq_length": 8192 if "ratio" in case else 4096,
                "max_steps": 2000,
                "epochs": 10_000,
                "lr_scheduler": "constant",
                "warmup_steps": 0,
                "logging_steps": 1,
                "save_strategy": "no",
                "trackers": [],
                **case.get("config", {}),
                **json.loads(args.settings),
            },
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    began = time.perf_counter()

    def stop_at_the_end(done: int) -> None:
        if done == args.steps:
            os.kill(os.getpid(), signal.SIGINT)

    done = train(folder / "manifest.json", vram=case.get("vram"), progress=stop_at_the_end)
    events = list(read_events(done.folder / "events.jsonl"))
    plan = json.loads((done.folder / "plan.json").read_text(encoding="utf-8"))
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 3 :]
    result = {
        "case": name,
        "pairs_per_second": sum(e["examples"] for e in late) / sum(e["seconds"] for e in late),
        "median_pairs_per_second": statistics.median(e["samples_per_second"] for e in late),
        "tokens_per_second": statistics.median(e["tokens_per_second"] for e in late),
        "gpu_utilization": statistics.median(e.get("gpu_utilization") or 0 for e in late),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
        "planned_bytes": plan["memory"]["peak_bytes"],
        "reference": [event for event in events if event["event"] == "reference"],
        "losses": [event["loss"] for event in steps],
        "evaluations": [event for event in events if event["event"] == "eval"],
        "margins": [event.get("rewards/margins") for event in steps],
        "batch": plan["batch"],
        "kernels": plan["kernels"],
        "data": {key: plan["data"][key] for key in ("flat", "trim", "sequence_length")},
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
        "seconds": time.perf_counter() - began,
    }
    args.out.write_text(json.dumps(result), encoding="utf-8")
    shutil.rmtree(folder)


def in_child(arguments: list[Any], file: Path, seconds: float) -> dict[str, Any]:
    """What a process wrote, or its last words."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
    try:
        ended = subprocess.run([sys.executable, *map(str, arguments)], timeout=seconds, **options)
        error = (ended.stderr or ended.stdout)[-1500:]
    except subprocess.TimeoutExpired:
        error = f"not done after {seconds:.0f} s"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"error": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "models")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--one")
    args = parser.parse_args()
    if args.one:
        train_case(args.one, args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = []
    for name in args.cases.split(","):
        case, work = CASES[name], Path(tempfile.mkdtemp())
        file = work / "result.json"
        common = ["--data", args.data, "--models", args.models, "--steps", args.steps]
        own = [HERE / "preference_speed.py", "--one", name, "--out", file, *common]
        result = in_child([*own, "--settings", args.settings], file, 240)
        if "peer" in case:
            lines = (json.dumps(pair) + "\n" for pair in pairs_of(case, args.data))
            (work / "pairs.jsonl").write_text("".join(lines), encoding="utf-8")
            there = ["--data", work, "--model", args.models / case["shape"]]
            peer, steps = work / "peer.json", min(args.steps, 18)
            flags = [
                "--out",
                peer,
                "--rows",
                case["pairs"],
                "--steps",
                steps,
                *case["peer"].split(),
            ]
            result["peer"] = in_child([HERE / "peer_trl_dpo.py", *there, *flags], peer, 240)
        results.append({"case": name, **result})
        rate, memory = result.get("pairs_per_second"), result.get("peak_reserved_bytes", 0)
        beside = result.get("peer", {}).get("pairs_per_second")
        print(f"{name}: {rate} pairs/s, {memory / 2**30:.1f} GiB; TRL {beside}", flush=True)
        if "error" in result:
            print(result["error"][-700:], flush=True)
        record = {"environment": environment(), "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
