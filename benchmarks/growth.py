"""How cost grows: tokens a second and memory against length, tokens a step, size, rank and rows.

    python benchmarks/growth.py --data FOLDER --out FOLDER [--axes length tokens size rank rows]
        [--at POINT …] [--shape qwen3-0.6b] [--steps 40] [--peer]

FOLDER of --data as for training_speed.py. Every point is a whole run through `expert.train` with
nothing set but what the axis is about; those of rows are `expert pretokenize` in a process of its
own. --peer measures TRL (peer_trl.py) at the points that it can be given too. Writes growth.json
and a plot of every axis, growth-AXIS.png, and goes on where it was stopped.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_cases import SHAPES
from surroundings import environment
from training_speed import LORA, facts_of, write_model

from expert.core.files import write_text_atomically
from expert.jobs.train import train

POINTS: dict[str, list[Any]] = {
    "length": [512, 1024, 2048, 4096, 8192, 16384, 32768],
    "tokens": [4096, 8192, 16384, 32768, 65536, 131072],
    "size": ["smollm2-135m", "qwen3-0.6b", "llama-1b", "llama-8b"],
    "rank": [8, 16, 32, 64, 128],
    "rows": [1_000, 10_000, 100_000, 1_000_000],
}
UNITS = {
    "length": "tokens of a document",
    "tokens": "tokens a step",
    "size": "model",
    "rank": "rank of LoRA",
    "rows": "rows",
}
TOKENS = 32768
MARKS = re.compile(r"<\|[^|]*\|>")
"""Of turns, which a joined document has no more."""
CHARACTERS_A_TOKEN = 3.0
"""Of the rows, a little less than they have: documents are cut to the length, not filled up."""


def main() -> None:
    args = asked()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "growth.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"points": []}
    done = {(point["axis"], point["at"], point["who"]) for point in record["points"]}
    for axis in args.axes:
        for at in [at for at in POINTS[axis] if not args.at or str(at) in args.at]:
            for who, measure in measured_by(axis, args).items():
                if (axis, at, who) in done:
                    continue
                found = tried(measure, axis, at, args)
                record["points"].append({"axis": axis, "at": at, "who": who, **found})
                record["environment"] = environment()
                write_text_atomically(file, json.dumps(record, indent=1) + "\n")
                print(axis, at, who, {key: found[key] for key in list(found)[:4]}, flush=True)
        plot(axis, record["points"], args.out / f"growth-{axis}.png")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--axes", nargs="*", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--at", nargs="*", help="only these points")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--peer", action="store_true")
    args = parser.parse_args()
    args.work = Path(tempfile.mkdtemp(prefix="growth-"))
    return args


Measure = Callable[[str, Any, argparse.Namespace], dict[str, Any]]


def measured_by(axis: str, args: argparse.Namespace) -> dict[str, Measure]:
    if axis == "rows":
        return {"expert": prepared}
    peers: dict[str, Measure] = {"trl": by_trl} if args.peer and axis in ("size", "tokens") else {}
    return {"expert": trained, **peers}


def tried(measure: Measure, axis: str, at: Any, args: argparse.Namespace) -> dict[str, Any]:
    """A point that does not run is a point too."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of the point before
    try:
        return measure(axis, at, args)
    except Exception as error:  # noqa: BLE001 - the other points are still worth measuring
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def model_of(axis: str, at: Any, args: argparse.Namespace) -> Path:
    shape = at if axis == "size" else args.shape
    folder = args.out / "models" / shape
    write_model(shape, folder, args.data / "tok")
    found: Path = folder.resolve()
    return found


def trained(axis: str, at: Any, args: argparse.Namespace) -> dict[str, Any]:
    folder = args.work / f"{axis}-{at}"
    folder.mkdir(parents=True)
    length = at if axis == "length" else 2048
    write_documents(args.data / "corpus.jsonl", folder / "corpus.jsonl", length, axis == "length")
    manifest = {
        "name": "growth",
        "base_model": {"name": str(model_of(axis, at, args))},
        "training": {
            "dataset": {"path": "corpus.jsonl", "validation_split": 0},
            "config": {
                **LORA,
                **({"rank": at, "alpha": 2 * at} if axis == "rank" else {}),
                "max_seq_length": length,
                "batch_tokens": at if axis == "tokens" else max(TOKENS, length),
                "train_on_prompt": True,
                "max_steps": args.steps,
                "logging_steps": 1,
                "save_strategy": "no",
                "trackers": [],
                "epochs": 1000,
            },
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    began = time.perf_counter()
    done = train(folder / "manifest.json")
    if done.exit_code:
        raise RuntimeError(f"the run ended early, with exit code {done.exit_code}")
    facts = facts_of(done.folder)
    kept = ["tokens_per_second", "mfu", "peak_reserved_bytes", "planned_bytes", "batch"]
    kept += [
        "kernels",
        "recomputed_blocks",
        "first_loss",
        "last_loss",
        "fallbacks",
        "gpu_utilization",
    ]
    shutil.rmtree(folder)
    return {**{key: facts[key] for key in kept}, "seconds": time.perf_counter() - began}


def write_documents(rows: Path, file: Path, length: int, joined: bool) -> None:
    """The rows as they are, or joined to documents as long as a sequence."""
    if not joined:
        shutil.copyfile(rows, file)
        return
    texts = [json.loads(line)["text"] for line in rows.read_text(encoding="utf-8").splitlines()]
    with file.open("w", encoding="utf-8") as stream:
        text = ""
        for each in texts:
            text += MARKS.sub(" ", each) + "\n"
            if len(text) >= CHARACTERS_A_TOKEN * length:
                stream.write(json.dumps({"text": text}) + "\n")
                text = ""


def prepared(axis: str, at: int, args: argparse.Namespace) -> dict[str, Any]:
    """The rows over and over."""
    folder = args.work / f"rows-{at}"
    folder.mkdir(parents=True)
    lines = (args.data / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(at):
            stream.write(lines[number % len(lines)] + "\n")
    manifest = {
        "name": "growth",
        "base_model": {"name": str(model_of(axis, at, args))},
        "training": {
            "dataset": {"path": "corpus.jsonl", "validation_split": 0},
            "config": {"max_seq_length": 2048, "train_on_prompt": True},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    began = time.perf_counter()
    command = [sys.executable, "-m", "expert", "pretokenize", "-m", str(folder / "manifest.json")]
    largest = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            largest = max(largest, peak_bytes(child.pid))
            time.sleep(0.1)
    if child.returncode:
        raise RuntimeError(f"expert pretokenize ended with {child.returncode}")
    seconds = time.perf_counter() - began
    size = (folder / "corpus.jsonl").stat().st_size
    shutil.rmtree(folder)
    return {"rows_per_second": at / seconds, "seconds": seconds, "bytes": size, "memory": largest}


def peak_bytes(process: int) -> int:
    """The most memory that a process and those it started have held so far, summed. The system's
    ru_maxrss would count what this process held when it started them."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        started = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    own = 1024 * int(found[1]) if found else 0
    return own + sum(peak_bytes(int(each)) for each in started.split())


def by_trl(axis: str, at: Any, args: argparse.Namespace) -> dict[str, Any]:
    file = args.work / f"trl-{axis}-{at}.json"
    tokens = at if axis == "tokens" else TOKENS
    given = ["--data", args.data, "--model", model_of(axis, at, args), "--out", file, "--liger"]
    given += ["--rows", max(1, tokens // 2048), "--steps", args.steps]
    program = Path(__file__).parent / "peer_trl.py"
    subprocess.run([sys.executable, program, *map(str, given)], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {key: found[key] for key in ("tokens_per_second", "peak_reserved_bytes", "losses")}


def plot(axis: str, points: list[dict[str, Any]], file: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {file.name}: matplotlib is not installed")
        return
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, both = pyplot.subplots(1, 2, figsize=(10, 4))
    rate, memory = ("rows_per_second", "memory")
    if axis != "rows":
        rate, memory = ("tokens_per_second", "peak_reserved_bytes")
    for panel, key, title in zip(both, (rate, memory), ("a second", "memory, GiB"), strict=True):
        for who in sorted({point["who"] for point in points if point["axis"] == axis}):
            line = [p for p in points if (p["axis"], p["who"]) == (axis, who) and p.get(key)]
            values = [p[key] / (2**30 if key == memory else 1) for p in line]
            panel.plot([str(p["at"]) for p in line], values, marker="o", label=who)
        panel.set_title(f"{rate.split('_', maxsplit=1)[0]} {title}" if key == rate else title)
        panel.set_xlabel(UNITS[axis])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    both[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
