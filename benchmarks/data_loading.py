"""Feeding from a prepared cache: tokens a second, time to the first batch, and memory.

Rows are repeated to four and ten times as many, so that it shows what grows with the data. Memory
is the highest that is not mapped from a file (RssAnon), looked at every few milliseconds;
`bytes_per_row` is how much it grows for each row more from 4x to 10x; 1x of a small file does not
fill the shards and buffers that are in use at once. `thread` is the rate at which batches come out
of the feed that training uses, with its thread, on the CPU. Each measurement is a process of its
own: the cold one finds no cache, the watched one finds it and fills some hundred batches, and the
timed ones, of which the best counts, are watched by nobody. Imports are not part of the time to the
first batch.

    python benchmarks/data_loading.py --tokenizer FOLDER --out FILE rows.jsonl [rows.jsonl …]
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH, ROWS_AT_ONCE = 2048, 8
TIMES = (1, 4, 10)
WATCHED_BATCHES, TIMED_SECONDS, TIMED_RUNS, WATCHED_RUNS = 300, 2, 2, 1
LOOK_EVERY_SECONDS = 0.003
IMPORTED = ("numpy", "pyarrow", "tokenizers", "jinja2")
OWN = (
    *("jobs.planning", "jobs.preparing", "manifest.reader"),
    *("data.batches", "data.chat_template", "data.checks", "data.documents", "data.drawing"),
    *("data.formats", "data.pack", "data.prepare", "data.remembered", "data.sources"),
)


def write_expert(folder: Path, file: Path, tokenizer: Path, times: int) -> Path:
    """A manifest over the rows, repeated; every copy says its number, so none are equal."""
    data = folder / "train.jsonl"
    lines = [json.loads(line) for line in file.open(encoding="utf-8")]
    with data.open("w", encoding="utf-8") as stream:
        for copy in range(times):
            for row in lines:
                stream.write(json.dumps({**row, "instruction": f"{row['instruction']} ({copy})"}))
                stream.write("\n")
    manifest = {
        "name": "bench",
        "base_model": {"name": str(tokenizer.resolve()), "prompt_template": "chatml"},
        "training": {
            "dataset": {"path": "train.jsonl", "validation_split": 0},
            "config": {"max_seq_length": LENGTH},
        },
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    return path


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("memory is read from /proc/self/status, which this system has not")


@contextlib.contextmanager
def watched() -> Iterator[list[int]]:
    """The highest anonymous memory so far, as the one entry of a list."""
    peak, over = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


class Feed:
    """Opens what a manifest names, and fills batches of it in random order."""

    def __init__(self, manifest: Path) -> None:
        import numpy as np

        from expert.data.feed.batches import BatchArrays, BatchShape
        from expert.run.open import prepare

        made = prepare(manifest)
        self.prepared = made.train.folders[0]
        self.index, self.store = made.train.index, made.train.open()
        self.out = BatchArrays.allocate(BatchShape.for_index(self.index, ROWS_AT_ONCE))
        self.order = np.random.default_rng(0).permutation(self.index.bins)

    def fill(self, number: int) -> int:
        """The real tokens of a batch."""
        from expert.data.feed.batches import fill_batch

        place = number * ROWS_AT_ONCE % (self.index.bins - ROWS_AT_ONCE)
        bins = self.order[place : place + ROWS_AT_ONCE]
        return fill_batch(self.out, self.index, bins, self.store).real_tokens


def measure(manifest: Path, watch: bool) -> dict[str, Any]:
    """In a process of its own: memory, or speed."""
    started = time.perf_counter()
    for name in (*IMPORTED, *(f"expert.{name}" for name in OWN)):
        importlib.import_module(name)
    result: dict[str, Any] = {"import_seconds": time.perf_counter() - started}
    with watched() if watch else contextlib.nullcontext() as peak:
        started = time.perf_counter()
        feed = Feed(manifest)
        feed.fill(0)
        result["first_batch_seconds"] = time.perf_counter() - started
        result |= {"rows": feed.prepared.statistics.rows_in, "hit": feed.prepared.hit}
        if peak is not None:
            for number in range(WATCHED_BATCHES):
                feed.fill(number)
            return {**result, "peak_anonymous_bytes": peak[0]}
    tokens, batches, started = 0, 0, time.perf_counter()
    while time.perf_counter() - started < TIMED_SECONDS:
        tokens, batches = tokens + feed.fill(batches), batches + 1
    result["tokens_per_second"] = tokens / (time.perf_counter() - started)
    return {**result, "torch_imported": "torch" in sys.modules}


def measure_thread(manifest: Path) -> dict[str, Any]:
    """Tokens a second out of the feed that training uses."""
    import torch

    from expert.data.feed.batches import BatchShape
    from expert.data.feed.feed import PackedFeed, StepWork
    from expert.data.feed.order import DataOrder

    made = Feed(manifest)
    order = DataOrder(made.index.bins, ROWS_AT_ONCE, seed=0)
    works = (StepWork(u, made.index, made.store) for u in order.steps(0, 10**9))
    shape = BatchShape.for_index(made.index, ROWS_AT_ONCE)
    cpu = torch.device("cpu")
    feed = PackedFeed(works, shape, batches_per_step=1, device=cpu)
    tokens, started = 0, time.perf_counter()
    with feed:
        for fed in feed:
            tokens += sum(batch.counts.real_tokens for batch in fed.batches)
            if time.perf_counter() - started > TIMED_SECONDS:
                break
    return {"tokens_per_second": tokens / (time.perf_counter() - started)}


def measure_apart(manifest: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--feed", str(manifest), *options]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def measure_file(file: Path, tokenizer: Path) -> dict[str, Any]:
    """Both numbers of rows, and what memory grows by between them."""
    results: dict[str, Any] = {"data": file.parent.name, "file": file.name}
    for times in TIMES:
        with tempfile.TemporaryDirectory() as folder:
            manifest = write_expert(Path(folder), file, tokenizer, times)
            cold = measure_apart(manifest, "--watch")
            seen = [measure_apart(manifest, "--watch") for _ in range(WATCHED_RUNS)]
            timed = [measure_apart(manifest) for _ in range(TIMED_RUNS)]
            thread = [measure_apart(manifest, "--thread") for _ in range(TIMED_RUNS)]
        warm = {name: min(run[name] for run in timed) for name in timed[0]}
        warm["tokens_per_second"] = max(run["tokens_per_second"] for run in timed)
        warm["peak_anonymous_bytes"] = min(run["peak_anonymous_bytes"] for run in seen)
        best = max(run["tokens_per_second"] for run in thread)
        results[f"{times}x"] = {"cold": cold, "warm": warm, "thread": {"tokens_per_second": best}}
        print(file.parent.name, times, json.dumps(results[f"{times}x"]), flush=True)
    few, many = (results[f"{times}x"] for times in TIMES[1:])
    results["bytes_per_row"] = {path: growth(few[path], many[path]) for path in ("cold", "warm")}
    print(file.parent.name, results["bytes_per_row"], flush=True)
    return results


def growth(few: dict[str, Any], many: dict[str, Any]) -> float:
    """Bytes of memory for each row more."""
    more = many["peak_anonymous_bytes"] - few["peak_anonymous_bytes"]
    return float(more / (many["rows"] - few["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--feed", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--thread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feed and args.thread:
        print(json.dumps(measure_thread(args.feed)))
        return
    if args.feed:
        print(json.dumps(measure(args.feed, args.watch)))
        return
    results = [measure_file(file, args.tokenizer) for file in args.files]
    environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "command": "python benchmarks/data_loading.py --tokenizer qwen3 --out data-loading.json "
        + " ".join(f"{file.parent.name}/{file.name}" for file in args.files),
    }
    text = json.dumps({"environment": environment, "results": results}, indent=2)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
