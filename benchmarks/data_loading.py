"""Feeding from a prepared cache: tokens a second and time to the first batch, imports included.

Rows are repeated to ten times as many, so that it shows what grows with the data. Peak memory is
what the system counts for the process, the mapped files of tokens included.

    python benchmarks/data_loading.py --tokenizer FOLDER --out FILE rows.jsonl
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LENGTH, ROWS_AT_ONCE = 2048, 8
TIMES = (1, 10)


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


def feed(manifest: Path) -> dict[str, Any]:
    """In a process of its own: prepare (warm or not), first batch, then as fast as it goes."""
    import numpy as np

    from expert.data.batches import BatchArrays, BatchShape, fill_batch
    from expert.jobs.preparing import prepare

    started = time.perf_counter()
    made = prepare(manifest)
    index, store = made.train.index, made.train.open()
    out = BatchArrays.allocate(BatchShape.for_index(index, ROWS_AT_ONCE))
    order = np.random.default_rng(0).permutation(index.bins)
    fill_batch(out, index, order[:ROWS_AT_ONCE], store, pad_id=0)
    first_batch = time.perf_counter() - started
    tokens, started = 0, time.perf_counter()
    while time.perf_counter() - started < 3:
        for place in range(0, index.bins - ROWS_AT_ONCE, ROWS_AT_ONCE):
            bins = order[place : place + ROWS_AT_ONCE]
            tokens += fill_batch(out, index, bins, store, pad_id=0).real_tokens
    rate = tokens / (time.perf_counter() - started)
    return {
        "rows": made.train.folders[0].statistics.rows_in,
        "hit": made.train.folders[0].hit,
        "first_batch_seconds": first_batch,
        "tokens_per_second": rate,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def feed_apart(manifest: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--feed", str(manifest)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--feed", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.feed:
        print(json.dumps(feed(args.feed)))
        return
    results = {}
    for times in TIMES:
        with tempfile.TemporaryDirectory() as folder:
            manifest = write_expert(Path(folder), args.file, args.tokenizer, times)
            results[f"{times}x"] = {"cold": feed_apart(manifest), "warm": feed_apart(manifest)}
            print(times, json.dumps(results[f"{times}x"]))
    environment = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "command": "python benchmarks/data_loading.py --tokenizer qwen3 --out data-loading.json "
        f"{args.file.parent.name}/{args.file.name}",
    }
    text = json.dumps({"environment": environment, "results": results}, indent=2)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
