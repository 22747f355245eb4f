"""Rates measured on a card, stored for later plans."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from expert.core.files import exclusive_lock, read_json
from expert.core.hashed import file_integrity, hash_file, write_hashed
from expert.planning.decisions import Decision
from expert.planning.machine.threads import NAMES

# What a benchmark may decide for later plans if the manifest says auto: it only affects speed.
DECIDED_BY_BENCHMARK: dict[str, TypeAdapter[Any]] = {
    "kernels.compile": TypeAdapter(bool),
    "kernels.fused_blocks": TypeAdapter(bool),
    "kernels.cuda_graphs": TypeAdapter(bool),
    "kernels.attention": TypeAdapter(Literal["eager", "sdpa", "flash", "flash4", "flex"]),
    "kernels.checkpointing": TypeAdapter(Literal["none", "selective", "full"]),
    "batch.micro_batch": TypeAdapter(PositiveInt),
    "optim.optimizer": TypeAdapter(Literal["adamw_torch", "adamw_torch_fused"]),
}
"""By path of the plan, with the allowed values: an edited file must not break a plan."""
# What else the speed of a run depends on, given card, model, base, length and packing.
SPEED_OF_A_RUN = (
    *("kernels.precision", "kernels.tf32", "kernels.fused_loss", "kernels.attention"),
    *("kernels.compile", "kernels.checkpointing", "kernels.cuda_graphs", "kernels.deterministic"),
    *("kernels.recomputed_blocks", "optim.optimizer", "batch.examples_per_update"),
    *("adapter.rank", "adapter.target_modules", "data.trim", "loader.workers"),
    *("data.flat", "kernels.fused_blocks"),
)
ROWS_ALIKE = 1.25
"""Longer rows need more attention and pack differently; means within a quarter count as alike."""


Record = TypeVar("Record", bound=BaseModel)


class MeasuredRate(BaseModel):
    """Measured tokens per second of one configuration on one card."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    model: str
    adapter: str
    quantization: str
    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    measured_on: str
    command: str
    max_seq_length: int | None = None
    """Sequence length of a benchmark; None: only a rate."""
    packing: str | None = None
    parameters: int | None = None
    """Of the model: the built-in character model has one name but many sizes."""
    settings: dict[str, Any] = {}
    """The winning values, by path of the plan."""
    gains: dict[str, float] = {}
    """Speed-up over not having it, by path of the plan."""
    threads: int | None = None
    """Of a CPU; None on a card, and in older records."""
    row_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Mean tokens per row of a run: its rate applies to similar rows, and its settings need not be
    the fastest. None: from a benchmark."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        """Settings of a benchmark go into plans; those of a run are only compared."""
        for path, kind in DECIDED_BY_BENCHMARK.items() if self.row_tokens is None else ():
            if path in self.settings:
                kind.validate_python(self.settings[path], strict=True)
        return self

    def matches_shape(self, other: Mapping[str, Any]) -> bool:
        """Whether a record has the same card, model and shape; "auto" matches any base."""
        keys = ("card", "model", "adapter", "max_seq_length", "packing", "parameters")
        base = other.get("quantization") in ("auto", self.quantization)
        return base and all(other.get(key) == getattr(self, key) for key in keys)


def measurements_file(environ: Mapping[str, str] = os.environ) -> Path:
    """$EXPERT_HOME, else the user's data folder."""
    if environ.get("EXPERT_HOME"):
        return Path(environ["EXPERT_HOME"]) / "measurements.json"
    if os.name == "nt" and environ.get("LOCALAPPDATA"):
        return Path(environ["LOCALAPPDATA"]) / "expert" / "measurements.json"
    data = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "expert" / "measurements.json"


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """Every readable record of a JSON list; none if the file is missing or damaged."""
    if file_integrity(path) == "damaged":
        return []
    try:
        records = read_json(path)
    except (OSError, ValueError):
        return []
    valid = []
    for record in records if isinstance(records, list) else []:
        with suppress(ValidationError):
            valid.append(kind.model_validate(record))
    return valid


def remember_record(path: Path, record: BaseModel, keys: Sequence[str], *, most: int) -> None:
    """Add a record to a file of the newest `most`; one with the same values of `keys` is
    replaced."""
    new = record.model_dump(mode="json")
    with _rewritten(path) as records:
        records[:] = [
            old
            for old in records
            if not isinstance(old, dict) or any(old.get(key) != new[key] for key in keys)
        ]
        records.append(new)
        del records[:-most]


def read_rates(path: Path) -> list[MeasuredRate]:
    """Every readable rate; none if the file is missing or damaged."""
    return read_records(path, MeasuredRate)


def speed_settings(
    decisions: Mapping[str, Decision], *, cores: int | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """What the rate of a run applies to, by path of the plan, or by name if it is not in the plan.
    The micro-batch size follows from the rest, unless the manifest sets it. `cores`: of a CPU."""
    settings = {path: decisions[path].value for path in SPEED_OF_A_RUN if path in decisions}
    ranks = decisions.get("parallel.ranks")
    if ranks is not None and ranks.value > 1:
        shared = ("parallel.engine", "parallel.ranks", "parallel.nodes")
        settings |= {path: decisions[path].value for path in shared}
    micro_batch = decisions["batch.micro_batch"]
    settings["micro_batch_size"] = micro_batch.value if micro_batch.source == "manifest" else "auto"
    if cores is not None:
        settings["cores"] = cores
        settings["threads"] = next((environ[name] for name in NAMES if environ.get(name)), "auto")
    return settings


def ranks_of(rate: MeasuredRate) -> int:
    """The number of processes that reached a rate together."""
    return int(rate.settings.get("parallel.ranks", 1))


def find_rate(
    rates: Sequence[MeasuredRate], wanted: Mapping[str, Any], settled: Mapping[str, Any]
) -> MeasuredRate | None:
    """The newest rate with the same card, model, adapter, base and shape whose settings match those
    `settled` here by path; None if there is none. Runs with another packing or other kernels have
    another speed and do not count."""
    for rate in reversed(rates):
        alike = all(settled.get(path, value) == value for path, value in rate.settings.items())
        alike &= rate.row_tokens is None or similar_row_length(
            rate.row_tokens, wanted.get("row_tokens")
        )
        if rate.matches_shape(wanted) and rate.settings and alike:
            return rate
    return None


def similar_row_length(measured: float, here: float | None) -> bool:
    """Whether rows are about as long as those of a measured run."""
    return here is not None and here <= ROWS_ALIKE * measured and measured <= ROWS_ALIKE * here


def find_best(rates: Sequence[MeasuredRate], wanted: Mapping[str, Any]) -> MeasuredRate | None:
    """The newest benchmark with the same card, model, adapter, base and shape."""
    benchmarks = (rate for rate in reversed(rates) if rate.row_tokens is None and rate.settings)
    return next((rate for rate in benchmarks if rate.matches_shape(wanted)), None)


def remember_rate(path: Path, rate: MeasuredRate) -> None:
    """Add a record, replacing only an older one of the same card, model and shape. Settings that
    the older one decided and this one did not try are kept: a short benchmark tries little."""
    with _rewritten(path) as records:
        replaced = [record for record in records if _same(rate, record)]
        records[:] = [record for record in records if not _same(rate, record)]
        older = next(filter(None, map(_understood, reversed(replaced))), rate)
        settled = {
            "settings": {**older.settings, **rate.settings},
            "gains": {**older.gains, **rate.gains},
        }
        records.append({**rate.model_dump(mode="json"), **settled})


def forget_rates(path: Path, model: str | None = None) -> int:
    """Remove the rates of one model or of all; returns the number of removed records."""
    if not path.is_file():
        return 0

    def stays(record: Any) -> bool:
        rate = _understood(record)
        return rate is None or model not in (None, rate.model)

    with _rewritten(path) as records:
        before = len(records)
        records[:] = filter(stays, records)
        return before - len(records)


def _understood(record: Any) -> MeasuredRate | None:
    try:
        return MeasuredRate.model_validate(record)
    except ValidationError:
        return None


def _same(rate: MeasuredRate, record: Any) -> bool:
    """Whether a rate replaces a record: a benchmark replaces another, a run one with the same
    settings and similar rows."""
    if not isinstance(record, dict) or not rate.matches_shape(record):
        return False
    rows = record.get("row_tokens")
    if rate.row_tokens is None or not isinstance(rows, int | float):
        return rate.row_tokens is None and rows is None
    return record.get("settings") == rate.settings and similar_row_length(rows, rate.row_tokens)


@contextmanager
def _rewritten(path: Path) -> Iterator[list[Any]]:
    """All records of a file, understood by this version or not, which are then written back; an
    empty file is removed, and a damaged one set aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path):
        records: Any = None
        with suppress(FileNotFoundError, ValueError):
            records = read_json(path)
        if path.is_file() and not (isinstance(records, list) and file_integrity(path) != "damaged"):
            path.rename(path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"))
            records = None
        records = records or []
        yield records
        if records:
            write_hashed(path, json.dumps(records, indent=2) + "\n")
        else:
            hash_file(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
