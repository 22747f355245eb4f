"""How the run learnt and how fast it was: losses, rates, the card, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from expert.core.text import percent, span
from expert.insight.page.blocks import (
    Block,
    Figure,
    LineChart,
    Point,
    Section,
    Segment,
    Series,
    StackChart,
    Unit,
    WideBar,
    Words,
)
from expert.insight.page.facts import RunFacts, number
from expert.insight.page.scales import smoothed

LOG_FROM = 30.0
"""Values that span more than this factor are drawn on a logarithmic axis."""
MIN_SMOOTHED = 20
"""Fewer points are readable as they are."""


def learning(run: RunFacts) -> Section:
    """The curves of the loss and of what drives it."""
    figures = [figure for figure in (_loss(run), _evals(run), _rate(run), _norm(run)) if figure]
    nothing = Words(text="No update was logged, so there is nothing to draw.", tone="note")
    return Section(name="learning", title="Learning", inside=tuple(figures) or (nothing,))


def _loss(run: RunFacts) -> Figure | None:
    raw = run.points("loss")
    if not has_values(raw):
        return None
    series = [Series(name="loss", points=raw, colour=1)]
    note = look = ""
    if len(raw) >= MIN_SMOOTHED:
        weights = [value or 1.0 for value in run.column("targets")]
        series = [
            Series(name="loss as it was logged", points=raw, colour=1, look="faint"),
            Series(name="training, smoothed", points=smoothed(raw, weights), colour=1),
        ]
        look = "Faint: the log lines, each the mean since the one before."
        note = "The smoothed line weighs every log line by its tokens."
    evals = [(float(e["step"]), number(e.get("loss"))) for e in run.evals()]
    if has_values(evals):
        series.append(Series(name="validation", points=evals, colour=2, look="dots"))
    chart = LineChart(series=tuple(series), log=spans_far([p for s in series for p in s.points]))
    return Figure(name="loss", title="Loss", chart=chart, note=note, look=look, wide=True)


def _evals(run: RunFacts) -> Figure | None:
    points = [(float(e["step"]), number(e.get("token_accuracy"))) for e in run.evals()]
    if not has_values(points):
        return None
    series = Series(name="tokens right", points=points, colour=2, look="dots")
    title = "Validation tokens predicted right"
    return Figure(name="accuracy", title=title, chart=LineChart(series=(series,), unit="percent"))


def _rate(run: RunFacts) -> Figure | None:
    """Without updates that were undone and passed over: their rate was that before the rollback."""
    points = [
        (step, rate)
        for step, rate in run.points("rate")
        if not any(first <= step <= last for first, last in run.undone)
    ]
    if not has_values(points):
        return None
    series = Series(name="learning rate", points=points, colour=4)
    chart = LineChart(series=(series,), from_zero=True)
    return Figure(name="rate", title="Learning rate", chart=chart)


def _norm(run: RunFacts) -> Figure | None:
    limit = number(run.record.planned("optim.max_grad_norm"))
    note = f"Clipped at {limit:g}." if limit else ""
    title = "Gradient norm"
    return single(run, "grad_norm", title, name="gradient-norm", colour=5, log=True, note=note)


def single(
    run: RunFacts,
    key: str,
    title: str,
    *,
    name: str,
    colour: int,
    unit: Unit = "number",
    from_zero: bool = False,
    log: bool = False,
    note: str = "",
) -> Figure | None:
    """A figure of one value of the lines; None where none of them holds it."""
    points = run.points(key)
    if not has_values(points):
        return None
    series = Series(name=title.lower(), points=points, colour=colour)
    chart = LineChart(
        series=(series,), unit=unit, from_zero=from_zero, log=log and spans_far(points)
    )
    return Figure(name=name, title=title, chart=chart, note=note)


def has_values(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def spans_far(points: Sequence[Point]) -> bool:
    """Whether a linear axis would press most of the values flat."""
    values = [value for _, value in points if value is not None]
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_FROM


COLUMNS = 100
"""Of the picture of phases along the run."""
HELD_CLOCK = 0.9
"""A clock that stays above this share of its highest is steady."""
PHASES = {
    "data_wait": ("waiting for data", 2),
    "copy": ("copying", 6),
    "forward": ("forward", 1),
    "backward": ("backward", 4),
    "optimizer": ("optimizer", 3),
    "compute": ("computing", 1),
    "other": ("other", 7),
}
"""Names and colours."""
RUN_PARTS = {
    "loading": ("loading", 6),
    "compiling": ("compiling", 5),
    "training": ("training", 1),
    "evaluating": ("evaluating", 3),
    "saving": ("saving", 4),
    "rest": ("other", 7),
}


def speed(run: RunFacts) -> list[Section]:
    """Throughput and the card along the run, then where a step and the run spent their time."""
    rates = [figure for figure in (_throughput(run), *_card(run)) if figure]
    sections = []
    if rates:
        inside: list[Block] = [*rates]
        if not run.on_gpu:
            why = "This run had no GPU, so there is no utilisation, memory or power to draw."
            inside.append(Words(text=why, tone="note"))
        sections.append(Section(name="speed", title="Speed", inside=tuple(inside)))
    times = [figure for figure in (_average_step(run), _phases(run), _whole(run)) if figure]
    if times:
        sections.append(Section(name="time", title="Where the time went", inside=tuple(times)))
    return sections


def _throughput(run: RunFacts) -> Figure | None:
    return single(
        run,
        "tokens_per_second",
        "Tokens a second",
        name="throughput",
        colour=1,
        unit="si",
        from_zero=True,
    )


def _card(run: RunFacts) -> list[Figure | None]:
    power = single(
        run, "power_watts", "Power", name="power", colour=2, unit="watts", from_zero=True
    )
    return [_utilisation(run), _gpu_memory(run), power, _clock(run)]


def _utilisation(run: RunFacts) -> Figure | None:
    lines = [("GPU utilisation", "gpu_utilization", 0.01, 3), ("MFU", "mfu", 1.0, 4)]
    series = []
    for name, key, factor, colour in lines:
        points = [(x, None if y is None else factor * y) for x, y in run.points(key)]
        if has_values(points):
            series.append(Series(name=name, points=points, colour=colour))
    if not series:
        return None
    chart = LineChart(series=tuple(series), unit="percent", from_zero=True)
    titles = " and ".join(line.name for line in series)
    note = "Utilisation is the share of time in which any kernel ran." if run.on_gpu else ""
    return Figure(name="utilisation", title=titles, chart=chart, note=note)


def _gpu_memory(run: RunFacts) -> Figure | None:
    lines = [
        ("card", "gpu_memory_bytes", 7),
        ("this process", "gpu_process_memory_bytes", 6),
        ("reserved, peak", "peak_reserved_bytes", 1),
        ("allocated, peak", "peak_allocated_bytes", 3),
    ]
    series = [
        Series(name=name, points=points, colour=colour)
        for name, key, colour in lines
        if has_values(points := run.points(key))
    ]
    if not series:
        return None
    chart = LineChart(series=tuple(series), unit="bytes", from_zero=True)
    return Figure(name="memory", title="GPU memory", chart=chart)


def _clock(run: RunFacts) -> Figure | None:
    """The clock of the card where it was braked or did not hold; a flat line tells nothing."""
    braked = [value for value in run.column("throttle") if value]
    clocks = run.values("sm_clock_mhz")
    if not clocks or (not braked and min(clocks) > HELD_CLOCK * max(clocks)):
        return None
    note = f"A brake was on in up to {percent(max(braked))} of the samples." if braked else ""
    return single(
        run,
        "sm_clock_mhz",
        "Clock of the card in MHz",
        name="clock",
        colour=5,
        unit="si",
        from_zero=True,
        note=note,
    )


# --- where the time went -------------------------------------------------------------------------


def _average_step(run: RunFacts) -> Figure | None:
    step = run.anatomy.step
    if step is None or step.wall <= 0:
        return None
    segments = [
        Segment(name=name, amount=seconds, words=span(seconds), colour=colour)
        for phase, (name, colour) in PHASES.items()
        if (seconds := step.exposed_copy if phase == "copy" else step.of(phase)) > 0
    ]
    notes = [f"{span(step.wall)} an update, the median of {step.updates:,}."]
    if step.copies_beside and step.of("copy"):
        notes.append(f"Copies took {span(step.of('copy'))} beside the computation.")
    if step.feed is not None:
        notes.append(f"Making the batches took {span(step.feed)} in the background.")
    if not step.settled:
        notes.append("The run was too short to settle: its first updates stand here.")
    return Figure(
        name="average-step",
        title="One average update",
        chart=WideBar(segments=tuple(segments)),
        note=" ".join(notes),
        wide=True,
    )


def _phases(run: RunFacts) -> Figure | None:
    """The share of every phase along the run, in columns of equally many lines."""
    forward, steps = run.column("time_forward"), run.step_numbers
    timed = [place for place, seconds in enumerate(forward) if seconds is not None]
    if not timed:
        return None
    beside = run.anatomy.step is not None and run.anatomy.step.copies_beside
    keys = [key for key in PHASES if key != "compute" and not (beside and key == "copy")]
    amounts = {key: run.amounts(f"time_{key}") for key in keys}
    count = min(COLUMNS, len(timed))
    columns, at = [], []
    for place in range(count):
        part = timed[place * len(timed) // count : (place + 1) * len(timed) // count]
        updates = sum(run.lines[line].updates for line in part)
        columns.append(tuple(sum(amounts[key][line] for line in part) / updates for key in keys))
        at.append(steps[part[len(part) // 2]])
    used = [place for place in range(len(keys)) if any(column[place] for column in columns)]
    chart = StackChart(
        parts=tuple(PHASES[keys[place]][0] for place in used),
        colours=tuple(PHASES[keys[place]][1] for place in used),
        at=tuple(at),
        columns=tuple(tuple(column[place] for place in used) for column in columns),
    )
    title = "Share of every phase along the run"
    return Figure(name="phases", title=title, chart=chart, wide=True)


def _whole(run: RunFacts) -> Figure | None:
    spent = run.anatomy.run
    if spent.total <= 0:
        return None
    segments = [
        Segment(name=name, amount=seconds, words=span(seconds), colour=colour)
        for key, (name, colour) in RUN_PARTS.items()
        if (seconds := float(getattr(spent, key))) > 0
    ]
    return Figure(
        name="whole-run",
        title="The whole run",
        chart=WideBar(segments=tuple(segments)),
        note=f"{span(spent.total)} from the start to the last event.",
        wide=True,
    )
