"""The four experts on one card: their optimised manifests against the plain way to train them.

Every pair learns the same rows, as many at each update, from the same base and seed: once as the
manifest says, once with the settings of the first rung of `expert benchmark`'s ladder (rows
tokenised when a batch asks for them, padded, fp16, eager attention, everything recomputed, plain
AdamW). Then both answer the same held-out rows, and `expert validate` judges the answers.

    python benchmarks/four_experts.py --out FILE [--data FOLDER] [--model NAME] [--rows N]

The rows are those of each expert's generator, and those of FOLDER, which holds json/, sql/ and
cypher/ with train.jsonl and test.jsonl. --smoke tries all of it with `tiny` and few rows.
"""

import argparse
import datetime
import gc
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import expert
from expert.core.events import read_events
from expert.planning.ladder import BASELINE, Ground

EXPERTS = Path(__file__).parents[1] / "experts"
MAKES_ROWS_SEED = 7
VALIDATED = 64
"""Rows that are held out of those given to validate by while learning."""
JUDGED_AT_ONCE = 4
"""Validations beside each other; nothing is timed then."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An expert and the rows it learns."""

    name: str
    expert: str
    given: str = ""
    """The folder of rows that were given; empty: its generator makes them."""
    rows: int = 3200
    settings: tuple[str, ...] = ()
    """Beside the manifest, for both."""


# Rows that others wrote are longer than those of the generators, and there are more of them.
LONGER = (
    "training.config.max_seq_length=1024",
    "training.config.batch_size=64",
    "training.decoding.max_new_tokens=256",
)
PAIRS = (
    Pair(name="json, made", expert="expert-json"),
    Pair(name="sql, made", expert="expert-sql"),
    Pair(name="cypher, made", expert="expert-neo4j"),
    Pair(name="typescript, made", expert="expert-typescript"),
    Pair(name="json, given", expert="expert-json", given="json", rows=1920, settings=LONGER),
    Pair(name="sql, given", expert="expert-sql", given="sql", rows=6400, settings=LONGER),
    Pair(name="cypher, given", expert="expert-neo4j", given="cypher", rows=1920, settings=LONGER),
)


def rows_of(pair: Pair, folder: Path, args: argparse.Namespace) -> None:
    """A copy of the expert's folder with train, validation and test rows."""
    shutil.copytree(EXPERTS / pair.expert, folder, ignore=shutil.ignore_patterns("datasets*"))
    count = args.rows or pair.rows
    datasets = folder / "datasets"
    if not pair.given:
        maker = [sys.executable, str(EXPERTS / pair.expert / "make_data.py")]
        counts = ["--rows", str(count), "--held-out", str(args.judged)]
        places = ["--seed", str(MAKES_ROWS_SEED), "--out", str(datasets)]
        subprocess.run([*maker, *counts, *places], check=True, stdout=subprocess.DEVNULL)
        return
    datasets.mkdir()
    known = some_lines(args.data / pair.given / "train.jsonl", count + VALIDATED)
    held_out = some_lines(args.data / pair.given / "test.jsonl", args.judged)
    for name, lines in (
        ("train", known[VALIDATED:]),
        ("validation", known[:VALIDATED]),
        ("test", held_out),
    ):
        text = "".join(f"{line}\n" for line in lines)
        (datasets / f"{name}.jsonl").write_text(text, encoding="utf-8")


def some_lines(file: Path, count: int) -> list[str]:
    """So many lines, from all over the file, in an order that depends on nothing else."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return random.Random(0).sample(lines, min(count, len(lines)))


def plain_settings(rows_at_once: int) -> tuple[str, ...]:
    """The first rung of the ladder, with as many rows at once as the manifest asks for."""
    ground = Ground(
        on_gpu=torch.cuda.is_available(),
        characters=False,
        rows_at_once=rows_at_once,
        rows_per_sequence=1.0,
        sequences_per_update=1,
        packed=False,
    )
    values = BASELINE.values(ground).items()
    return tuple(f"training.config.{key}={json.dumps(value)}" for key, value in values)


def train(folder: Path, settings: tuple[str, ...], args: argparse.Namespace) -> dict[str, Any]:
    """One run: its folder, how long it took and how fast it was."""
    began = time.perf_counter()
    done = expert.train(folder / "manifest.json", overrides=settings, model=args.model)
    seconds = time.perf_counter() - began
    if done.exit_code:
        raise RuntimeError(f"{done.folder}: exit code {done.exit_code}")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"run": str(done.folder), "seconds": seconds, **facts_of(done.folder)}


def facts_of(folder: Path) -> dict[str, Any]:
    """What the run folder says of the training itself; rates are of its second half."""
    events = list(read_events(folder / "events.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]

    def median(key: str) -> float | None:
        values = [event[key] for event in late if event.get(key) is not None]
        return statistics.median(values) if values else None

    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return {
        "updates": steps[-1]["step"],
        "tokens": sum(event["tokens"] for event in steps),
        "tokens_per_second": median("tokens_per_second"),
        "gpu_utilization": median("gpu_utilization"),
        "last_loss": steps[-1]["loss"],
        "batch": plan["batch"],
        "compiled": plan["kernels"].get("compile"),
        "fallbacks": [event for event in events if event["event"] == "fell_back"],
    }


def measured(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs of a pair, one after the other."""
    folder = args.work / pair.name.replace(", ", "-") / "expert"
    rows_of(pair, folder, args)
    batch = json.loads((folder / "manifest.json").read_text())["training"]["config"]["batch_size"]
    for setting in pair.settings:
        if "batch_size=" in setting:
            batch = int(setting.partition("=")[2])
    both = (*pair.settings, f"training.config.logging_steps={1 if args.smoke else 5}")
    if args.smoke:
        both = (*both, "training.config.max_steps=4")
    expert.prepare(folder / "manifest.json", overrides=both, model=args.model)
    optimised = train(folder, both, args)
    plain = train(folder, (*both, *plain_settings(batch)), args)
    faster = optimised["tokens_per_second"] / plain["tokens_per_second"]
    print(
        f"{pair.name:18} {optimised['tokens_per_second']:10,.0f} tokens/s against "
        f"{plain['tokens_per_second']:8,.0f}: {faster:4.1f} times; whole run "
        f"{optimised['seconds']:.0f} s against {plain['seconds']:.0f} s",
        flush=True,
    )
    return {
        "pair": pair.name,
        "expert": pair.expert,
        "optimised": optimised,
        "plain": plain,
        "times_as_fast": faster,
    }


def judge_all(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Both runs of every pair judged on the same rows, some pairs beside each other."""
    waiting = [result for result in results if "error" not in result]
    running: list[tuple[dict[str, Any], Path, subprocess.Popen[bytes]]] = []
    while waiting or running:
        while waiting and len(running) < JUDGED_AT_ONCE:
            result = waiting.pop(0)
            told = Path(result["optimised"]["run"]).parent / "judged.json"
            command = [sys.executable, "-m", "expert", "validate", "--json"]
            command += ["--expert", result["optimised"]["run"]]
            command += ["--baseline", result["plain"]["run"], "--limit", str(args.judged)]
            with told.open("wb") as out, told.with_suffix(".log").open("wb") as log:
                running.append((result, told, subprocess.Popen(command, stdout=out, stderr=log)))
        for entry in running[:]:
            result, told, child = entry
            if child.poll() is not None:
                running.remove(entry)
                take_judgement(result, told)
        time.sleep(0.2)


def take_judgement(result: dict[str, Any], told: Path) -> None:
    try:
        found = json.loads(told.read_text(encoding="utf-8"))
    except ValueError:
        result["error"] = told.with_suffix(".log").read_text(errors="replace")[-2000:]
        print(f"{result['pair']:18} {result['error']}", flush=True)
        return
    names = ("accuracy", "interval", "passed", "failed", "without_oracle", "exact", "rows")
    for side, facts in (("optimised", found), ("plain", found["baseline"])):
        result[side]["judged"] = {name: facts[name] for name in names}
        # Of all answers: those that no oracle could judge are not right.
        cases = facts["passed"] + facts["failed"] + facts["without_oracle"]
        result[side]["judged"]["right"] = facts["passed"] / cases
    tuned, plain = (result[side]["judged"] for side in ("optimised", "plain"))
    if plain["right"]:
        result["right_against_plain"] = tuned["right"] / plain["right"] - 1
    result["loss_against_plain"] = tuned["rows"]["loss"] / plain["rows"]["loss"] - 1
    print(
        f"{result['pair']:18} right {tuned['right']:.1%} against {plain['right']:.1%}, "
        f"loss {tuned['rows']['loss']:.4f} against {plain['rows']['loss']:.4f}",
        flush=True,
    )


def environment() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "command": f"python benchmarks/four_experts.py {' '.join(sys.argv[1:])}",
    }


def without_folders(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = json.loads(json.dumps(results))
    for result in kept:
        for side in ("optimised", "plain"):
            result.get(side, {}).pop("run", None)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="without it only rows that are made here")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, help="to learn, instead of each pair's own number")
    parser.add_argument("--judged", type=int, default=400, help="held-out rows to answer")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.rows, args.judged = "tiny", args.rows or 160, 8
    args.work = Path(tempfile.mkdtemp(prefix="experts-"))
    results: list[dict[str, Any]] = []
    for pair in PAIRS:
        left_out = args.only and not any(text in pair.name for text in args.only)
        if left_out or (pair.given and args.data is None):
            continue
        try:
            results.append(measured(pair, args))
        except Exception as error:  # noqa: BLE001 - the other pairs are still worth measuring
            results.append({"pair": pair.name, "error": f"{type(error).__name__}: {error}"[:2000]})
            print(results[-1], flush=True)
    judge_all(results, args)
    record = {
        "environment": environment(),
        "model": args.model,
        "judged_rows": args.judged,
        "results": without_folders(results),
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
