"""Two benchmarks or two runs side by side, and whether they are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from expert.core.text import counted
from expert.insight.ladder.ladder import Ladder, LadderError, read_ladder
from expert.insight.record import RunRecord, mapping, read_run
from expert.insight.step.anatomy import dissect, median


class Data(NamedTuple):
    """What a run was trained on."""

    hashes: tuple[str, ...]
    """Hashes of the training rows; empty in older runs."""
    named: str
    """File name and number of rows."""
    rows: int | None
    validation: str
    tokenizer: str
    """The base model, which determines the tokenizer."""


def data_of(run: RunRecord) -> Data:
    prepared = [event for event in run.of("data") if event.get("split") == "train"]
    hashes = sorted({str(event["rows"]) for event in prepared if event.get("rows")})
    spec = mapping(run.planned("data.dataset"))
    path = str(spec.get("path") or ", ".join(mapping(spec.get("tasks"))))
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
    """Why these runs should not be compared, in sentences; empty if they can be."""
    found = [data_of(run) for run in runs]
    first, said = found[0], []
    if any(_differ(first, other) for other in found[1:]):
        each = "; ".join(f"{name}: {one.named}" for name, one in zip(names, found, strict=True))
        said.append(
            f"These runs were trained on different data ({each}): their losses are those of "
            "different rows, and do not show which run is better."
        )
    elif any(first.validation != other.validation for other in found[1:]):
        said.append(
            "These runs were validated on different rows: their validation losses cannot be "
            "compared."
        )
    if any(first.tokenizer != other.tokenizer for other in found[1:]):
        said.append(
            "These runs have different base models: their tokens may differ, "
            "so losses per token and tokens a second cannot be compared."
        )
    return said


def _differ(one: Data, other: Data) -> bool:
    """Compares row hashes if both have them, else names and row counts."""
    if one.hashes and other.hashes:
        return one.hashes != other.hashes
    names = one.named.partition(" (")[0] != other.named.partition(" (")[0]
    return names or (None not in (one.rows, other.rows) and one.rows != other.rows)


# --- side by side --------------------------------------------------------------------------------

Compared = tuple[str, float | None, float | None, float | None]
"""Name, first value, second value, second / first."""


def compare(first: Path, second: Path) -> list[Compared]:
    """Compares two benchmarks setting by setting, or two run folders number by number."""
    are_runs = [(path / "events.jsonl").is_file() for path in (first, second)]
    if all(are_runs):
        pair = [_run_numbers(read_run(path)) for path in (first, second)]
    elif any(are_runs):
        raise LadderError(
            f"--compare: {first} and {second} are of different kinds  "
            "(name two results or two runs)"
        )
    else:
        pair = [_ladder_numbers(read_ladder(path)) for path in (first, second)]
    names = [*pair[0], *(name for name in pair[1] if name not in pair[0])]
    return [(name, *_ratio(pair[0].get(name), pair[1].get(name))) for name in names]


def comparison_doubts(first: Path, second: Path) -> list[str]:
    """Why two results or two runs should not be compared."""
    if (first / "events.jsonl").is_file():
        names = [path.resolve().name for path in (first, second)]
        return not_comparable([read_run(first), read_run(second)], names)
    one, other = read_ladder(first), read_ladder(second)
    said = []
    for what, key in (
        ("data", "dataset"),
        ("numbers of training rows", "training_rows"),
        ("models", "model"),
        ("adapters", "adapter"),
        ("quantisations", "quantization"),
        ("longest sequences", "max_seq_length"),
        ("rows per step", "examples_per_update"),
        ("cards", "card"),
    ):
        left, right = getattr(one, key), getattr(other, key)
        if left != right:
            said.append(f"These benchmarks have different {what}: {left} and {right}.")
    return said


def _ratio(
    one: float | None, other: float | None
) -> tuple[float | None, float | None, float | None]:
    return one, other, other / one if one and other is not None else None


def _ladder_numbers(ladder: Ladder) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for setting in ladder.rungs:
        if setting.measured is not None:
            found[f"{setting.name}: tokens/s"] = setting.measured.tokens_per_second
            found[f"{setting.name}: loss"] = setting.measured.loss
    return found


def _run_numbers(run: RunRecord) -> dict[str, float | None]:
    """Medians over the steady log lines, and the final losses and seconds."""
    settled = dissect(run).steady

    def numbers(event: str, key: str, split: str | None = None) -> list[float]:
        events = [e for e in run.of(event) if split in (None, e.get("split", "validation"))]
        return [float(e[key]) for e in events if isinstance(e.get(key), int | float)]

    def last(event: str, key: str, split: str | None = None) -> float | None:
        return next(reversed(numbers(event, key, split)), None)

    keys = (
        *("tokens_per_second", "samples_per_second", "steps_per_second", "mfu", "data_wait"),
        *("padding", "gpu_utilization", "peak_allocated_bytes", "cpu_peak_memory_bytes"),
        "power_watts",
    )
    found = {key.replace("_", " "): median(settled, key) for key in keys}
    found["training loss"] = last("step", "loss")
    found["validation loss"] = last("eval", "loss", "validation")
    found["best validation loss"] = min(numbers("eval", "loss", "validation"), default=None)
    found["test loss"] = last("eval", "loss", "test")
    found["seconds"] = last("finished", "seconds")
    return {name: value for name, value in found.items() if value is not None}
