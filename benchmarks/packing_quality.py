"""Whether packing costs quality: packed against unpacked, several seeds, `tiny` on a CPU.

Every run learns the same rows, as many at each step, from the same base, and is judged by the best
loss on the same held-out rows. Three kinds of rows: short (22 to 24 tokens), mixed (20 to 120) and
long (100 to 125, two to a sequence). `before` packs and groups as earlier versions did: by length.

    OMP_NUM_THREADS=1 python benchmarks/packing_quality.py --out FILE [--jobs N] [--seeds N]

Runs that FILE has already are not made again.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packing_before import fit_longest_first
from surroundings import environment

import expert
from expert.core.events import read_events
from expert.core.files import write_text_atomically
from expert.data.feed import order
from expert.data.pack import pack
from expert.data.template.text_tools import text_tools

TINY = Path(expert.__file__).parent / "model" / "tiny"
NAMES = ("anna", "ben", "carla", "david", "emma", "paris", "london", "berlin", "rome", "madrid")
KINDS_OF = (
    "red",
    "green",
    "blue",
    "black",
    "white",
    "open",
    "new",
    "old",
    "small",
    "large",
    "high",
)
THINGS = ("low", "north", "south", "east", "west", "book", "table", "chair", "music", "water")
WORDS = (*NAMES, *KINDS_OF, *THINGS, "sun", "moon", "tree")
HELD_OUT = 128
KINDS: dict[str, dict[str, Any]] = {
    "short": {"tokens": (22, 24), "rows": 2000, "max_seq_length": 512},
    "mixed": {"tokens": (20, 120), "rows": 480, "max_seq_length": 512},
    "long": {"tokens": (100, 125), "rows": 192, "max_seq_length": 256},
}
WAYS: dict[str, dict[str, Any]] = {
    "unpacked": {"packing": False, "group_by_length": False},
    "unpacked, grouped": {"packing": False, "group_by_length": True},
    "unpacked, grouped before": {"packing": False, "group_by_length": True},
    "packed": {"packing": True},
    "packed before": {"packing": True},
}
CONFIG = {
    "adapter_type": "lora",
    "batch_size": 16,
    "epochs": 1,
    "learning_rate": 5e-4,
    "lr_scheduler": "cosine",
    "warmup_ratio": 0.05,
    "evaluation_strategy": "epoch",
    "save_strategy": "no",
    "logging_steps": 2,
    "trackers": [],
    "device": "cpu",
}


# --- rows -----------------------------------------------------------------------------------------


def drawn_row(source: random.Random, keys: int) -> dict[str, str]:
    """One of four tasks about some words; how long the row is tells something of its task."""
    some = [source.choice(WORDS) for _ in range(max(1, keys))]
    numbers = [source.randint(0, 99) for _ in some]
    task = source.randrange(4)
    if task == 0:
        return {"instruction": f"reverse {' '.join(some)}", "output": " ".join(reversed(some))}
    if task == 1:
        return {"instruction": f"add {' '.join(map(str, numbers))}", "output": str(sum(numbers))}
    if task == 2:
        return {"instruction": f"capitals {' '.join(some)}", "output": " ".join(some).upper()}
    record = dict(zip(some, numbers, strict=True))
    lines = ", ".join(f"{key} {value}" for key, value in record.items())
    return {"instruction": f"json {lines}", "output": json.dumps(record)}


def rows_of(kind: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows of a kind, no row twice."""
    encoder, template = text_tools(TINY, "chatml")
    low, high = KINDS[kind]["tokens"]
    wanted = KINDS[kind]["rows"] + HELD_OUT
    source, found = random.Random(7), dict[str, dict[str, str]]()
    while len(found) < wanted:
        keys = {"short": source.randint(1, 3), "long": source.randint(6, 30)}.get(
            kind, round(source.lognormvariate(1.4, 0.6))
        )
        row = drawn_row(source, keys)
        length = int(encoder.encode([segments_of(template, row)]).lengths[0])
        if low <= length <= high:
            found.setdefault(row["instruction"], row)
    rows = list(found.values())
    return rows[HELD_OUT:], rows[:HELD_OUT]


def segments_of(template: Any, row: dict[str, str]) -> Any:
    from expert.data.examples.column_survey import survey_rows
    from expert.data.examples.columns import detect_source_columns
    from expert.data.examples.formats import example_of
    from expert.data.records import Row
    from expert.manifest.schema.dataset import DatasetSpec

    made = Row(dict(row), "rows.jsonl", 1)
    columns = detect_source_columns(survey_rows([made]), DatasetSpec(path="rows.jsonl"))
    return template.segments(example_of(made, columns), learn_prompt=False)


# --- runs -----------------------------------------------------------------------------------------


def epoch_before(self: order.DataOrder, number: int) -> Any:
    """What `DataOrder.epoch` did: steps of one length, in random order."""
    size, lengths = self.bins_per_step, self._grouped
    drawn = order.shuffled(self.count, seed=self.seed, draw=order.Draw.EPOCH, number=number)
    if lengths is None:
        return drawn
    whole = self.count - self.count % size
    parts = [drawn[at : min(at + 50 * size, whole)] for at in range(0, whole, 50 * size)]
    runs = [part[np.argsort(-lengths[part], kind="stable")] for part in parts]
    batches = np.concatenate([drawn[:0], *runs]).reshape(-1, size)
    turn = np.random.default_rng([self.seed, number]).permutation(len(batches))
    return np.concatenate([batches[turn].ravel(), drawn[whole:]])


@contextmanager
def as_before() -> Iterator[None]:
    """Packing and grouping as they were."""
    fit, epoch = pack._fit, order.DataOrder.epoch
    pack._fit, order.DataOrder.epoch = fit_longest_first, epoch_before  # type: ignore
    try:
        yield
    finally:
        pack._fit, order.DataOrder.epoch = fit, epoch  # type: ignore[method-assign]


def measured(kind: str, way: str, seed: int, rows: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    """One run, in a folder of its own so that no index is shared."""
    with tempfile.TemporaryDirectory(prefix="packing-") as place:
        folder = Path(place)
        for name, part in zip(("train", "validation"), rows, strict=True):
            text = "".join(json.dumps(row) + "\n" for row in part)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        length = KINDS[kind]["max_seq_length"]
        config = {**CONFIG, **WAYS[way], "seed": seed, "max_seq_length": length}
        lora = {"type": "lora", "r": 32, "alpha": 512, "dropout": 0.0}
        manifest = {
            "name": "packing",
            "base_models": [{"name": "tiny", "prompt_template": "chatml", "adapters": [lora]}],
            "training": {
                "dataset": {"path": "train.jsonl", "validation_path": "validation.jsonl"},
                "config": config,
            },
        }
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        if way.endswith("before"):
            with as_before():
                return _run(folder / "manifest.json")
        return _run(folder / "manifest.json")


def _run(manifest: Path) -> dict[str, Any]:
    index = expert.prepare(manifest).train.index
    done = expert.train(manifest)
    events = list(read_events(done.folder / "events.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    lengths = index.piece_stop - index.piece_start
    alone = [len(set(lengths[a:b].tolist())) == 1 for a, b in _edges(index.bin_offsets)]
    return {
        "best_validation_loss": done.eval_loss,
        "validation_losses": [e["loss"] for e in events if e["event"] == "eval"],
        "steps": done.steps,
        "sequences": index.bins,
        "sequence_length": index.length,
        "fill": round(index.statistics().fill, 4),
        "sequences_of_one_length": sum(alone) if index.rule != "none" else None,
        "tokens_per_second": round(
            statistics.median(e["tokens_per_second"] for e in steps[len(steps) // 4 :])
        ),
        "padding": round(statistics.fmean(e.get("padding") or 0.0 for e in steps), 4),
    }


def _edges(offsets: Any) -> Iterator[tuple[int, int]]:
    return zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)


# --- all of them ----------------------------------------------------------------------------------


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every kind and way: the losses, their spread, and the mean over that of unpacked rows."""
    found = []
    for kind in KINDS:
        of_kind = [run for run in runs if run["rows"] == kind]
        plain = [r["best_validation_loss"] for r in of_kind if r["way"] == "unpacked"]
        for way in WAYS:
            losses = [r["best_validation_loss"] for r in of_kind if r["way"] == way]
            if not losses:
                continue
            ratio = statistics.fmean(losses) / statistics.fmean(plain) if plain else None
            found.append(
                {
                    "rows": kind,
                    "way": way,
                    "losses": [round(loss, 4) for loss in losses],
                    "mean": round(statistics.fmean(losses), 4),
                    "over_unpacked": round(ratio, 4) if ratio else None,
                    "overlaps_unpacked": min(losses) <= max(plain) and min(plain) <= max(losses)
                    if min(len(losses), len(plain)) > 1
                    else None,
                }
            )
    return found


def one_run(asked: tuple[str, str, int]) -> dict[str, Any]:
    kind, way, seed = asked
    found = measured(kind, way, seed, rows_of(kind))
    return {"rows": kind, "way": way, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    runs: list[dict[str, Any]] = known.get("runs", [])
    done = {(run["rows"], run["way"], run["seed"]) for run in runs}
    seeds = range(1, args.seeds + 1)
    wanted = [(kind, way, seed) for seed in seeds for kind in KINDS for way in args.ways]
    left = [each for each in wanted if each not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(one_run, left):
            runs.append(found)
            print(json.dumps(found), flush=True)
            record = {
                **environment(),
                "model": "tiny",
                "threads": torch.get_num_threads(),
                "kinds": KINDS,
                "config": CONFIG,
                "summary": summary(runs),
                "runs": runs,
            }
            write_text_atomically(args.out, json.dumps(record, indent=1) + "\n")
    print(f"{'rows':6} {'way':26} {'losses':26} {'mean':>7} {'/ unpacked':>10}")
    for line in summary(runs):
        losses = " ".join(f"{loss:.4f}" for loss in line["losses"])
        ratio = f"{line['over_unpacked']:.3f}" if line["over_unpacked"] else "-"
        named = f"{line['rows']:6} {line['way']:26}"
        print(f"{named} {losses:26} {line['mean']:7.4f} {ratio:>10}")


if __name__ == "__main__":
    main()
