"""What a benchmark found: the ladder as a file, what becomes of a rung, and two side by side."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from expert.core.errors import ExpertError
from expert.insight.ladder.pairs import Paired
from expert.insight.ladder.same_data import not_comparable
from expert.insight.record import RunRecord, read_run

FORMAT = 3
"""Version of the file; a reader refuses what is newer, and reads what is older. 2: rungs are timed
in turns with the one they are held against (`paired`), neighbours and threads are told. 3: whether
rows of one length stand together in a step (`clumping`)."""
MOST_CLUMPED = 2.0
"""Times the variance that chance gives the mean length of a step. Rows of 22 to 24 tokens, packed
longest first, have 15 of 16, and their best validation loss was 5 to 23 % worse; packed as they
come, 1.1. Of few steps chance alone makes more of it: five standard deviations are let pass."""
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
"""A sign and a word for what became of a rung."""
STAND = ("kept", "no difference")
"""What later rungs stand on."""


def outcome(rung: RungResult) -> str:
    """What became of a rung, and why, in words; empty for one that was kept."""
    return ": ".join(filter(None, (MARKS[rung.status][1], rung.because)))


class NoLadder(ExpertError):
    """A file or folder that is no result of a benchmark."""


class Facts(BaseModel):
    """A part of the file; what this version does not know is an error, so that nothing is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Measured(Facts):
    """What was seen of a rung. None is what could not be known."""

    tokens_per_second: float
    """Real tokens, padding does not count: the median over the windows."""
    windows: list[float]
    """Tokens a second of each window of updates."""
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
    """Updates before the first that was measured; the loss is that after `updates_learnt`."""
    updates_learnt: int
    compile_seconds: float | None
    loss: float | None
    """Of the held-out rows after `updates_learnt` updates, in the way all rungs are judged."""
    own_loss: float | None = None
    """The same weights and rows, computed as this rung trains; where that was asked for."""
    micro_batch: int
    accumulation: int
    fallbacks: list[str]
    clumping: float | None = None
    """Variance of the mean length of a step's rows over that of rows drawn at random; None where
    all rows are of one length, or where nobody looked."""
    others: float | None = None
    """Cores that processes of others used while it was timed: the median over the windows."""
    cores: int | None = None
    threads: int | None = None
    """Of a CPU; None on a card."""
    lowered: bool | None = None
    """Fewer threads than cores, because others used them when the climb began."""


class RungResult(Facts):
    """One rung: what it was, what came of it, and against what."""

    name: str
    adds: str
    status: Status
    because: str
    """Why it was left out, or what was measured where no difference was; empty for one that was
    kept."""
    changes: dict[str, tuple[Any, Any]]
    """What it does otherwise than the rung below, by path of the plan: before and after."""
    settings: dict[str, Any]
    plan_hash: str
    seconds: float
    """Wall time of the whole rung, start and evaluation included."""
    measured: Measured | None = None
    below: str | None = None
    """The rung it was held against."""
    gain: float | None = None
    """Times as fast as the rung below: the median of the pairs."""
    paired: Paired | None = None
    """How that was found; None in results of format 1, where rates of different minutes were
    divided."""
    cumulative: float | None = None
    """Times as fast as the baseline: the gains of the rungs up to it that were measured as faster,
    multiplied. Of the one that won it is what `against_baseline` of the ladder says, where that was
    measured."""
    loss_difference: float | None = None
    """From the rung below, as a share of its loss."""
    own_difference: float | None = None
    """Of its weights' loss computed in its own way from that in the common way; where the weights
    cannot be those of the rung below, this is what is held to the tolerance."""
    tolerance: float | None = None
    tolerance_because: str = ""
    same_rows: bool | None = None
    """Whether every update held the same rows as in the rung below."""


class Ladder(Facts):
    """A whole climb, with what it was climbed on."""

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
    rungs: list[RungResult]
    against_baseline: Paired | None = None
    """The one that won and the baseline, timed beside each other at the end."""
    doubts: list[str] = []
    """Why what won is not to be relied on: then no later plan uses it."""

    @property
    def kept(self) -> list[RungResult]:
        """The rungs that stand, from the bottom to the top."""
        return [rung for rung in self.rungs if rung.status in STAND]

    def as_text(self) -> str:
        """As it stands in a file."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"

    @property
    def winner(self) -> RungResult | None:
        return self.kept[-1] if self.kept else None

    @property
    def is_held_against_baseline(self) -> bool:
        """Whether what won was measured against the baseline, so that gains in all can be shown: a
        product alone may be far off."""
        seen = [rung for rung in self.rungs if rung.measured is not None]
        known = bool(seen) and all(rung.cumulative is not None for rung in seen)
        return known and self.against_baseline is not None

    @property
    def times_as_fast(self) -> tuple[float, float] | None:
        """What won against the baseline: twice the same where it was measured. A product of gains
        multiplies their errors, and rates are of different minutes: where there is nothing else,
        it lies about between the two."""
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
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        why = "there is no such file" if gone else error.strerror
        raise NoLadder(
            f"{file}: no result of expert benchmark: {why}  (name a {FILE}, or a run folder)"
        ) from None
    except ValueError as error:
        raise NoLadder(f"{file}: no result of expert benchmark: {error}") from None
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
            f"{path}: no result of expert benchmark: {where}: {first['msg']}  (name a {FILE})"
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
    """What becomes of a rung: what it learns from first, then its loss, then its speed.

    A rung that lays rows into other steps has other weights, and its loss cannot be held against
    that below: a step of rows of one length, which less is learnt from, would not show there. So
    the steps themselves are looked at.

    One that is faster beyond the spread of the pairs is kept, one that is slower beyond it is left
    out. Where no difference can be told it stays, as the rungs above are made for it and chance
    would decide otherwise; unless it costs memory or precision (`cost`), which nobody pays for
    nothing.
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
        return "slower", f"{paired.words} as fast as '{paired.against}', the last that stays"
    if found == "none":
        words = f"{paired.words} of '{paired.against}'"
        return ("no gain", f"{words}, and it {cost}") if cost else ("no difference", words)
    return "kept", ""


def rows_of_one_length(here: Measured) -> str:
    """Why less is learnt from the steps of a rung; "" where their rows are mixed as by chance."""
    if here.clumping is None:
        return ""
    rows = max(1.0, here.samples_per_second * here.seconds_per_epoch)
    steps = max(1.0, rows / max(1.0, here.examples_per_update))
    if here.clumping <= max(MOST_CLUMPED, 1 + 5 * math.sqrt(2 / steps)):
        return ""
    return (
        f"rows of one length share a step: their mean length varies {here.clumping:.1f} times as "
        "much as by chance, and less is learnt from such steps"
    )


def loss_difference(below: Measured, here: Measured) -> float | None:
    """How far the loss is from that of the rung below, as a share of it."""
    if here.loss is None or not below.loss or here.loss != here.loss:
        return None
    return (here.loss - below.loss) / abs(below.loss)


def own_difference(here: Measured) -> float | None:
    """How far the loss in the rung's own way is from that in the common way, as a share of it."""
    if here.own_loss is None or not here.loss or here.own_loss != here.own_loss:
        return None
    return (here.own_loss - here.loss) / abs(here.loss)


# --- two side by side ----------------------------------------------------------------------------

Compared = tuple[str, float | None, float | None, float | None]
"""What, the first, the second, and the second over the first."""


def compare(first: Path, second: Path) -> list[Compared]:
    """Two results of a benchmark rung by rung, or two run folders number by number."""
    are_runs = [(path / "events.jsonl").is_file() for path in (first, second)]
    if all(are_runs):
        pair = [_run_numbers(read_run(path)) for path in (first, second)]
    elif any(are_runs):
        raise NoLadder(
            f"--compare: {first} and {second} are not of one kind  (name two results or two runs)"
        )
    else:
        pair = [_ladder_numbers(read_ladder(path)) for path in (first, second)]
    names = [*pair[0], *(name for name in pair[1] if name not in pair[0])]
    return [(name, *_ratio(pair[0].get(name), pair[1].get(name))) for name in names]


def doubts_about(first: Path, second: Path) -> list[str]:
    """What speaks against comparing two results or two runs."""
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
    for rung in ladder.rungs:
        if rung.measured is not None:
            found[f"{rung.name}: tokens/s"] = rung.measured.tokens_per_second
            found[f"{rung.name}: loss"] = rung.measured.loss
    return found


def _run_numbers(run: RunRecord) -> dict[str, float | None]:
    """Medians over the step lines without the first quarter, and how it ended."""
    steps = run.of("step")
    late = steps[len(steps) // 4 :]

    def median(key: str) -> float | None:
        values = [float(e[key]) for e in late if isinstance(e.get(key), int | float)]
        return statistics.median(values) if values else None

    def numbers(event: str, key: str, split: str | None = None) -> list[float]:
        told = [e for e in run.of(event) if split in (None, e.get("split", "validation"))]
        return [float(e[key]) for e in told if isinstance(e.get(key), int | float)]

    def last(event: str, key: str, split: str | None = None) -> float | None:
        return next(reversed(numbers(event, key, split)), None)

    keys = (
        *("tokens_per_second", "samples_per_second", "steps_per_second", "mfu", "data_wait"),
        *("padding", "gpu_utilization", "peak_allocated_bytes", "cpu_peak_memory_bytes"),
        "power_watts",
    )
    found = {key.replace("_", " "): median(key) for key in keys}
    found["training loss"] = last("step", "loss")
    found["validation loss"] = last("eval", "loss", "validation")
    found["best validation loss"] = min(numbers("eval", "loss", "validation"), default=None)
    found["test loss"] = last("eval", "loss", "test")
    found["seconds"] = last("finished", "seconds")
    return {name: value for name, value in found.items() if value is not None}
