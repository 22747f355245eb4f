"""Is `auto` within 5 % of the best hand-set run, start included? And how soon is the first step?

    python benchmarks/whole_runs.py --data FOLDER --out FILE [--shape qwen3-0.6b] [--rows 16]
        [--steps 40] [--lengths 30 120 600 3600] [--twice]

FOLDER as for training_speed.py. Every way of WAYS is a command `expert train` in a process of its
own, first with empty folders for what is compiled and measured (cold), then, with --twice, again
(warm). One run tells what starting costs, what a step takes once it has settled, and what ending
costs: a run of any length is reckoned from these. For each length, what `auto` would choose is read
off its plan for as many steps, and held against the fastest of all.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surroundings import environment
from training_speed import LORA, Case, model_of, write_manifest

from expert.core.events import read_events
from expert.core.files import write_text_atomically

WAYS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash", "torch_compile": False},
    "flash4": {"attention": "flash4", "torch_compile": False},
    "flex": {"attention": "flex", "torch_compile": False},
    "flash, compiled": {"attention": "flash", "torch_compile": True},
    "flex, compiled": {"attention": "flex", "torch_compile": True},
    "sdpa": {"attention": "sdpa", "torch_compile": False},
}


def measured(name: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first step, of a step, and after the last, of one command."""
    folder = args.work / f"{name.replace(', ', '-')}-{time.time_ns()}"
    folder.mkdir(parents=True)
    settings = {**LORA, **settings, "logging_steps": 1, "batch_size": args.examples}
    args.planned = args.steps
    write_manifest(Case(name, args.shape, args.rows, settings), folder, args)
    began = time.time()
    ended = subprocess.run(command("train", folder), capture_output=True, text=True, check=False)
    wall = time.time() - began
    files = sorted(folder.rglob("events.jsonl"))
    events = list(read_events(files[-1])) if files else []
    steps = [event for event in events if event["event"] == "step"]
    if ended.returncode or len(steps) < args.steps:
        return {"error": (ended.stderr or ended.stdout)[-600:]}
    plan = json.loads((files[-1].parent / "plan.json").read_text(encoding="utf-8"))
    settled = statistics.median(event["seconds"] for event in steps[len(steps) // 2 :])
    found = {
        "first_step": steps[0]["time"] - began,
        "step": settled,
        "start": steps[-1]["time"] - began - args.steps * settled,
        "end": wall - (steps[-1]["time"] - began),
        "tokens_per_second": statistics.median(
            event["tokens_per_second"] for event in steps[len(steps) // 2 :]
        ),
        "attention": plan["kernels"]["attention"],
        "compiled": plan["kernels"]["compile"],
        "peak_reserved_bytes": steps[-1].get("peak_reserved_bytes"),
        "last_loss": steps[-1]["loss"],
    }
    shutil.rmtree(folder)
    return found


def command(what: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "expert", what, "--manifest", str(folder / "manifest.json")]


def chosen(steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """What `auto` settles on for a run of so many steps."""
    folder = args.work / f"plan-{steps}-{time.time_ns()}"
    folder.mkdir(parents=True)
    args.planned = steps
    write_manifest(
        Case("plan", args.shape, args.rows, {**LORA, "batch_size": args.examples}), folder, args
    )
    ended = subprocess.run(
        [*command("plan", folder), "--json"], capture_output=True, text=True, check=True
    )
    told = json.loads(ended.stdout)
    kernels = told.get("plan", told)["kernels"]
    return {"attention": kernels["attention"], "compiled": kernels["compile"]}


def compared(ways: dict[str, dict[str, Any]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each length: the fastest way, and the way that `auto` takes, in whole seconds."""
    able = {name: way for name, way in ways.items() if "error" not in way}
    for seconds in args.lengths:
        fastest = min(way["step"] for way in able.values())
        steps = max(1, round(seconds / fastest))
        whole = {n: w["start"] + steps * w["step"] + w["end"] for n, w in able.items()}
        choice = chosen(steps, args)
        own = [
            name
            for name, way in able.items()
            if (way["attention"], way["compiled"]) == (choice["attention"], choice["compiled"])
        ]
        best = min(whole, key=lambda name: whole[name])
        line = {"seconds": seconds, "steps": steps, "best": best, "best_seconds": whole[best]}
        line |= {"auto": own[0] if own else str(choice)}
        line |= {"auto_seconds": whole[own[0]] if own else None, "every_way": whole}
        yield line


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, help="where the models are kept for other runs")
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--examples", type=int, default=64, help="rows of the data a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--lengths", type=int, nargs="*", default=[30, 120, 600, 3600])
    parser.add_argument("--twice", action="store_true")
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="whole-"))
    return args


def main() -> None:
    args = asked()
    os.environ["EXPERT_HOME"] = str(args.work / "home")  # nothing measured or compiled is known
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.work / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(args.work / "triton")
    model_of(args.shape, args)
    record: dict[str, Any] = {"environment": environment(), "shape": args.shape}
    for state in ("cold", "warm") if args.twice else ("cold",):
        ways = {name: measured(name, WAYS[name], args) for name in args.ways}
        record[state] = {"ways": ways, "lengths": []}
        for name, way in ways.items():
            shown = {k: round(v, 2) for k, v in way.items() if isinstance(v, float)}
            print(state, name, shown or way, flush=True)
        write_text_atomically(args.out, json.dumps(record, indent=2) + "\n")
        for line in compared(ways, args):
            record[state]["lengths"].append(line)
            told = {key: value for key, value in line.items() if key != "every_way"}
            print(state, json.dumps(told), flush=True)
            write_text_atomically(args.out, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
