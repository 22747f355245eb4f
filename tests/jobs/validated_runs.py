"""An expert trained for its task, to be validated, and private runs."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.runs import ROWS as RUN_ROWS
from tests.jobs.runs import WORDS, base_model, place, run, write_expert

YES = '{"ok": true}'
ROWS = [{"instruction": f"say {word} {n}", "output": YES} for n in range(6) for word in WORDS]
TESTS = [
    {
        "id": f"{word}-{n}",
        "task": word,
        "instruction": f"say {word} {n}",
        "output": '{ "ok" : true }',
    }
    for n in range(6, 8)
    for word in WORDS
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Runs that other tests look at too keep no verdict of these."""
    yield
    for run_folder in place().glob("*/runs/*/"):
        (run_folder / "validation.json").unlink(missing_ok=True)


@cache
def learnt() -> Path:
    """The run of an expert trained to answer with one JSON object, whatever the prompt."""
    config = {
        "epochs": 6,
        "adapter_type": "full",
        "learning_rate": 3e-3,
        "save_steps": 6,
        "save_total_limit": None,
    }
    folder = place() / "yes"
    path = write_expert(
        folder,
        base_model(2),
        config,
        rows=ROWS,
        dataset={"test_path": "test.jsonl"},
        capabilities=["format:json"],
    )
    rows_file(folder, TESTS, "test.jsonl")
    return run(path).folder


def rows_file(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def written(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "validation.json").read_text(encoding="utf-8")))


def own_run(folder: Path, *, rows: Any = RUN_ROWS, **dataset: Any) -> Path:
    """A short run that nobody else looks at, with its rows beside its manifest: the expert is moved
    away after its run, and copied from there."""
    kept = _own_expert(json.dumps([rows, dataset]))
    [name] = (one.name for one in (kept / "runs").iterdir())
    return Path(shutil.copytree(kept, folder, dirs_exist_ok=True)) / "runs" / name


@cache
def _own_expert(asked: str) -> Path:
    rows, dataset = json.loads(asked)
    config = {"max_steps": 2, "save_steps": 1, "save_total_limit": None}
    config |= {key: dataset.pop(key) for key in ("seed", "max_seq_length") if key in dataset}
    folder = Path(tempfile.mkdtemp(dir=place()))
    manifest = write_expert(folder / "made", base_model(), config, dataset=dataset, rows=rows)
    rows_file(folder / "made", TESTS, "test.jsonl")
    run(manifest)
    return (folder / "made").rename(folder / "kept")
