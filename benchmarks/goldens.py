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
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from golden_cases import INTERRUPTED, RUNS, SHAPES, instructions, write_expert

REPOSITORY = Path(__file__).resolve().parent.parent
CARDS = ("t4", "rtx-3060", "rtx-4090", "a100-80gb", "h100", "h200")
Flat = dict[str, Any]
Record = dict[str, Flat]

FIELDS = {
    "step": {"loss", "grad_norm", "rate", "tokens", "targets", "examples", "padding", "epoch"},
    "eval": {"loss", "perplexity", "token_accuracy", "tokens", "best"},
}
OCCASIONAL = {"neighbours", "slow", "threads"}  # events that tell what else the machine did
VOLATILE = re.compile(  # what changes from run to run, and wording
    r"seconds|\btime|_per_second|expected_|budget_bytes|\bpid\b|location$|_memory_|created"
    r"|reason|notes\b|test_set$|data\.validation$|\bbecause$|\bremarks"
)
RUN_NAME = re.compile(r"golden-\d{8}-\d{6}")


def flat(value: Any, path: str = "", here: str = "") -> Flat:
    """Path → value of every leaf; floats in hex, folders in front of names left out."""
    if VOLATILE.search(path):
        return {}
    if (
        isinstance(value, list)
        and value
        and all(isinstance(x, dict) and "because" in x for x in value)
    ):
        value = {each["path"]: each["value"] for each in value}  # the decisions of a plan
    if isinstance(value, dict):
        parts = [flat(each, f"{path}.{key}".lstrip("."), here) for key, each in value.items()]
        return {key: each for part in parts for key, each in part.items()}
    if isinstance(value, list):
        parts = [flat(each, f"{path}[{place}]", here) for place, each in enumerate(value)]
        return {key: each for part in parts for key, each in part.items()} or {path: []}
    if isinstance(value, float):
        return {path: value.hex()}
    if isinstance(value, str):
        value = Path(value).name if value.startswith("/") else value.replace(here or "\0", ".")
        return {path: RUN_NAME.sub("RUN", value)}
    return {path: value}


def tensors(path: Path) -> str:
    """Names, types, shapes and bytes of the tensors of a safetensors file, without its metadata."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header.pop("__metadata__", None)
    total = hashlib.sha256()
    for name, entry in sorted(header.items()):
        start, end = (size + offset for offset in entry["data_offsets"])
        total.update(repr((name, entry["dtype"], entry["shape"])).encode() + data[start:end])
    return total.hexdigest()


def files(folder: Path) -> Flat:
    """Digest of every file below; of tensors and settings without what names a place or a time."""
    found: Flat = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            found[name] = tensors(path)
        elif path.name in ("state.json", "adapter_config.json"):
            found |= flat(json.loads(path.read_text(encoding="utf-8")), name)
        elif path.name == "DONE" and not path.parent.name.startswith("tokens-"):
            found[name] = "there"  # it has digests of files with times and paths in them
        elif path.suffix != ".verified":  # the time when tokens were last read through
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def events(run: Path) -> list[dict[str, Any]]:
    text = (run / "events.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def course(run: Path) -> Flat:
    """Numbers of all steps and evaluations; of a step taken twice the second."""
    found: Flat = {}
    for event in events(run):
        name = f"{event['event']} {event.get('step', 0):03} {event.get('split', '')}".strip()
        for key in sorted(FIELDS.get(event["event"], ())):
            found |= flat(event.get(key), f"{name}: {key}")
    return {name: found[name] for name in sorted(found)}


def fields(run: Path) -> Flat:
    """Which events were written, each with all the fields it had."""
    found: dict[str, set[str]] = {}
    for event in events(run):
        if event["event"] not in OCCASIONAL:
            found.setdefault(event["event"], set()).update(event)
    return {name: sorted(keys) for name, keys in sorted(found.items())}


def the_run(folder: Path) -> Path:
    [run] = folder.glob("runs/*/")
    return run


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
            told = f"{done.stderr}{done.stdout}"
            sys.exit(f"{' '.join(words)} ended with {done.returncode} in {folder}:\n{told}")
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
            sys.exit(
                f"not interrupted, {running.returncode}: {(folder / 'output.txt').read_text()}"
            )

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
        text = bench.call("sample", "runs/lora", *options, folder=bench.work)
        record[f"answers: {name}"] = flat(json.loads(text))
    for domain in ("open", "json"):
        options = ["--domain", domain, "--limit", "3", "--baseline", "base", "--json"]
        text = bench.call("validate", "runs/lora", *options, folder=bench.work, codes=(0, 5))
        record[f"scores: {domain}"] = flat(json.loads(text), here=str(bench.work))


def prepared(bench: Bench, record: Record, keep: Path | None) -> None:
    """Token caches of every shape of rows, all by one command."""
    if not bench.wanted("tokens"):
        return
    shapes = bench.work / "shapes"
    for name, made in SHAPES.items():
        write_expert(shapes / name.replace(", ", "-").replace(" ", "-"), made)
    bench.call("pretokenize", "--all", "shapes", folder=bench.work)
    for folder in sorted(shapes.iterdir()):
        record[f"tokens: {folder.name}"] = files(folder / "datasets_optimized")
    if keep:
        shutil.copytree(shapes, keep)


def planned(bench: Bench, record: Record, manifests: Path) -> None:
    """What is decided for each manifest on each card; refused is an answer too."""
    work = bench.work / "manifests"
    shutil.copytree(manifests, work)
    options = [word for card in CARDS for word in ("--gpu", card)] + ["--json"]
    found = sorted(each for each in work.rglob("*") if each.suffix in (".json", ".yaml"))
    for path in (each for each in found if each.name != "test_cases.json"):
        name = path.relative_to(work).as_posix()
        if bench.wanted(f"plan: {name}"):
            plans = json.loads(
                bench.call("plan", name, *options, folder=work, codes=(0, 2, 3)) or "[]"
            )
            for card, plan in zip(CARDS, plans, strict=True) if plans else [("refused", {})]:
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
        if bench.wanted(f"kept run: {name}"):
            shutil.copytree(against / "interrupted" / name, bench.work / "kept" / name)
            found[f"kept run: {name}"] = resumed(bench, bench.work / "kept" / name)
    if bench.wanted("kept tokens"):
        folder = bench.work / "kept" / "shapes"
        shutil.copytree(against / "shapes", folder)
        before = written(folder)
        bench.call("pretokenize", "--all", "shapes", folder=folder.parent)
        found["kept tokens"] = dict.fromkeys(written(folder) - before, "written")
    return found


def written(folder: Path) -> set[str]:
    """Files below and when they were last written."""
    found = [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".verified"]
    return {f"{each.relative_to(folder)} {each.stat().st_mtime_ns}" for each in found}


def first_difference(before: Flat, after: Flat) -> str:
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key, "absent"), after.get(key, "absent")
        if old != new and isinstance(old, dict) and isinstance(new, dict):
            return f"{key}: {first_difference(old, new)}"
        if old != new:
            return f"{key}: {old} -> {new}"[:300]
    return ""


def record_all(bench: Bench, out: Path) -> int:
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty: name a new folder")
    ignored = shutil.ignore_patterns(
        "__pycache__", "runs", "datasets_optimized", "*.py", "*.md", "*.txt"
    )
    for name in ("experts", "examples", "tests/manifests/good"):
        shutil.copytree(REPOSITORY / name, out / "manifests" / name, ignore=ignored)
    record = {"machine": machine(bench), **measured(bench, out / "manifests", out)}
    for name in INTERRUPTED:
        rest = {key: each for key, each in record[f"interrupted: {name}"].items() if ": " in key}
        difference = first_difference(record[f"run: {name}"], rest)
        if difference:
            sys.exit(f"{name}: resumed, it is not the run that was never interrupted: {difference}")
    (out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{len(record)} results, {sum(map(len, record.values()))} values: {out / 'record.json'}")
    return 0


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
        difference = first_difference(before, after)
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
