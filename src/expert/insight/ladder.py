"""The result of a benchmark: its file, the status of each setting, when not to trust it, and all of
it in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from expert.core.errors import ExpertError
from expert.core.stored_json import read_stored_json
from expert.core.text import counted, duration

FORMAT = 5
"""File version; newer files are refused."""
FILE = "ladder.json"
EQUAL_WITHIN = 0.02
"""Rates closer than this count as equal: a shared machine is not steadier."""
MAX_SPREAD = 0.25
"""Interquartile range as a share of the rate; beyond it the median means nothing. A host with other
work had 5 to 15 %, two cores with three processes on them 20 to 60 %."""
MAX_DRIFT = 0.1
"""Change of the baseline's rate from the start to the end of the benchmark."""

Status = Literal["kept", "no difference", "slower", "disagrees", "failed", "not here", "no time"]
MARKS: dict[Status, tuple[str, str]] = {
    "kept": ("✓", ""),
    "no difference": ("=", "no difference measured, stays"),
    "slower": ("↓", "slower"),
    "disagrees": ("≠", "another loss"),
    "failed": ("✗", "failed"),
    "not here": ("–", "does not apply"),
    "no time": ("–", "not measured"),
}
"""A sign and a word for each status."""
KEPT_STATUSES = ("kept", "no difference")
"""Statuses that later settings build on."""
COLUMNS: tuple[str, ...] = (
    *("setting", "tokens/s", "±", "gain", "in all", "rows/s"),
    *("GPU", "memory", "MFU", "epoch", "loss", "off by", ""),
)
UNKNOWN = "–"


class LadderModel(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Measured(LadderModel):
    """Measurements of a setting; None where something could not be measured."""

    tokens_per_second: float
    """Real tokens without padding; the median over windows of steps."""
    spread: float
    """Interquartile range of the windows, in tokens per second."""
    samples_per_second: float
    seconds_per_epoch: float
    gpu_utilization: float | None
    peak_memory_bytes: int | None
    mfu: float | None
    updates_learnt: int
    """Steps that the loss is taken over, the same for all settings."""
    loss: float | None
    """Training loss of the first `updates_learnt` steps."""
    micro_batch: int

    @property
    def relative_spread(self) -> float:
        return self.spread / self.tokens_per_second if self.tokens_per_second else 0.0


class SettingResult(LadderModel):
    """One setting: what it changes, its result, and what it gained."""

    name: str
    adds: str
    status: Status
    because: str
    """Why it was left out, or the measured ratio where there was no difference; empty if kept."""
    changes: dict[str, tuple[Any, Any]] = {}
    """Differences from the last kept setting, by plan path: before and after."""
    seconds: float = 0.0
    """Wall time of the whole setting, including start."""
    measured: Measured | None = None
    gain: float | None = None
    """Speedup over the last kept setting."""
    cumulative: float | None = None
    """Speedup over the baseline."""
    loss_difference: float | None = None
    """Relative to the loss of the last kept setting."""
    tolerance: float | None = None
    """None if the losses cannot be compared."""

    @property
    def outcome(self) -> str:
        """Why it has its status, in words; empty if it was kept."""
        return ": ".join(filter(None, (MARKS[self.status][1], self.because)))


class Ladder(LadderModel):
    """A whole benchmark, with what it was measured on."""

    format: int = FORMAT
    kind: Literal["ladder"] = "ladder"
    name: str
    date: str
    command: str
    version: str
    card: str
    device: str
    model: str
    adapter: str
    dataset: str
    training_rows: int
    max_seq_length: int
    examples_per_update: int
    seconds: float
    environment: dict[str, Any]
    notes: list[str]
    rungs: list[SettingResult]
    drift: float | None = None
    """The baseline's rate at the end, relative to its rate at the start, minus 1."""
    doubts: list[str] = []
    """Why the best cannot be trusted; if any, no later plan uses it."""

    @property
    def kept(self) -> list[SettingResult]:
        """The kept settings, from the baseline on."""
        return [setting for setting in self.rungs if setting.status in KEPT_STATUSES]

    @property
    def winner(self) -> SettingResult | None:
        return self.kept[-1] if self.kept else None

    @property
    def is_compared_with_baseline(self) -> bool:
        """Whether the speed of every measured setting is known relative to the baseline."""
        seen = [setting for setting in self.rungs if setting.measured is not None]
        return bool(seen) and all(setting.cumulative is not None for setting in seen)

    def as_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def read_ladder(path: Path) -> Ladder:
    """The result in a file, or in a folder that contains one."""
    file = path / FILE if path.is_dir() else path
    refused = f"{file}: not a result of expert benchmark"
    try:
        found = Ladder.model_validate(read_stored_json(file))
    except OSError as error:
        raise ExpertError(f"{refused}: {error.strerror}  (name a {FILE}, or a folder)") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ExpertError(f"{refused}: {where}: {first['msg']}  (name a {FILE})") from None
    except ValueError as error:
        raise ExpertError(f"not a result of expert benchmark: {error}") from None
    if found.format > FORMAT:
        raise ExpertError(
            f"{file}: is of format {found.format}, newer than {FORMAT}  (update expert)"
        )
    return found


# --- judging -------------------------------------------------------------------------------------


def verdict(below: Measured, here: Measured, *, tolerance: float | None) -> tuple[Status, str]:
    """The status of a setting: judged by its loss first, then by its speed.

    Slower beyond the spread of the windows is left out. Without a measured difference it stays:
    later settings build on it, and otherwise chance would decide. `tolerance`: None if the weights
    cannot be the same, so that the losses are only shown.
    """
    if here.loss is None and below.loss is not None:
        return "disagrees", "the loss is not a number"
    apart = loss_difference(here.loss, below.loss)
    if apart is not None and tolerance is not None and abs(apart) > tolerance:
        return "disagrees", f"the loss differs by {apart:+.2%}, allowed is {tolerance:.1%}"
    gain = here.tokens_per_second / below.tokens_per_second
    noise = max(EQUAL_WITHIN, math.hypot(here.relative_spread, below.relative_spread))
    if gain - noise > 1:
        return "kept", ""
    words = f"{gain:.2f}x ± {noise:.2f} as fast as the last kept setting"
    return ("slower" if gain + noise < 1 else "no difference"), words


def loss_difference(loss: float | None, reference: float | None) -> float | None:
    """Relative to the other loss; None if one of them is unknown."""
    if loss is None or not reference or loss != loss:
        return None
    return (loss - reference) / abs(reference)


def doubts_of(ladder: Ladder) -> list[str]:
    """Why the best must not be used for later plans; empty if it may be."""
    found, best = [], ladder.winner
    if ladder.drift is not None and abs(ladder.drift) > MAX_DRIFT:
        found.append(f"the baseline's rate changed by {ladder.drift:+.0%} meanwhile")
    if best is not None and best.measured is not None:
        width = best.measured.relative_spread
        if width > MAX_SPREAD:
            found.append(f"windows of '{best.name}' are {width:.0%} apart")
        noise = max(EQUAL_WITHIN, width)
        if best.gain is not None and best.cumulative and abs(best.cumulative - 1) <= noise:
            found.append(f"no difference from the baseline was measured: {best.cumulative:.2f}x")
    return found


# --- in words ------------------------------------------------------------------------------------


def table_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """One row of text per setting, in the order of COLUMNS."""

    def written(form: str, value: float | None) -> str:
        return form.format(value) if value is not None else UNKNOWN

    rows: list[tuple[str, ...]] = []
    for setting in ladder.rungs:
        name, seen = f"{MARKS[setting.status][0]} {setting.name}", setting.measured
        if seen is None:
            rows.append((name, *(UNKNOWN,) * (len(COLUMNS) - 2), setting.outcome))
            continue
        off = written("{:+.2%}", setting.loss_difference)
        if setting.loss_difference is not None:
            off += "*" if setting.tolerance is None else f" (±{setting.tolerance:.1%})"
        memory = seen.peak_memory_bytes
        rows.append((
            name,
            f"{seen.tokens_per_second:,.0f}",
            f"{seen.relative_spread:.1%}",
            written("{:.2f}x", setting.gain),
            written("{:.2f}x", setting.cumulative),
            f"{seen.samples_per_second:,.1f}",
            written("{:.0f} %", seen.gpu_utilization),
            written("{:.2f} GiB", memory / 2**30 if memory else None),
            written("{:.1%}", seen.mfu),
            duration(seen.seconds_per_epoch),
            written("{:.4f}", seen.loss),
            off,
            setting.outcome,
        ))  # fmt: skip
    return rows


def headline(ladder: Ladder) -> str:
    """The result in one sentence."""
    won = ladder.winner
    if won is None or won.measured is None:
        return f"{ladder.name} on {ladder.card}: nothing could be measured"
    words = f"{ladder.name} on {ladder.card}: {won.measured.tokens_per_second:,.0f} tokens/s"
    if won.cumulative is not None:
        words += f", {won.cumulative:.1f} times the baseline"
    same = sum(setting.tolerance is not None for setting in ladder.kept)
    if same:
        words += f"; the loss agrees on {counted(same, 'kept setting')} that can be compared"
    return f"{words}; noisy, do not trust" if ladder.doubts else words


def how_measured(ladder: Ladder) -> list[str]:
    """What a reader needs to trust the table, or to reproduce it."""
    versions = ladder.environment.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    steps = next((setting.measured.updates_learnt for setting in ladder.rungs
                  if setting.measured), 0)  # fmt: skip
    drift = "the baseline was not measured again at the end"
    if ladder.drift is not None:
        drift = f"measured again at the end, the baseline's rate had changed by {ladder.drift:+.1%}"
    return [
        *(f"noisy, do not trust: {doubt}" for doubt in ladder.doubts),
        f"{ladder.date}, `{ladder.command}`, expert {ladder.version}, {', '.join(named)}",
        f"{ladder.dataset}: {ladder.training_rows:,} rows, {ladder.examples_per_update} a step in "
        f"every setting, at most {ladder.max_seq_length} tokens each; {ladder.adapter}",
        "tokens/s: real tokens (no padding), median over windows of steps after warm-up, one short "
        "run for each setting; ± is the distance of the quartiles",
        f"gain: over the last kept setting; in all: over the baseline; {drift}",
        f"loss: of the first {steps} steps from the same start; off by: from the last kept "
        "setting, in brackets the tolerance; * where other rows share a step or dropout draws "
        "other numbers, so that the weights differ and the loss is only shown",
        *ladder.notes,
    ]
