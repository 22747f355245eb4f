"""What a benchmark found: the ladder as a file, as Markdown, and two of them side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from expert.core.errors import ExpertError
from expert.insight.record import RunRecord, read_run
from expert.planning.ladder import AS_FAST

FORMAT = 1
"""Version of the file; a reader refuses what is newer."""
FILE = "ladder.json"

Status = Literal["kept", "slower", "disagrees", "failed", "not here"]
MARKS: dict[Status, tuple[str, str]] = {
    "kept": ("✓", ""),
    "slower": ("↓", "slower"),
    "disagrees": ("≠", "another loss"),
    "failed": ("✗", "failed"),
    "not here": ("–", ""),
}
"""A sign and a word for what became of a rung."""


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


class RungResult(Facts):
    """One rung: what it was, what came of it, and against what."""

    name: str
    adds: str
    status: Status
    because: str
    """Why it was left out; empty for one that was kept."""
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
    """Times as fast as the rung below."""
    cumulative: float | None = None
    """Times as fast as the baseline."""
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

    @property
    def kept(self) -> list[RungResult]:
        """The rungs that held, from the bottom to the top."""
        return [rung for rung in self.rungs if rung.status == "kept"]

    @property
    def winner(self) -> RungResult | None:
        return self.kept[-1] if self.kept else None


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


def spread_of(windows: Sequence[float]) -> float:
    """Distance of the quartiles; 0 for a single window."""
    if len(windows) < 2:
        return 0.0
    low, _, high = statistics.quantiles(windows, n=4, method="inclusive")
    return high - low


# --- judging -------------------------------------------------------------------------------------


def verdict(
    below: Measured, here: Measured, allowed: float, *, comparable: bool = True
) -> tuple[Status, str]:
    """Whether a rung holds against the one below: its loss first, then its speed."""
    difference = loss_difference(below, here) if comparable else own_difference(here)
    if difference is None and below.loss is not None:
        return "disagrees", "the loss on the held-out rows is not a number"
    if difference is not None and abs(difference) > allowed:
        way = "" if comparable else " when it is computed in this way"
        return "disagrees", f"the loss differs by {difference:+.2%}{way}, allowed is {allowed:.1%}"
    rate, before = here.tokens_per_second, below.tokens_per_second
    noise = max(AS_FAST * before, (here.spread + below.spread) / 2)
    if rate < before - noise:
        return "slower", f"{rate / before:.2f}x as fast as the rung below"
    return "kept", ""


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


# --- tables --------------------------------------------------------------------------------------

COLUMNS: tuple[str, ...] = (
    *("rung", "tokens/s", "±", "gain", "in all", "rows/s"),
    *("GPU", "memory", "MFU", "epoch", "loss", "off by", ""),
)


def table_rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """Every rung as one row of text in the order of COLUMNS."""
    return [_row(rung) for rung in ladder.rungs]


def _row(rung: RungResult) -> tuple[str, ...]:
    name, why = f"{MARKS[rung.status][0]} {rung.name}", outcome(rung)
    seen = rung.measured
    if seen is None:
        return (name, *("–",) * (len(COLUMNS) - 2), why)
    return (
        name,
        f"{seen.tokens_per_second:,.0f}",
        f"{seen.spread / seen.tokens_per_second:.1%}",
        f"{rung.gain:.2f}x" if rung.gain is not None else "–",
        f"{rung.cumulative:.2f}x" if rung.cumulative is not None else "–",
        f"{seen.samples_per_second:,.1f}",
        f"{seen.gpu_utilization:.0f} %" if seen.gpu_utilization is not None else "–",
        f"{seen.peak_memory_bytes / 2**30:.2f} GiB" if seen.peak_memory_bytes else "–",
        f"{seen.mfu:.1%}" if seen.mfu is not None else "–",
        _time(seen.seconds_per_epoch),
        f"{seen.loss:.4f}" if seen.loss is not None else "–",
        _off_by(rung),
        why,
    )


def _off_by(rung: RungResult) -> str:
    """How far the loss is off, and how far it may be; a star where it is held to itself."""
    difference, star = rung.loss_difference, ""
    if rung.own_difference is not None:
        difference, star = rung.own_difference, "*"
    if difference is None or rung.tolerance is None:
        return "–"
    return f"{difference:+.2%}{star} (±{rung.tolerance:.1%})"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def headline(ladder: Ladder) -> str:
    """One sentence: what the ladder came to."""
    won = ladder.winner
    if won is None or won.measured is None:
        return f"{ladder.name} on {ladder.card}: nothing could be measured"
    rate = f"{won.measured.tokens_per_second:,.0f} tokens/s"
    times = f", {won.cumulative:.1f} times the baseline" if won.cumulative is not None else ""
    agree = [rung for rung in ladder.kept if rung.loss_difference is not None]
    loss = f"; the loss agrees on all {len(agree)} rungs that were kept" if agree else ""
    return f"{ladder.name} on {ladder.card}: {rate}{times}{loss}"


def as_markdown(ladder: Ladder, *, level: int = 1) -> str:
    """The ladder as a document: sentence, table, and how it was measured."""
    rows = [COLUMNS, ("---", *("---:",) * (len(COLUMNS) - 2), "---"), *table_rows(ladder)]
    table = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    facts = [f"- {line}" for line in how_measured(ladder)]
    title = f"{'#' * level} {_cell(ladder.name)}: {_cell(ladder.model)} on {_cell(ladder.card)}"
    return "\n".join([title, "", f"{_cell(headline(ladder))}.", "", *table, "", *facts, ""])


def how_measured(ladder: Ladder) -> list[str]:
    """What a reader must know to believe the table, or to make it again."""
    versions = ladder.environment.get("versions") or {}
    named = [f"{name} {versions[name]}" for name in ("torch", "transformers") if versions.get(name)]
    first = next((rung.measured for rung in ladder.rungs if rung.measured), None)
    learnt = first.updates_learnt if first else 0
    return [
        f"{ladder.date}, `{ladder.command}`, expert {ladder.version}, {', '.join(named)}",
        f"{ladder.dataset}: {ladder.training_rows:,} rows, {ladder.examples_per_update} to an "
        f"update on every rung, at most {ladder.max_seq_length} tokens each; {ladder.adapter}",
        "tokens/s: real tokens (no padding), median over windows of updates after warm-up, clock "
        "stopped outside the steps; ± is the distance of the quartiles",
        f"loss: {ladder.held_out_rows:,} held-out rows ({ladder.held_out_tokens:,} tokens) after "
        f"{learnt} updates from the same start, evaluated in one way; off by: from the rung below, "
        "in brackets what is allowed",
        *(
            f"* {rung.name}: {rung.tolerance_because}, to its weights' loss computed as it trains"
            for rung in ladder.rungs
            if rung.own_difference is not None
        ),
        *ladder.notes,
    ]


def _cell(text: str) -> str:
    """Text that stays inside its cell, whatever a name holds."""
    plain = " ".join(text.replace("|", "\\|").split())
    return plain.replace("<", "&lt;")


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

    def last(event: str, key: str) -> float | None:
        values = [e[key] for e in run.of(event) if isinstance(e.get(key), int | float)]
        return float(values[-1]) if values else None

    keys = (
        *("tokens_per_second", "samples_per_second", "mfu", "data_wait", "padding"),
        *("gpu_utilization", "peak_allocated_bytes", "power_watts"),
    )
    found = {key.replace("_", " "): median(key) for key in keys}
    found["training loss"] = last("step", "mean_loss")
    found["validation loss"] = last("eval", "loss")
    found["seconds"] = last("finished", "seconds")
    return {name: value for name, value in found.items() if value is not None}
