"""Two benchmarks side by side, and whether benchmarks or runs are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

from expert.core.text import counted
from expert.insight.ladder.ladder import Ladder, read_ladder
from expert.insight.record import RunRecord, mapping

Compared = tuple[str, float | None, float | None, float | None]
"""Name, first value, second value, second / first."""


def not_comparable(runs: Sequence[RunRecord], names: Sequence[str]) -> list[str]:
    """Why these runs should not be compared, in sentences; empty if they can be."""

    def differ(values: Sequence[object]) -> bool:
        return any(value != values[0] for value in values[1:])

    specs = [mapping(run.planned("data.dataset")) for run in runs]
    paths = [str(spec.get("path") or ", ".join(mapping(spec.get("tasks")))) for spec in specs]
    files = [PureWindowsPath(path).name or "unknown data" for path in paths]
    rows = [run.planned("length.rows") for run in runs]
    hashes = [
        sorted(
            {str(e["rows"]) for e in run.of("data") if e.get("rows") and e.get("split") == "train"}
        )
        for run in runs
    ]
    counts = [count for count in rows if type(count) is int]
    held_out = [
        str(spec.get("validation_path") or run.planned("data.validation") or "")
        for spec, run in zip(specs, runs, strict=True)
    ]
    said = []
    if differ(hashes) if all(hashes) else differ(files) or (counts and differ(counts)):
        each = "; ".join(
            f"{name}: {file}" + (f" ({counted(count, 'row')})" if type(count) is int else "")
            for name, file, count in zip(names, files, rows, strict=True)
        )
        said.append(
            f"These runs were trained on different data ({each}): their losses are those of "
            "different rows, and do not show which run is better."
        )
    elif differ(held_out):
        said.append(
            "These runs were validated on different rows: their validation losses cannot be "
            "compared."
        )
    if differ([str(run.planned("model.name") or "") for run in runs]):
        said.append(
            "These runs have different base models: their tokens may differ, "
            "so losses per token and tokens a second cannot be compared."
        )
    return said


def compare(first: Path, second: Path) -> tuple[list[Compared], list[str]]:
    """Two benchmarks setting by setting, and why they should not be compared."""
    ladders = [read_ladder(path) for path in (first, second)]
    one, other = map(_ladder_numbers, ladders)
    rows: list[Compared] = []
    for name in dict.fromkeys((*one, *other)):
        before, after = one.get(name), other.get(name)
        ratio = after / before if before and after is not None else None
        rows.append((name, before, after, ratio))
    return rows, _ladder_doubts(*ladders)


def _ladder_doubts(one: Ladder, other: Ladder) -> list[str]:
    keys = {
        "dataset": "data",
        "training_rows": "numbers of training rows",
        "model": "models",
        "adapter": "adapters",
        "quantization": "quantisations",
        "max_seq_length": "longest sequences",
        "examples_per_update": "rows per step",
        "card": "cards",
    }
    return [
        f"These benchmarks have different {what}: {getattr(one, key)} and {getattr(other, key)}."
        for key, what in keys.items()
        if getattr(one, key) != getattr(other, key)
    ]


def _ladder_numbers(ladder: Ladder) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for setting in ladder.rungs:
        if setting.measured is not None:
            found[f"{setting.name}: tokens/s"] = setting.measured.tokens_per_second
            found[f"{setting.name}: loss"] = setting.measured.loss
    return found
