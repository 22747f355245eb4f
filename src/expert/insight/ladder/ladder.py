"""What a benchmark found: the ladder as a file, what becomes of a setting, and when to trust it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from expert.core.errors import ExpertError
from expert.core.files import read_json
from expert.core.text import counted
from expert.insight.findings.evidence import CROWDED_CORES
from expert.insight.ladder.pairs import Paired

FORMAT = 3
"""Version of the file; a reader refuses what is newer, and reads what is older. 2: settings are
timed in turns with the one they are compared with (`paired`); other processes and threads. 3:
whether rows of one length share a step (`clumping`)."""
MOST_CLUMPED = 2.0
"""Times the variance that chance gives the mean length of a step. Rows of 22 to 24 tokens, packed
longest first, have 15 of 16, and their best validation loss was 5 to 23 % worse; packed as they
come, 1.1. Of few steps chance alone makes more of it: five standard deviations are tolerated."""
TOO_WIDE = 0.25
"""Distance of the quartiles as a share of the rate: beyond it the median means nothing. A host with
other work had 5 to 15 %, two cores with three processes on them 20 to 60 %."""
HOST_CORES = 2
"""What a run on a card needs of the host: one core launches, one makes batches."""
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
    "not here": ("–", ""),
    "no time": ("–", "not measured by itself"),
}
"""A sign and a word for what became of a setting."""
STAND = ("kept", "no difference")
"""What later settings build on."""


def outcome(setting: SettingResult) -> str:
    """What became of a setting, and why, in words; empty for one that was kept."""
    return ": ".join(filter(None, (MARKS[setting.status][1], setting.because)))


class NoLadder(ExpertError):
    """A file or folder that is not a result of a benchmark."""


class Facts(BaseModel):
    """A part of the file; an unknown key is an error, so that nothing is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Measured(Facts):
    """What was measured of a setting; None is what could not be known."""

    tokens_per_second: float
    """Real tokens, padding does not count: the median over the windows."""
    windows: list[float]
    """Tokens a second of each window of steps."""
    spread: float
    """Distance of the quartiles of the windows, tokens a second."""
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
    """Steps before the first that was measured; the loss is that after `updates_learnt`."""
    updates_learnt: int
    compile_seconds: float | None
    loss: float | None
    """Of the held-out rows after `updates_learnt` steps, in the way all settings are judged."""
    own_loss: float | None = None
    """The same weights and rows, computed as this setting trains, where that was needed."""
    micro_batch: int
    accumulation: int
    fallbacks: list[str]
    clumping: float | None = None
    """Variance of the mean length of a step's rows over that of rows drawn at random; None where
    all rows are of one length, or in older results."""
    others: float | None = None
    """Cores that other processes used while it was timed: the median over the windows."""
    cores: int | None = None
    threads: int | None = None
    """Of a CPU; None on a card."""
    lowered: bool | None = None
    """Fewer threads than cores, because other processes used them at the start."""


class SettingResult(Facts):
    """One setting: what it was, what came of it, and against what."""

    name: str
    adds: str
    status: Status
    because: str
    """Why it was left out, or what was measured where no difference was; empty for one that was
    kept."""
    changes: dict[str, tuple[Any, Any]]
    """What differs from the setting below, by path of the plan: before and after."""
    settings: dict[str, Any]
    plan_hash: str
    seconds: float
    """Wall time of the whole setting, start and evaluation included."""
    measured: Measured | None = None
    below: str | None = None
    """The setting it was compared with."""
    gain: float | None = None
    """Times as fast as the setting below: the median of the pairs."""
    paired: Paired | None = None
    """How that was found; None in results of format 1, which divided rates of different minutes."""
    cumulative: float | None = None
    """Times as fast as the baseline: the gains of the settings up to it that were measured as
    faster, multiplied. Of the best it is what `against_baseline` of the ladder says, where that was
    measured."""
    loss_difference: float | None = None
    """From the setting below, as a share of its loss."""
    own_difference: float | None = None
    """Of its weights' loss computed in its own way from that in the common way; where the weights
    cannot be those of the setting below, this is what must be within the tolerance."""
    tolerance: float | None = None
    tolerance_because: str = ""
    same_rows: bool | None = None
    """Whether every step held the same rows as in the setting below."""


class Ladder(Facts):
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
    """Why the best cannot be trusted: then no later plan uses it."""

    @property
    def kept(self) -> list[SettingResult]:
        """The settings that are kept, from the baseline on."""
        return [setting for setting in self.rungs if setting.status in STAND]

    def as_text(self) -> str:
        """As it is in a file."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"

    @property
    def winner(self) -> SettingResult | None:
        return self.kept[-1] if self.kept else None

    @property
    def is_held_against_baseline(self) -> bool:
        """Whether the best was compared with the baseline directly, so that gains in all can be
        shown: a product alone may be far off."""
        seen = [setting for setting in self.rungs if setting.measured is not None]
        known = bool(seen) and all(setting.cumulative is not None for setting in seen)
        return known and self.against_baseline is not None

    @property
    def times_as_fast(self) -> tuple[float, float] | None:
        """The best against the baseline: twice the same where it was measured. A product of gains
        multiplies their errors, and rates are of different minutes: where there is nothing else,
        it lies between the two."""
        won, base = self.winner, next((r for r in self.rungs if r.cumulative == 1.0), None)
        if won is None or won.cumulative is None or won.measured is None:
            return None
        measured = self.against_baseline is not None or won is base or won.paired is None
        if measured or base is None or base.measured is None or won.below == base.name:
            return won.cumulative, won.cumulative
        rates = won.measured.tokens_per_second / base.measured.tokens_per_second
        return min(rates, won.cumulative), max(rates, won.cumulative)


def read_ladder(path: Path) -> Ladder:
    """The result in a file, or in a folder that holds one."""
    file = path / FILE if path.is_dir() else path
    try:
        data = read_json(file)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        why = "there is no such file" if gone else error.strerror
        raise NoLadder(
            f"{file}: not a result of expert benchmark: {why}  (name a {FILE}, or a run folder)"
        ) from None
    except ValueError as error:
        raise NoLadder(f"{file}: not a result of expert benchmark: {error}") from None
    newer = isinstance(data, dict) and isinstance(data.get("format"), int)
    if newer and data["format"] > FORMAT:
        raise NoLadder(
            f"{path}: is of format {data['format']}, newer than {FORMAT}  (update expert)"
        )
    try:
        return Ladder.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise NoLadder(
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
    """What becomes of a setting: judged by its steps first, then its loss, then its speed.

    A setting that puts other rows into a step has other weights, and its loss cannot be compared:
    a step of rows of one length, which trains less, would not show there. So the steps themselves
    are looked at.

    One that is faster beyond the spread of the pairs is kept, one that is slower beyond it is left
    out. Without a measured difference it stays, as later settings are made for it and chance would
    decide otherwise; unless it costs memory or precision (`cost`), which nobody pays for nothing.
    """
    if clumped := rows_of_one_length(here):
        return "disagrees", clumped
    difference = loss_difference(below, here) if comparable else own_difference(here)
    if difference is None and below.loss is not None:
        return "disagrees", "the loss on the held-out rows is not a number"
    if difference is not None and abs(difference) > allowed:
        way = "" if comparable else " when it is computed in this way"
        return "disagrees", f"the loss differs by {difference:+.2%}{way}, allowed is {allowed:.1%}"
    found = paired.difference
    if found == "slower":
        return "slower", f"{paired.words} as fast as '{paired.against}', the last that is kept"
    if found == "none":
        words = f"{paired.words} of '{paired.against}'"
        return ("no gain", f"{words}, and it {cost}") if cost else ("no difference", words)
    return "kept", ""


def rows_of_one_length(here: Measured) -> str:
    """Why the steps of a setting train less; "" where their rows are mixed as by chance."""
    if here.clumping is None:
        return ""
    rows = max(1.0, here.samples_per_second * here.seconds_per_epoch)
    steps = max(1.0, rows / max(1.0, here.examples_per_update))
    if here.clumping <= max(MOST_CLUMPED, 1 + 5 * math.sqrt(2 / steps)):
        return ""
    return (
        f"rows of one length share a step: their mean length varies {here.clumping:.1f} times as "
        "much as by chance, and such steps train less"
    )


def loss_difference(below: Measured, here: Measured) -> float | None:
    """How far the loss is from that of the setting below, as a share of it."""
    if here.loss is None or not below.loss or here.loss != here.loss:
        return None
    return (here.loss - below.loss) / abs(below.loss)


def own_difference(here: Measured) -> float | None:
    """How far the loss computed as the setting trains is from the common one, as a share of it."""
    if here.own_loss is None or not here.loss or here.own_loss != here.own_loss:
        return None
    return (here.own_loss - here.loss) / abs(here.loss)


# --- trusting it ---------------------------------------------------------------------------------


def crowded(seen: Measured) -> str:
    """How other processes slowed a setting down; empty where they did not, or where it is unknown.

    The rule is that of runs: together they had more to do than there are cores.
    """
    if seen.others is None or not seen.cores:
        return ""
    if seen.lowered:
        threads = counted(seen.threads or 1, "thread")
        return f"other processes use so much of the {seen.cores} cores that {threads} had to do"
    needed = min(seen.threads or HOST_CORES, seen.cores)
    if needed + seen.others <= seen.cores + CROWDED_CORES:
        return ""
    return f"other processes used {seen.others:.1f} of {seen.cores} cores meanwhile"


def doubts_of(ladder: Ladder) -> list[str]:
    """Why the best must not settle later plans; empty where it may."""
    seen = [setting.measured for setting in ladder.rungs if setting.measured is not None]
    busy = sorted((one for one in seen if crowded(one)), key=lambda one: one.others or 0.0)
    found = [crowded(busy[(len(busy) - 1) // 2])] if busy and 2 * len(busy) >= len(seen) else []
    best, direct = ladder.winner, ladder.against_baseline
    if best is not None and best.measured is not None:
        width = best.measured.spread / best.measured.tokens_per_second
        if width > TOO_WIDE:
            found.append(f"windows of '{best.name}' are {width:.0%} apart")
    if direct is not None and direct.difference == "none":
        found.append(f"no difference from the baseline was measured: {direct.words}")
    return found
