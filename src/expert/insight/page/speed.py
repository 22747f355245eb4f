"""How fast the run was and where its time went."""

from __future__ import annotations

from expert.insight.page.blocks import (
    Block,
    Figure,
    LineChart,
    Section,
    Segment,
    Series,
    StackChart,
    WideBar,
    Words,
)
from expert.insight.page.facts import RunFacts
from expert.insight.page.learning import has_values, single
from expert.insight.wording import percent, span

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
PARTS = {
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
    return [_utilisation(run), _memory(run), power, _clock(run)]


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


def _memory(run: RunFacts) -> Figure | None:
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
        for key, (name, colour) in PARTS.items()
        if (seconds := float(getattr(spent, key))) > 0
    ]
    return Figure(
        name="whole-run",
        title="The whole run",
        chart=WideBar(segments=tuple(segments)),
        note=f"{span(spent.total)} from the start to the last event.",
        wide=True,
    )
