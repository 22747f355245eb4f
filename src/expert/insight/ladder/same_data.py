"""Whether runs can be compared at all: the losses of other rows are other losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any, NamedTuple

from expert.core.text import counted
from expert.insight.record import RunRecord


class Data(NamedTuple):
    """What a run was trained on."""

    hashes: tuple[str, ...]
    """Of the training rows; empty where the run does not tell, as older ones do not."""
    named: str
    """The file, and how many rows."""
    rows: int | None
    validation: str
    tokenizer: str
    """The base, by which texts become tokens."""


def data_of(run: RunRecord) -> Data:
    """By what the run itself has recorded."""
    told = [event for event in run.of("data") if event.get("split") == "train"]
    hashes = sorted({str(event["rows"]) for event in told if event.get("rows")})
    dataset = run.planned("data.dataset")
    spec: Mapping[str, Any] = dataset if isinstance(dataset, Mapping) else {}
    tasks = spec.get("tasks")
    path = str(spec.get("path") or ", ".join(tasks if isinstance(tasks, Mapping) else ()))
    rows = run.planned("length.rows")
    count = rows if isinstance(rows, int) and not isinstance(rows, bool) else None
    name = PureWindowsPath(path).name or "unknown data"
    held_out = spec.get("validation_path") or run.planned("data.validation") or ""
    return Data(
        hashes=tuple(hashes),
        named=f"{name} ({counted(count, 'row')})" if count is not None else name,
        rows=count,
        validation=str(held_out),
        tokenizer=str(run.planned("model.name") or ""),
    )


def not_comparable(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """What speaks against comparing these runs, in sentences; nothing where all is the same."""
    found = [data_of(run) for run in runs]
    first, said = found[0], []
    if any(_differ(first, other) for other in found[1:]):
        each = "; ".join(f"{name}: {one.named}" for name, one in zip(names, found, strict=True))
        said.append(
            f"These runs were trained on different data ({each}): their losses are those of "
            "different rows, and which run is better cannot be seen from them."
        )
    elif any(first.validation != other.validation for other in found[1:]):
        said.append(
            "These runs were validated on different rows: their validation losses cannot be "
            "compared."
        )
    if any(first.tokenizer != other.tokenizer for other in found[1:]):
        said.append(
            "These runs have different bases: a token may be another piece of text in each, so "
            "that losses per token and tokens a second cannot be compared."
        )
    return said


def _differ(one: Data, other: Data) -> bool:
    """By the hash of the rows where both tell it, else by name and number."""
    if one.hashes and other.hashes:
        return one.hashes != other.hashes
    names = one.named.partition(" (")[0] != other.named.partition(" (")[0]
    return names or (None not in (one.rows, other.rows) and one.rows != other.rows)
