"""What `expert benchmark` found to be fastest on a card, stored for later plans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from expert.core.files import exclusive_lock, read_json, write_text_atomically

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


class MeasuredRate(BaseModel):
    """The fastest configuration in a benchmark of one model on one card."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: str
    model: str
    adapter: str
    quantization: str
    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    measured_on: str
    command: str
    max_seq_length: int
    packing: str
    parameters: int | None
    """Of the model: the built-in character model has one name but many sizes."""
    settings: dict[str, Any] = {}
    """The winning values, by path of the plan."""
    gains: dict[str, float] = {}
    """Speed-up over not having it, by path of the plan."""
    threads: int | None = None
    """Of a CPU; None on a card."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        for path, kind in DECIDED_BY_BENCHMARK.items():
            if path in self.settings:
                kind.validate_python(self.settings[path], strict=True)
        return self

    def matches(self, other: Mapping[str, Any]) -> bool:
        """Whether it is of the same card, model and shape; "auto" matches any base."""
        keys = ("card", "model", "adapter", "max_seq_length", "packing", "parameters")
        base = other.get("quantization") in ("auto", self.quantization)
        return base and all(other.get(key) == getattr(self, key) for key in keys)


def expert_home(environ: Mapping[str, str] = os.environ) -> Path:
    """$EXPERT_HOME, else the user's data folder."""
    if environ.get("EXPERT_HOME"):
        return Path(environ["EXPERT_HOME"])
    data = environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "expert"


def measurements_file(environ: Mapping[str, str] = os.environ) -> Path:
    return expert_home(environ) / "measurements.json"


def read_rates(path: Path) -> list[MeasuredRate]:
    """Every readable benchmark; none if the file is missing or is not a JSON list."""
    records: Any = None
    with suppress(OSError, ValueError):
        records = read_json(path)
    found = []
    for record in records if isinstance(records, list) else []:
        with suppress(ValidationError):
            found.append(MeasuredRate.model_validate(record))
    return found


def find_best(rates: Sequence[MeasuredRate], wanted: Mapping[str, Any]) -> MeasuredRate | None:
    """The newest benchmark of the same card, model, adapter, base and shape."""
    return next((rate for rate in reversed(rates) if rate.matches(wanted)), None)


def remember_rate(path: Path, rate: MeasuredRate) -> None:
    """Add a benchmark in place of an older one of the same card, model and shape. Settings that the
    older one decided and this one did not try are kept: a short benchmark tries little."""
    with _rewritten(path) as rates:
        older = find_best(rates, rate.model_dump()) or rate
        rates[:] = [each for each in rates if not rate.matches(each.model_dump())]
        kept = {key: {**getattr(older, key), **getattr(rate, key)} for key in ("settings", "gains")}
        rates.append(rate.model_copy(update=kept))


def forget_rates(path: Path, model: str | None = None) -> int:
    """Remove the benchmarks of one model or of all; returns how many there were."""
    if not path.is_file():
        return 0
    with _rewritten(path) as rates:
        before = len(rates)
        rates[:] = [rate for rate in rates if model not in (None, rate.model)]
        return before - len(rates)


@contextmanager
def _rewritten(path: Path) -> Iterator[list[MeasuredRate]]:
    """The benchmarks of a file, which are then written back; an empty file is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path):
        rates = read_rates(path)
        yield rates
        if rates:
            records = [rate.model_dump(mode="json") for rate in rates]
            write_text_atomically(path, json.dumps(records, indent=2) + "\n")
        else:
            path.unlink(missing_ok=True)
