"""The four experts on one card: their optimised manifests against the plain way to train them.

Every pair learns the same rows, as many at each update, from the same base and seed: once as the
manifest says, once with the baseline of `expert benchmark` (rows
tokenised when a batch asks for them, padded, fp16, eager attention, everything recomputed, plain
AdamW), four rows at once, as the first manifests of these experts had it. Some updates of both are
timed alone on the card. Then all runs are made to their end beside each other, both sides answer
the same held-out rows, and `expert validate` judges the answers. Untimed, the plain side takes all
rows of an update at once: it learns the same, and nobody has to wait for it.

    python benchmarks/four_experts.py --out FILE [--data FOLDER] [--model NAME] [--rows N]

The rows are those of each expert's generator, and those of FOLDER, which holds json/, sql/ and
cypher/ with train.jsonl and test.jsonl. --smoke tries all of it with `tiny` and few rows.
"""

import argparse
import gc
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from surroundings import environment

import expert
from expert.core.files import write_text_atomically
from expert.planning.benchmark_settings import baseline
from expert.run.open import open_run
from expert.run.session.short_run import ShortRun, short_run

EXPERTS = Path(__file__).parents[1] / "experts"
MAKES_ROWS_SEED = 7
VALIDATED = 64
"""Rows that are held out of those given to validate by while learning."""
ROWS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An expert and the rows it learns."""

    name: str
    expert: str
    given: str = ""
    """The folder of rows that were given; empty: its generator makes them."""
    rows: int = 2400
    settings: tuple[str, ...] = ()
    """Beside the manifest, for both."""


# Rows that others wrote are longer than those of the generators, and there are more of them. After
# one epoch of 1,600 rows 8 % (json) and 0 % (cypher) of the answers were right: too few to compare.
LONGER = (
    "training.config.max_seq_length=1024",
    "training.config.batch_size=32",
    "training.decoding.max_new_tokens=256",
)
OFTEN = (*LONGER, "training.config.epochs=2")
PAIRS = (
    Pair(name="json, made", expert="expert-json"),
    Pair(name="sql, made", expert="expert-sql"),
    Pair(name="cypher, made", expert="expert-neo4j"),
    Pair(name="typescript, made", expert="expert-typescript"),
    Pair(name="json, given", expert="expert-json", given="json", rows=1200, settings=OFTEN),
    Pair(name="sql, given", expert="expert-sql", given="sql", rows=4800, settings=LONGER),
    Pair(name="cypher, given", expert="expert-neo4j", given="cypher", rows=2000, settings=OFTEN),
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
    """The baseline of `expert benchmark`, with this micro-batch size."""
    values = baseline(on_gpu=torch.cuda.is_available(), micro_batch=rows_at_once).values.items()
    return tuple(f"training.config.{key}={json.dumps(value)}" for key, value in values)


def settings_of(pair: Pair, rows_at_once: int) -> dict[str, tuple[str, ...]]:
    """What is laid over the manifest, by side."""
    both = (*pair.settings, "training.config.logging_steps=1")
    return {"optimised": both, "plain": (*both, *plain_settings(rows_at_once))}


def timed(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a pair for some updates, alone on the card, one after the other.

    The plan is that of the whole run, so what that would compile is compiled here too.
    """
    folder = args.work / pair.name.replace(", ", "-") / "expert"
    rows_of(pair, folder, args)
    result: dict[str, Any] = {"pair": pair.name, "expert": pair.expert, "folder": str(folder)}
    updates = {"optimised": args.updates, "plain": args.plain_updates}
    for side, settings in settings_of(pair, ROWS_AT_ONCE).items():
        read = expert.read_manifest(folder / "manifest.json", overrides=settings)
        result[side] = facts_of(short_run(open_run(read, model=args.model), updates=updates[side]))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    optimised, plain = result["optimised"], result["plain"]
    result["times_as_fast"] = optimised["tokens_per_second"] / plain["tokens_per_second"]
    print(
        f"{pair.name:18} {optimised['tokens_per_second']:10,.0f} tokens/s against "
        f"{plain['tokens_per_second']:8,.0f}: {result['times_as_fast']:4.1f} times",
        flush=True,
    )
    return result


def facts_of(done: ShortRun) -> dict[str, Any]:
    """Rates of the second half of the updates; the first ones compile."""
    steps = [event for event in done.events if event["event"] == "step"]
    late = steps[len(steps) // 2 :]
    seconds = sum(event["seconds"] for event in late)
    used = [e["gpu_utilization"] for e in late if e.get("gpu_utilization") is not None]
    plan = done.plan
    return {
        "tokens_per_second": sum(event["tokens"] for event in late) / seconds,
        "seconds_per_update": seconds / sum(event["updates"] for event in late),
        "gpu_utilization": statistics.fmean(used) if used else None,
        "updates_measured": len(late),
        "examples_per_update": plan.batch.examples_per_update,
        "micro_batch": plan.batch.micro_batch,
        "accumulation": plan.batch.accumulation,
        "compiled": plan.kernels.compile,
        "precision": plan.kernels.precision,
        "fallbacks": [e["reason"] for e in done.events if e["event"] == "fell_back"],
    }


# --- whole runs, beside each other: nothing is timed ------------------------------------------


def learn_and_judge(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Every side of every pair to its end, then judged; both sides on the same rows."""
    with ThreadPoolExecutor(args.at_once) as pool:
        running = {}
        jobs = []
        for result in results:
            pair = next(each for each in PAIRS if each.name == result["pair"])
            rows = result["optimised"]["examples_per_update"]
            for side, settings in settings_of(pair, rows).items():
                jobs.append((result, side, settings))
        # What takes longest first: long rows, padded, with eager attention.
        for result, side, settings in sorted(
            jobs, key=lambda job: ("given" not in job[0]["pair"], job[1] != "plain")
        ):
            running[pool.submit(one_side, result, side, settings, args)] = (result, side)
        for each in as_completed(running):
            result, side = running[each]
            result[side] |= each.result()
            compare(result)
            write_record(results, args)  # whatever comes next: this much is known


def one_side(
    result: dict[str, Any], side: str, settings: tuple[str, ...], args: argparse.Namespace
) -> dict[str, Any]:
    """Train one side to its end and judge it: how it was judged, or what went wrong."""
    folder = Path(result["folder"])
    short = ("training.config.max_steps=4",) if args.smoke else ()
    runs = folder.parent / side
    train = ["train", "--model", args.model, "--manifest", str(folder / "manifest.json")]
    train += ["--output", str(runs)]
    for setting in (*settings, *short):
        train += ["--set", setting]
    done = command(train)
    if done.returncode == 0:
        done = command(["validate", "--json", "--expert", str(runs), "--limit", str(args.judged)])
    try:
        return {"judged": judgement(json.loads(done.stdout))}
    except (ValueError, KeyError, TypeError) as error:
        words = f"{type(error).__name__}: {error}; {(done.stdout + done.stderr)[-2000:]}"
        print(f"{result['pair']}, {side}: {words}", flush=True)
        return {"error": words}


def command(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "expert", *arguments]
    return subprocess.run(whole, check=False, capture_output=True, text=True)


def judgement(facts: dict[str, Any]) -> dict[str, Any]:
    names = ("accuracy", "interval", "passed", "failed", "without_oracle", "exact", "rows")
    # Of all answers: those that no oracle could judge are not right.
    cases = facts["passed"] + facts["failed"] + facts["without_oracle"]
    return {**{name: facts[name] for name in names}, "right": facts["passed"] / cases}


def compare(result: dict[str, Any]) -> None:
    """Say how far the optimised side is from the plain one."""
    tuned, plain = (result[side].get("judged") for side in ("optimised", "plain"))
    if tuned is None or plain is None:
        return
    if plain["right"]:
        result["right_against_plain"] = tuned["right"] / plain["right"] - 1
    result["loss_against_plain"] = tuned["rows"]["loss"] / plain["rows"]["loss"] - 1
    print(
        f"{result['pair']:18} right {tuned['right']:.1%} against {plain['right']:.1%}, "
        f"loss {tuned['rows']['loss']:.4f} against {plain['rows']['loss']:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="without it only rows that are made here")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, help="to learn, instead of each pair's own number")
    parser.add_argument("--updates", type=int, default=20, help="that are timed")
    # Each takes seconds where the host is slow, and all of them the same.
    parser.add_argument("--plain-updates", type=int, default=4, help="of the plain side")
    parser.add_argument("--judged", type=int, default=400, help="held-out rows to answer")
    parser.add_argument("--at-once", type=int, default=8, help="runs beside each other, untimed")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.model, args.rows, args.judged = "tiny", args.rows or 160, 8
        args.updates, args.plain_updates, args.at_once = 4, 2, 1
    args.work = Path(tempfile.mkdtemp(prefix="experts-"))
    results: list[dict[str, Any]] = []
    for pair in PAIRS:
        left_out = args.only and not any(text in pair.name for text in args.only)
        if not left_out and (args.data is not None or not pair.given):
            results.append(timed(pair, args))
            write_record(results, args)
    print("all are timed; the card may be shared from here on", flush=True)
    learn_and_judge(results, args)
    shutil.rmtree(args.work)


def write_record(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    kept = [{k: v for k, v in each.items() if k != "folder"} for each in results]
    facts = {"model": args.model, "judged_rows": args.judged, "results": kept}
    record = {"environment": environment(), **facts}
    write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
