"""Results of the product, recorded before a refactoring and compared after it, to the last bit.

    python benchmarks/goldens.py record  --expert .venv/bin/expert --out FOLDER
    python benchmarks/goldens.py compare --expert .venv/bin/expert --against FOLDER [--only NAME]

Only the public interface is used: commands, manifests, files of run folders and token caches.
FOLDER/record.json has losses and gradient norms of short runs on one CPU thread, checkpoints,
final weights, token caches, plans of every shipped manifest, answers and scores; floats are in hex.
FOLDER also keeps the manifests, token caches, and runs that were interrupted: `compare` resumes
those runs and prepares the same rows again, which must write nothing. Bits differ between machines
and versions of torch, so `compare` refuses another machine. About six minutes on a quiet core.

Everything runs in a new temporary folder: a result that depends on where it was made differs.
Not compared: wording, times, rates, process ids, free memory, and folders in front of paths.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from golden_cases import INTERRUPTED, RUNS, SHAPES, instructions, write_expert
from golden_values import Flat, course, events, fields, files, first_difference, flat

REPOSITORY = Path(__file__).resolve().parent.parent
CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100", "h200")
Record = dict[str, Flat]


def the_run(folder: Path) -> Path:
    [run] = folder.glob("runs/*/")
    return run


class Failed(Exception):
    """A command that did not end as it should."""


@contextmanager
def told(record: Record, name: str) -> Iterator[None]:
    """A command that fails is a difference, and the others are still compared."""
    try:
        yield
    except Failed as error:
        record[name] = {"failed": str(error)}


class Bench:
    """A new folder to work in, and the command that is looked at."""

    def __init__(self, expert: Path, work: Path, only: list[str]) -> None:
        self.expert, self.work, self.only = str(expert.absolute()), work, only
        self.began = time.monotonic()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(work / "home"),
            "EXPERT_HOME": str(work / "home" / "expert"),
            "HF_HOME": str(work / "home" / "hf"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }

    def call(self, *words: str, folder: Path, codes: tuple[int, ...] = (0,)) -> str:
        command = [self.expert, *words]
        done = subprocess.run(command, cwd=folder, env=self.env, capture_output=True, text=True)
        if done.returncode not in codes:
            raise Failed(f"{done.returncode}: {' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def train(self, folder: Path, *more: str) -> Path:
        self.call("train", "manifest.json", "--json", *more, folder=folder)
        return the_run(folder)

    def interrupt(self, folder: Path) -> None:
        """Train until the first checkpoint is saved, then do what Ctrl-C does."""
        command = [self.expert, "train", "manifest.json"]
        with open(folder / "output.txt", "w") as out:
            running = subprocess.Popen(command, cwd=folder, env=self.env, stdout=out, stderr=out)
        while running.poll() is None:
            if any('"saved"' in each.read_text() for each in folder.glob("runs/*/events.jsonl")):
                running.send_signal(signal.SIGINT)
                break
            time.sleep(0.01)
        if running.wait() != 130:
            output = (folder / "output.txt").read_text()
            raise Failed(f"{running.returncode}, not interrupted: {output}")

    def wanted(self, name: str) -> bool:
        if self.only and not any(each in name for each in self.only):
            return False
        print(f"{time.monotonic() - self.began:5.0f} s  {name}", file=sys.stderr, flush=True)
        return True


def machine(bench: Bench) -> Flat:
    found = json.loads(bench.call("machine", "--json", folder=bench.work))
    versions = {name: each["value"] for name, each in found["versions"].items()}
    processor = {"arch": platform.machine(), "cpu": found["cpu_model"]["value"]}
    return {**processor, "python": found["python"]["value"], "threads": 1, **versions}


def trained(bench: Bench, record: Record, keep: Path | None) -> None:
    for name, made in RUNS.items():
        if not bench.wanted(f"run: {name}"):
            continue
        folder = bench.work / "runs" / name.replace(", ", "-").replace(" ", "-")
        write_expert(folder, made)
        with told(record, f"run: {name}"):
            run = bench.train(folder)
            record[f"run: {name}"] = course(run)
            record[f"run: {name}: events"] = fields(run)
            record[f"run: {name}: checkpoints"] = files(run / "checkpoints")
            record[f"run: {name}: final"] = files(run / "final")
            plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
            record[f"run: {name}: plan"] = flat(plan, here=str(folder))
            record[f"run: {name}: tokens"] = files(folder / "datasets_optimized")
        if name in INTERRUPTED:
            again = bench.work / "interrupted" / name
            write_expert(again, made)
            with told(record, f"interrupted: {name}"):
                bench.interrupt(again)
                if keep:
                    shutil.copytree(again, keep / name)
                record[f"interrupted: {name}"] = resumed(bench, again)


def resumed(bench: Bench, folder: Path) -> Flat:
    """What an interrupted run comes to: all steps, the weights at the end, and tokens reused."""
    before = files(folder / "datasets_optimized")
    run = bench.train(folder, "--resume")
    hits = [event["hit"] for event in events(run) if event["event"] == "data"]
    return {
        **course(run),
        "tokens were reused": hits[len(hits) // 2 :],
        "tokens as before": files(folder / "datasets_optimized") == before,
        "final": files(run / "final"),
    }


def answered(bench: Bench, record: Record) -> None:
    if not (bench.work / "runs" / "lora").exists() or not bench.wanted("answers"):
        return
    prompts = [word for row in instructions(3) for word in ("--prompt", row["instruction"])]
    for name, how in {"greedy": ["0"], "drawn": ["0.9", "--top-p", "0.9"]}.items():
        options = [*prompts, "--max-tokens", "16", "--json", "--seed", "7", "--temperature", *how]
        with told(record, f"answers: {name}"):
            text = bench.call("sample", "runs/lora", *options, folder=bench.work)
            record[f"answers: {name}"] = flat(json.loads(text))
    for domain in ("open", "json"):
        options = ["--domain", domain, "--limit", "3", "--baseline", "base", "--json"]
        with told(record, f"scores: {domain}"):
            text = bench.call("validate", "runs/lora", *options, folder=bench.work, codes=(0, 5, 6))
            record[f"scores: {domain}"] = flat(json.loads(text), here=str(bench.work))


def prepared(bench: Bench, record: Record, keep: Path | None) -> None:
    """Token caches of every shape of rows, all by one command."""
    if not bench.wanted("tokens"):
        return
    shapes = bench.work / "shapes"
    for name, made in SHAPES.items():
        write_expert(shapes / name.replace(", ", "-").replace(" ", "-"), made)
    with told(record, "tokens"):
        bench.call("pretokenize", "--all", "shapes", folder=bench.work)
    for folder in sorted(shapes.iterdir()):
        record[f"tokens: {folder.name}"] = files(folder / "datasets_optimized")
    if keep:
        shutil.copytree(shapes, keep)


def planned(bench: Bench, record: Record, manifests: Path) -> None:
    """What is decided for each manifest on each card; of a refused one nothing."""
    work = bench.work / "manifests"
    shutil.copytree(manifests, work)
    options = [word for card in CARDS for word in ("--gpu", card)] + ["--json"]
    found = sorted(each for each in work.rglob("*") if each.suffix in (".json", ".yaml"))
    for path in (each for each in found if each.name != "test_cases.json"):
        name = path.relative_to(work).as_posix()
        if not bench.wanted(f"plan: {name}"):
            continue
        with told(record, f"plan: {name}"):
            text = bench.call("plan", name, *options, folder=work, codes=(0, 2, 3)) or "[]"
            for card, plan in zip(CARDS, json.loads(text) or [{}] * len(CARDS), strict=True):
                record[f"plan: {name}: {card}"] = flat(plan, here=str(bench.work))


def measured(bench: Bench, manifests: Path, keep: Path | None = None) -> Record:
    record: Record = {}
    trained(bench, record, keep / "interrupted" if keep else None)
    answered(bench, record)
    prepared(bench, record, keep / "shapes" if keep else None)
    planned(bench, record, manifests)
    return record


def kept(bench: Bench, against: Path) -> Record:
    """Runs and token caches made when the record was, resumed and reused by this command."""
    found: Record = {}
    for name in INTERRUPTED:
        if bench.wanted(f"kept run: {name}") and (against / "interrupted" / name).is_dir():
            shutil.copytree(against / "interrupted" / name, bench.work / "kept" / name)
            with told(found, f"kept run: {name}"):
                found[f"kept run: {name}"] = resumed(bench, bench.work / "kept" / name)
    if bench.wanted("kept tokens"):
        folder = bench.work / "kept" / "shapes"
        shutil.copytree(against / "shapes", folder)
        before = written(folder)
        with told(found, "kept tokens"):
            bench.call("pretokenize", "--all", "shapes", folder=folder.parent)
            found["kept tokens"] = dict.fromkeys(written(folder) - before, "written")
    return found


def written(folder: Path) -> set[str]:
    """Files below and when they were last written."""
    found = [each for each in folder.rglob("*") if each.is_file() and each.name[0] != "."]
    return {f"{each.relative_to(folder)} {each.stat().st_mtime_ns}" for each in found}


def record_all(bench: Bench, out: Path) -> int:
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty: name a new folder")
    ignored = shutil.ignore_patterns(
        "__pycache__", "runs", "datasets_optimized", "*.py", "*.md", "*.txt"
    )
    for name in ("experts", "examples", "tests/manifests/good"):
        shutil.copytree(REPOSITORY / name, out / "manifests" / name, ignore=ignored)
    record = {"machine": machine(bench), **measured(bench, out / "manifests", out)}
    (out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{len(record)} results, {sum(map(len, record.values()))} values: {out / 'record.json'}")
    wrong = {name: each["failed"] for name, each in record.items() if list(each) == ["failed"]}
    for name in INTERRUPTED:
        whole, rest = record[f"run: {name}"], record[f"interrupted: {name}"]
        difference = first_difference(
            whole, {key: each for key, each in rest.items() if ": " in key}
        )
        if difference:
            wrong[f"interrupted: {name}"] = (
                f"not as the run that was never interrupted: {difference}"
            )
    for name, why in wrong.items():
        print(f"{name}: {why}")
    return 1 if wrong else 0


def compare_all(bench: Bench, against: Path) -> int:
    record = json.loads((against / "record.json").read_text(encoding="utf-8"))
    here = machine(bench)
    difference = first_difference(record.pop("machine"), here)
    if difference:
        sys.exit(f"recorded elsewhere, so bits may differ; record here: {difference}")
    found = measured(bench, against / "manifests")
    names = [
        name for name in [*record, *(set(found) - set(record))] if name in found or not bench.only
    ]
    pairs = {name: (record.get(name, {}), found.get(name, {})) for name in names}
    for name, values in kept(bench, against).items():
        pairs[name] = (record.get(name.replace("kept run", "interrupted"), {}), values)
    different = 0
    for name, (before, after) in pairs.items():
        ended = after.get("failed") if len(after) == 1 else None  # scores have a key of that name
        difference = ended or first_difference(before, after)
        different += bool(difference)
        print(f"{name:60} {f'DIFFERENT  {difference}' if difference else f'same  {len(before)}'}")
    print(f"{len(pairs) - different} of {len(pairs)} are the same")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Record results, or compare with recorded ones.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, folder in (("record", "--out"), ("compare", "--against")):
        command = commands.add_parser(name)
        command.add_argument("--expert", type=Path, required=True, help="the command to look at")
        command.add_argument(folder, type=Path, required=True, dest="folder")
        command.add_argument("--keep", action="store_true", help="leave the working folder there")
    only = "compare results whose name has this in it; several times"
    command.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="goldens-"))
    bench = Bench(args.expert, work, getattr(args, "only", []))
    try:
        return {"record": record_all, "compare": compare_all}[args.command](
            bench, args.folder.absolute()
        )
    finally:
        if args.keep:
            print(f"kept: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
