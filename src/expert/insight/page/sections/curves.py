"""Curves: loss, evaluations, rates, the GPU, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from expert.core.text import percent, span
from expert.insight.page.blocks import (
    Bar,
    Figure,
    LineChart,
    PageSection,
    Point,
    Series,
    Unit,
    WideBar,
    Words,
)
from expert.insight.page.facts import RunFacts
from expert.insight.page.series import smoothed, spans_magnitudes
from expert.insight.step.anatomy import PHASE_NAMES, finite

MIN_SMOOTHED = 20
"""Fewer points are readable without smoothing."""
COLUMNS = 100
"""Positions of the figure of phases along the run."""
STEADY_CLOCK_SHARE = 0.9
"""A clock that stays above this share of its highest is steady."""
_COLOURS = {"data_wait": 2, "copy": 6, "forward": 1, "backward": 4, "communication": 5,
            "optimizer": 3, "compute": 1, "other": 7}  # fmt: skip
PHASES = {phase: (PHASE_NAMES[phase], colour) for phase, colour in _COLOURS.items()}
RUN_PARTS = {
    "loading": ("loading", 6),
    "compiling": ("compiling", 5),
    "training": ("training", 1),
    "evaluating": ("evaluating", 3),
    "saving": ("saving", 4),
    "rest": ("other", 7),
}
MEMORY = (
    ("card", "gpu_memory_bytes", 7),
    ("this process", "gpu_process_memory_bytes", 6),
    ("reserved, peak", "peak_reserved_bytes", 1),
    ("allocated, peak", "peak_allocated_bytes", 3),
)
Curve = tuple[str, Sequence[Point], int]
"""Name, points and colour."""


def has_values(points: Sequence[Point]) -> bool:
    return any(value is not None for _, value in points)


def line_figure(
    name: str,
    title: str,
    *curves: Curve,
    unit: Unit = "number",
    from_zero: bool = False,
    log: bool = False,
    dots: bool = False,
    note: str = "",
    x: tuple[str, Unit] = ("step", "count"),
) -> list[Figure]:
    """A figure of the curves that have values, if any. `x`: name and unit of the axis."""
    series = tuple(
        Series(name=label, points=points, colour=colour, look="dots" if dots else "line")
        for label, points, colour in curves
        if has_values(points)
    )
    if not series:
        return []
    log = log and spans_magnitudes([point for line in series for point in line.points])
    chart = LineChart(
        series=series, x_name=x[0], x_unit=x[1], unit=unit, from_zero=from_zero, log=log
    )
    return [Figure(name=name, title=title, chart=chart, note=note)]


def smooth_loss(run: RunFacts) -> list[Point]:
    """The loss, smoothed if there are enough log lines; each counts by its tokens."""
    raw = run.points("loss")
    if len(raw) < MIN_SMOOTHED:
        return raw
    return smoothed(raw, [value or 1.0 for value in run.column("targets")])


# --- learning ------------------------------------------------------------------------------------


def learning_section(run: RunFacts) -> PageSection:
    """The loss, and what drives it."""
    # Without the steps that a rollback skipped: they had the learning rate from before it.
    rates = [
        (step, rate)
        for step, rate in run.points("rate")
        if not any(first <= step <= last for first, last in run.skipped_windows)
    ]
    limit = finite(run.record.planned("optim.max_grad_norm"))
    clipped = f"Clipped at {limit:g}." if limit else ""
    accuracy = ("token accuracy", run.eval_points("token_accuracy"), 2)
    norm = ("gradient norm", run.points("grad_norm"), 5)
    figures = (
        *_loss(run),
        *line_figure("accuracy", "Validation token accuracy", accuracy, unit="percent", dots=True),
        *line_figure("rate", "Learning rate", ("learning rate", rates, 4), from_zero=True),
        *line_figure("gradient-norm", "Gradient norm", norm, log=True, note=clipped),
    )
    nothing = Words(text="No step was logged, so there is nothing to draw.", tone="note")
    return PageSection(name="learning", title="Learning", inside=figures or (nothing,))


def _loss(run: RunFacts) -> list[Figure]:
    raw, evals = run.points("loss"), run.eval_points("loss")
    if not has_values(raw):
        return []
    series, note = [Series(name="loss", points=raw, colour=1)], ""
    if len(raw) >= MIN_SMOOTHED:
        series = [
            Series(name="logged loss", points=raw, colour=1, look="faint"),
            Series(name="training, smoothed", points=smooth_loss(run), colour=1),
        ]
        note = "Faint: the log lines, each the mean since the one before. The smoothed line "
        note += "weights every log line by its tokens."
    if has_values(evals):
        series.append(Series(name="validation", points=evals, colour=2, look="dots"))
    log = spans_magnitudes([point for line in series for point in line.points])
    chart = LineChart(series=tuple(series), log=log)
    return [Figure(name="loss", title="Loss", chart=chart, note=note, wide=True)]


# --- speed ---------------------------------------------------------------------------------------


def speed_sections(run: RunFacts) -> list[PageSection]:
    """Throughput and GPU use along the run, then where a step and the run spent their time."""
    rate = ("tokens per second", run.points("tokens_per_second"), 1)
    shares = [(x, None if y is None else 0.01 * y) for x, y in run.points("gpu_utilization")]
    used = [("GPU utilization", shares, 3), ("MFU", run.points("mfu"), 4)]
    use = " and ".join(name for name, points, _ in used if has_values(points))
    about = "Utilization is the share of time in which any kernel ran." if run.on_gpu else ""
    memory = [(name, run.points(key), colour) for name, key, colour in MEMORY]
    power = ("power", run.points("power_watts"), 2)
    rates = [
        *line_figure("throughput", "Tokens per second", rate, unit="si", from_zero=True),
        *line_figure("utilisation", use, *used, unit="percent", from_zero=True, note=about),
        *line_figure("memory", "GPU memory", *memory, unit="bytes", from_zero=True),
        *line_figure("power", "Power", power, unit="watts", from_zero=True),
        *_clock(run),
    ]
    no_gpu = "This run had no GPU, so there is no utilization, memory or power to draw."
    words = [] if run.on_gpu else [Words(text=no_gpu, tone="note")]
    times = (*_average_step(run), *_phases(run), *_whole(run))
    sections = []
    if rates:
        sections.append(PageSection(name="speed", title="Speed", inside=(*rates, *words)))
    if times:
        sections.append(PageSection(name="time", title="Where the time went", inside=times))
    return sections


def _clock(run: RunFacts) -> list[Figure]:
    """The GPU clock if it was throttled by heat or unsteady; a flat line is not worth a figure, and
    reaching the power limit is usual."""
    throttled = [share for share in run.column("throttled_heat") if share]
    clocks = [value for value in run.column("sm_clock_mhz") if value is not None]
    if not clocks or (not throttled and min(clocks) > STEADY_CLOCK_SHARE * max(clocks)):
        return []
    note = f"Throttled in up to {percent(max(throttled))} of the samples." if throttled else ""
    curve = ("GPU clock in MHz", run.points("sm_clock_mhz"), 5)
    return line_figure("clock", "GPU clock in MHz", curve, unit="si", from_zero=True, note=note)


def _average_step(run: RunFacts) -> list[Figure]:
    step = run.anatomy.step
    if step is None or step.wall <= 0:
        return []
    spent = {phase: step.exposed_copy if phase == "copy" else step.of(phase) for phase in PHASES}
    notes = [f"{span(step.wall)} per step, the median of {step.updates:,}."]
    if step.copies_beside and step.of("copy"):
        notes.append(f"Copies took {span(step.of('copy'))}, overlapped with computing.")
    if step.feed is not None:
        notes.append(f"Making the batches took {span(step.feed)} in the background.")
    if not step.settled:
        notes.append("The run was too short to settle: these are its first steps.")
    return _wide_bar("average-step", "One average step", PHASES, spent, " ".join(notes))


def _whole(run: RunFacts) -> list[Figure]:
    spent = run.anatomy.run
    if spent.total <= 0:
        return []
    parts = {key: float(getattr(spent, key)) for key in RUN_PARTS}
    note = f"{span(spent.total)} from the start to the last event."
    return _wide_bar("whole-run", "The whole run", RUN_PARTS, parts, note)


def _wide_bar(
    name: str, title: str, names: dict[str, tuple[str, int]], spent: dict[str, float], note: str
) -> list[Figure]:
    bars = tuple(
        Bar(name=label, amount=spent[key], words=span(spent[key]), colour=colour)
        for key, (label, colour) in names.items()
        if spent[key] > 0
    )
    return [Figure(name=name, title=title, chart=WideBar(bars=bars), note=note, wide=True)]


def _phases(run: RunFacts) -> list[Figure]:
    """The share of every phase along the run, each position covering equally many log lines."""
    steps = run.amounts("step")
    timed = [place for place, spent in enumerate(run.column("time_forward")) if spent is not None]
    beside = run.anatomy.step is not None and run.anatomy.step.copies_beside
    count = min(COLUMNS, len(timed))
    parts = [timed[n * len(timed) // count : (n + 1) * len(timed) // count] for n in range(count)]
    series = []
    for key, (name, colour) in PHASES.items():
        amounts = run.amounts(f"time_{key}")
        if key == "compute" or (beside and key == "copy") or not any(amounts[n] for n in timed):
            continue
        points = [
            (steps[part[len(part) // 2]],
             sum(amounts[n] for n in part) / sum(run.lines[n].updates for n in part))
            for part in parts
        ]  # fmt: skip
        series.append(Series(name=name, points=points, colour=colour))
    if not series:
        return []
    chart = LineChart(series=tuple(series), unit="ms", stacked=True)
    return [Figure(name="phases", title="Share of every phase", chart=chart, wide=True)]
