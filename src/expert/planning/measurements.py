"""Rates that were measured on a card, kept for later plans."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

from expert.core.files import alone, read_json
from expert.core.hashed import hash_file, state_of, write_hashed
from expert.planning.decisions import Decision
from expert.planning.machine.threads import NAMES

# What a benchmark may settle for later plans where the manifest says auto: it changes only speed.
REMEMBERED: dict[str, TypeAdapter[Any]] = {
    "kernels.compile": TypeAdapter(bool),
    "kernels.fused_blocks": TypeAdapter(bool),
    "kernels.cuda_graphs": TypeAdapter(bool),
    "kernels.attention": TypeAdapter(Literal["eager", "sdpa", "flash", "flash4", "flex"]),
    "kernels.checkpointing": TypeAdapter(Literal["none", "selective", "full"]),
    "batch.micro_batch": TypeAdapter(PositiveInt),
    "optim.optimizer": TypeAdapter(Literal["adamw_torch", "adamw_torch_fused"]),
}
"""By path of the plan, with what it may be: a file that somebody edited must break no plan."""
# What else the speed of a run follows from, given card, model, base, length and packing.
SPEED_OF_A_RUN = (
    *("kernels.precision", "kernels.tf32", "kernels.fused_loss", "kernels.attention"),
    *("kernels.compile", "kernels.checkpointing", "kernels.cuda_graphs", "kernels.deterministic"),
    *("kernels.recomputed_blocks", "optim.optimizer", "batch.examples_per_update"),
    *("adapter.rank", "adapter.target_modules", "data.trim", "loader.workers"),
    *("data.flat", "kernels.fused_blocks"),
)
ROWS_ALIKE = 1.25
"""Longer rows have more attention and fill batches otherwise; a mean within a quarter is alike."""


Record = TypeVar("Record", bound=BaseModel)


class MeasuredRate(BaseModel):
    """Real tokens a second of one configuration on one card, and how it was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    model: str
    adapter: str
    quantization: str
    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    measured_on: str
    command: str
    max_seq_length: int | None = None
    """Tokens of a sequence, of a finished benchmark; None: a rate alone."""
    packing: str | None = None
    parameters: int | None = None
    """Of the model: the built-in character model has one name and many sizes."""
    settings: dict[str, Any] = {}
    """What won, by path of the plan."""
    gains: dict[str, float] = {}
    """Times as fast as without it, by path of the plan."""
    threads: int | None = None
    """Of a CPU; None on a card, and in records from before this was kept."""
    row_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Mean tokens of the rows of a run: its rate holds for rows like these, and its settings need
    not be the fastest. None: from a benchmark."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        """What a benchmark settles goes into plans; the settings of a run are only compared."""
        for path, kind in REMEMBERED.items() if self.row_tokens is None else ():
            if path in self.settings:
                kind.validate_python(self.settings[path], strict=True)
        return self

    def is_about(self, other: Mapping[str, Any]) -> bool:
        """Whether a record is of the same card, model and shape; "auto" stands for any base."""
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
    """Every readable record of a JSON list; a file that is absent or damaged has none."""
    if state_of(path) == "damaged":
        return []
    try:
        records = read_json(path)
    except (OSError, ValueError):
        return []
    found = []
    for record in records if isinstance(records, list) else []:
        with suppress(ValidationError):
            found.append(kind.model_validate(record))
    return found


def remember_record(
    path: Path, made: Record, place: Callable[[Record], object], *, most: int
) -> None:
    """Add a record to a file of the newest `most`; one in the same place is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path):
        kept = [one for one in read_records(path, type(made)) if place(one) != place(made)]
        records = [one.model_dump() for one in (*kept, made)][-most:]
        write_hashed(path, json.dumps(records, indent=1) + "\n")


def read_rates(path: Path) -> list[MeasuredRate]:
    """Every readable rate; a file that is absent or damaged has none."""
    return read_records(path, MeasuredRate)


def speed_settings(
    decisions: Mapping[str, Decision], *, cores: int | None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """What the rate of a run holds for, by path of the plan, or by name where it is not in it. The
    micro-batch size follows from the rest, unless the manifest sets it. `cores`: of a CPU."""
    found = {path: decisions[path].value for path in SPEED_OF_A_RUN if path in decisions}
    ranks = decisions.get("parallel.ranks")
    if ranks is not None and ranks.value > 1:
        shared = ("parallel.engine", "parallel.ranks", "parallel.nodes")
        found |= {path: decisions[path].value for path in shared}
    at_once = decisions["batch.micro_batch"]
    found["micro_batch_size"] = at_once.value if at_once.source == "manifest" else "auto"
    if cores is not None:
        found["cores"] = cores
        found["threads"] = next((environ[name] for name in NAMES if environ.get(name)), "auto")
    return found


def ranks_of(rate: MeasuredRate) -> int:
    """Processes that reached a rate together."""
    return int(rate.settings.get("parallel.ranks", 1))


def find_rate(
    rates: Sequence[MeasuredRate], wanted: Mapping[str, Any], settled: Mapping[str, Any]
) -> MeasuredRate | None:
    """The newest rate of the same card, model, adapter, base and shape, whose settings are those
    that were settled here by path of the plan; None where only others were measured. A run without
    packing, or with other kernels, has another speed, and its time says nothing about this one."""
    for rate in reversed(rates):
        alike = all(settled.get(path, value) == value for path, value in rate.settings.items())
        alike &= rate.row_tokens is None or rows_alike(rate.row_tokens, wanted.get("row_tokens"))
        if rate.is_about(wanted) and rate.settings and alike:
            return rate
    return None


def rows_alike(measured: float, here: float | None) -> bool:
    """Whether rows are about as long as those that a run was measured with."""
    return here is not None and here <= ROWS_ALIKE * measured and measured <= ROWS_ALIKE * here


def find_best(rates: Sequence[MeasuredRate], wanted: Mapping[str, Any]) -> MeasuredRate | None:
    """The newest benchmark of the same card, model, adapter, base and shape."""
    found = (rate for rate in reversed(rates) if rate.row_tokens is None and rate.settings)
    return next((rate for rate in found if rate.is_about(wanted)), None)


def remember_rate(path: Path, rate: MeasuredRate) -> None:
    """Add a record to the file; only an older one of the same card, model and shape goes. What that
    one had settled and this one did not try stays settled: a short benchmark tries little.

    Records that this version does not understand are kept as they are, and a damaged file is put
    aside.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path):
        records = _records(path)
        kept = [record for record in records if not _same(rate, record)]
        replaced = [_understood(record) for record in records if _same(rate, record)]
        older = next(filter(None, reversed(replaced)), rate)
        settled = {
            "settings": {**older.settings, **rate.settings},
            "gains": {**older.gains, **rate.gains},
        }
        kept.append({**rate.model_dump(mode="json"), **settled})
        write_hashed(path, json.dumps(kept, indent=2) + "\n")


def forget_rates(path: Path, model: str | None = None) -> int:
    """Take out what was measured, of one model or of all; how many records that were.

    What this version does not understand stays; a file of which nothing is left is removed.
    """
    if not path.is_file():
        return 0

    def stays(record: Any) -> bool:
        found = _understood(record)
        return found is None or model not in (None, found.model)

    with alone(path):
        records = _records(path)
        kept = list(filter(stays, records))
        if kept:
            write_hashed(path, json.dumps(kept, indent=2) + "\n")
        else:
            hash_file(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    return len(records) - len(kept)


def _understood(record: Any) -> MeasuredRate | None:
    try:
        return MeasuredRate.model_validate(record)
    except ValidationError:
        return None


def _same(rate: MeasuredRate, record: Any) -> bool:
    """Whether a rate replaces a record: a benchmark another one, a run one with the same settings
    and rows as long."""
    if not isinstance(record, dict) or not rate.is_about(record):
        return False
    rows = record.get("row_tokens")
    if rate.row_tokens is None or not isinstance(rows, int | float):
        return rate.row_tokens is None and rows is None
    return record.get("settings") == rate.settings and rows_alike(rows, rate.row_tokens)


def _records(path: Path) -> list[Any]:
    """Everything in the file, understood or not."""
    try:
        records = read_json(path)
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError):
        records = None
    if isinstance(records, list) and state_of(path) != "damaged":
        return records
    path.rename(path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"))
    return []
