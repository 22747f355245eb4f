"""The result of a benchmark: its file, the status of each setting, and when not to trust it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from expert.core.errors import ExpertError
from expert.core.stored_json import read_stored_json
from expert.core.text import counted
from expert.insight.findings.evidence import CROWDED_CORES
from expert.insight.ladder.pairs import Paired

FORMAT = 3
"""File version; newer files are refused, older ones are read. 2: settings are timed in turns with
the one they are compared with (`paired`); other processes and threads are recorded. 3: whether rows
of one length share a step (`clumping`)."""
MAX_CLUMPING = 2.0
"""Allowed ratio of the variance of a step's mean row length to that of random batches. Rows of 22
to 24 tokens, packed longest first, have 15 of 16, and their best validation loss was 5 to 23 %
worse; packed in order, 1.1. With few steps chance alone gives more, so five standard deviations are
allowed."""
MAX_SPREAD = 0.25
"""Interquartile range as a share of the rate; beyond it the median means nothing. A host with other
work had 5 to 15 %, two cores with three processes on them 20 to 60 %."""
HOST_CORES = 2
"""Cores that a GPU run needs: one launches, one makes batches."""
FILE = "ladder.json"

Status = Literal[
    "kept", "no difference", "no gain", "slower", "disagrees", "failed", "not here", "no time"
]
MARKS: dict[Status, tuple[str, str]] = {
    "kept": ("✓", ""),
    "no difference": ("=", "no difference measured, stays"),
    "no gain": ("≈", "no difference measured, left out"),
    "slower": ("↓", "slower"),
    "disagrees": ("≠", "another loss"),
    "failed": ("✗", "failed"),
    "not here": ("–", "does not apply"),
    "no time": ("–", "not measured by itself"),
}
"""A sign and a word for each status."""
KEPT_STATUSES = ("kept", "no difference")
"""Statuses that later settings build on."""


def outcome(setting: SettingResult) -> str:
    """Why a setting has its status, in words; empty if it was kept."""
    return ": ".join(filter(None, (MARKS[setting.status][1], setting.because)))


class LadderError(ExpertError):
    """A file or folder that is not a benchmark result."""


class LadderModel(BaseModel):
    """A part of the file; unknown keys are errors, so that nothing is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Measured(LadderModel):
    """Measurements of a setting; None where something could not be measured."""

    tokens_per_second: float
    """Real tokens without padding; the median over the windows."""
    windows: list[float]
    """Tokens per second in each window of steps."""
    spread: float
    """Interquartile range of the windows, in tokens per second."""
    samples_per_second: float
    seconds_per_update: float
    seconds_per_epoch: float
    gpu_utilization: float | None
    peak_memory_bytes: int | None
    mfu: float | None
    mfu_because: str
    padding: float | None
    data_wait: float | None
    examples_per_update: float
    updates_measured: int
    updates_before: int
    """Steps before the first measured one; `loss` is the loss after `updates_learnt`."""
    updates_learnt: int
    compile_seconds: float | None
    loss: float | None
    """On the held-out rows after `updates_learnt` steps, evaluated alike for all settings."""
    own_loss: float | None = None
    """The loss of the same weights and rows, computed as this setting trains, where needed."""
    micro_batch: int
    accumulation: int
    fallbacks: list[str]
    clumping: float | None = None
    """Variance of the mean row length of a step over that of rows drawn at random; None if all rows
    have one length, or in older results."""
    others: float | None = None
    """Cores that other processes used while it was timed; the median over the windows."""
    cores: int | None = None
    threads: int | None = None
    """CPU threads; None on a card."""
    lowered: bool | None = None
    """Fewer threads than cores, because other processes used the cores at the start."""


class SettingResult(LadderModel):
    """One setting: what it changes, its result, and what it was compared with."""

    name: str
    adds: str
    status: Status
    because: str
    """Why it was left out, or the measured ratio where there was no difference; empty if kept."""
    changes: dict[str, tuple[Any, Any]]
    """Differences from the setting below, by plan path: before and after."""
    settings: dict[str, Any]
    plan_hash: str
    seconds: float
    """Wall time of the whole setting, including start and evaluation."""
    measured: Measured | None = None
    below: str | None = None
    """The setting it was compared with."""
    gain: float | None = None
    """Speedup over the setting below: the median of the pairs."""
    paired: Paired | None = None
    """How the gain was measured; None in format 1, which divided rates of different minutes."""
    cumulative: float | None = None
    """Speedup over the baseline: the product of the gains of all settings up to this one that were
    measured as faster. For the best it is the ladder's `against_baseline`, where measured."""
    loss_difference: float | None = None
    """Relative to the loss of the setting below."""
    own_difference: float | None = None
    """Difference between the loss computed as this setting trains and the common evaluation, for
    the same weights. Where the weights cannot match those of the setting below, this is checked
    against the tolerance instead."""
    tolerance: float | None = None
    tolerance_because: str = ""
    same_rows: bool | None = None
    """Whether every step had the same rows as in the setting below."""


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
    parameters: int | None
    adapter: str
    quantization: str
    dataset: str
    training_rows: int
    max_seq_length: int
    examples_per_update: int
    held_out_rows: int
    held_out_tokens: int
    quick: bool
    seconds: float
    environment: dict[str, Any]
    notes: list[str]
    rungs: list[SettingResult]
    against_baseline: Paired | None = None
    """The best and the baseline, compared directly at the end."""
    doubts: list[str] = []
    """Why the best cannot be trusted; if any, no later plan uses it."""

    @property
    def kept(self) -> list[SettingResult]:
        """The kept settings, from the baseline on."""
        return [setting for setting in self.rungs if setting.status in KEPT_STATUSES]

    def as_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"

    @property
    def winner(self) -> SettingResult | None:
        return self.kept[-1] if self.kept else None

    @property
    def is_compared_with_baseline(self) -> bool:
        """Whether the best was compared with the baseline directly; without that, products of gains
        may be far off and are not shown."""
        seen = [setting for setting in self.rungs if setting.measured is not None]
        known = bool(seen) and all(setting.cumulative is not None for setting in seen)
        return known and self.against_baseline is not None

    @property
    def speedup_range(self) -> tuple[float, float] | None:
        """Speedup of the best over the baseline, as a range; both ends are equal if it was measured
        directly. Otherwise it lies between the product of the gains, which multiplies their errors,
        and the ratio of rates taken at different times."""
        won, base = self.winner, next((r for r in self.rungs if r.cumulative == 1.0), None)
        if won is None or won.cumulative is None or won.measured is None:
            return None
        measured = self.against_baseline is not None or won is base or won.paired is None
        if measured or base is None or base.measured is None or won.below == base.name:
            return won.cumulative, won.cumulative
        rates = won.measured.tokens_per_second / base.measured.tokens_per_second
        return min(rates, won.cumulative), max(rates, won.cumulative)


def read_ladder(path: Path) -> Ladder:
    """The result in a file, or in a folder that contains one."""
    file = path / FILE if path.is_dir() else path
    try:
        data = read_stored_json(file)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        why = "there is no such file" if gone else error.strerror
        raise LadderError(
            f"{file}: not a result of expert benchmark: {why}  (name a {FILE}, or a run folder)"
        ) from None
    except ValueError as error:
        raise LadderError(f"not a result of expert benchmark: {error}") from None
    newer = isinstance(data, dict) and isinstance(data.get("format"), int)
    if newer and data["format"] > FORMAT:
        raise LadderError(
            f"{path}: is of format {data['format']}, newer than {FORMAT}  (update expert)"
        )
    try:
        return Ladder.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise LadderError(
            f"{path}: not a result of expert benchmark: {where}: {first['msg']}  (name a {FILE})"
        ) from None


# --- judging -------------------------------------------------------------------------------------


def verdict(
    below: Measured,
    here: Measured,
    allowed: float,
    *,
    paired: Paired,
    cost: str = "",
    comparable: bool = True,
) -> tuple[Status, str]:
    """The status of a setting: judged by its batches first, then its loss, then its speed.

    A setting that puts different rows into a step ends up with different weights, so its loss
    cannot be compared with the one below. Steps whose rows all have one length train worse, and
    the loss would not show it, so the batches themselves are checked.

    A setting that is faster beyond the spread of the pairs is kept, one that is slower beyond it is
    left out. Without a measured difference it stays: later settings build on it, and otherwise
    chance would decide. The exception is a setting that costs memory or precision (`cost`).
    """
    if clumped := rows_of_one_length(here):
        return "disagrees", clumped
    pair = (here.loss, below.loss) if comparable else (here.own_loss, here.loss)
    apart = difference(*pair)
    if apart is None and below.loss is not None:
        return "disagrees", "the loss on the held-out rows is not a number"
    if apart is not None and abs(apart) > allowed:
        way = "" if comparable else " when it is computed in this way"
        return "disagrees", f"the loss differs by {apart:+.2%}{way}, allowed is {allowed:.1%}"
    found = paired.difference
    if found == "slower":
        return "slower", f"{paired.words} as fast as '{paired.against}', the last kept setting"
    if found == "none":
        words = f"{paired.words} of '{paired.against}'"
        return ("no gain", f"{words}, and it {cost}") if cost else ("no difference", words)
    return "kept", ""


def rows_of_one_length(here: Measured) -> str:
    """Why the steps of a setting train worse; "" if their rows are mixed as well as by chance."""
    if here.clumping is None:
        return ""
    rows = max(1.0, here.samples_per_second * here.seconds_per_epoch)
    steps = max(1.0, rows / max(1.0, here.examples_per_update))
    if here.clumping <= max(MAX_CLUMPING, 1 + 5 * math.sqrt(2 / steps)):
        return ""
    return (
        f"rows of one length share a step: their mean length varies {here.clumping:.1f} times as "
        "much as by chance, and such steps train less"
    )


def difference(loss: float | None, reference: float | None) -> float | None:
    """Relative to the other loss; None if one of them is unknown."""
    if loss is None or not reference or loss != loss:
        return None
    return (loss - reference) / abs(reference)


# --- trusting it ---------------------------------------------------------------------------------


def crowded(seen: Measured) -> str:
    """How other processes slowed a setting down; empty if they did not, or if that is unknown.

    The same rule as for runs: together they needed more cores than there are.
    """
    if seen.others is None or not seen.cores:
        return ""
    if seen.lowered:
        threads = counted(seen.threads or 1, "thread")
        return (
            f"other processes use so much of the {seen.cores} cores that only {threads} could run"
        )
    needed = min(seen.threads or HOST_CORES, seen.cores)
    if needed + seen.others <= seen.cores + CROWDED_CORES:
        return ""
    return f"other processes used {seen.others:.1f} of {seen.cores} cores meanwhile"


def doubts_of(ladder: Ladder) -> list[str]:
    """Why the best must not be used for later plans; empty if it may be."""
    seen = [setting.measured for setting in ladder.rungs if setting.measured is not None]
    busy = sorted((one for one in seen if crowded(one)), key=lambda one: one.others or 0.0)
    found = [crowded(busy[(len(busy) - 1) // 2])] if busy and 2 * len(busy) >= len(seen) else []
    best, direct = ladder.winner, ladder.against_baseline
    if best is not None and best.measured is not None:
        width = best.measured.spread / best.measured.tokens_per_second
        if width > MAX_SPREAD:
            found.append(f"windows of '{best.name}' are {width:.0%} apart")
    if direct is not None and direct.difference == "none":
        found.append(f"no difference from the baseline was measured: {direct.words}")
    return found
