"""Several runs on the same axes, and how they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from expert.core.text import count, duration, gib, loss
from expert.insight.event_text import planned_value
from expert.insight.ladder.comparison import not_comparable
from expert.insight.page.blocks import Block, Figure, Grid, PageSection, Point, Words
from expert.insight.page.facts import RunFacts
from expert.insight.page.sections.curves import MIN_SMOOTHED, line_figure
from expert.insight.page.series import smoothed
from expert.insight.step.anatomy import finite

COLOURS = 6
NOT_COMPARED = ("decisions", "remarks")
Number = Callable[[RunFacts], float | None]
Curves = Sequence[Sequence[Point]]


def comparison_section(runs: Sequence[RunFacts]) -> PageSection:
    names = labels(runs)
    losses = [_smooth_loss(run) for run in runs]
    evals = [[(float(e["step"]), finite(e.get("loss"))) for e in run.evals()] for run in runs]
    rates = [run.points("tokens_per_second") for run in runs]

    def drawn(name: str, title: str, curves: Curves, **how: Any) -> list[Figure]:
        """One curve per run, each in its colour."""
        colours = (1 + place % COLOURS for place in range(len(names)))
        curve_of = zip(names, curves, colours, strict=True)
        return line_figure(name, title, *curve_of, **{"log": True, **how})

    by_time = _over(runs, losses, "seconds")
    figures = [
        *drawn("loss-by-step", "Loss by step", losses),
        *drawn("loss-by-tokens", "Loss by tokens", _over(runs, losses, "tokens"),
               x=("tokens", "si")),
        *drawn("loss-by-time", "Loss by time in steps", by_time, x=("time", "seconds")),
        *drawn("evals-by-step", "Validation loss by step", evals, dots=True),
        *drawn("speed-by-step", "Tokens per second by step", rates, unit="si", from_zero=True,
               log=False),
    ]  # fmt: skip
    doubts = not_comparable([run.record for run in runs], names)
    inside: list[Block] = [Words(text=text, tone="warning") for text in doubts]
    inside += [_numbers(runs, names), *figures, _plans(runs, names)]
    return PageSection(name="comparison", title="Comparison", inside=tuple(inside))


def labels(runs: Sequence[RunFacts]) -> list[str]:
    """The folder names; equal ones are numbered."""
    found: list[str] = []
    for run in runs:
        again = sum(other.name == run.name for other in runs[: len(found)])
        found.append(f"{run.name} ({again + 1})" if again else run.name)
    return found


def _smooth_loss(run: RunFacts) -> list[Point]:
    points = run.points("loss")
    if len(points) < MIN_SMOOTHED:
        return points
    return smoothed(points, [value or 1.0 for value in run.column("targets")])


def _over(
    runs: Sequence[RunFacts], losses: Sequence[Sequence[Point]], key: str
) -> list[list[Point]]:
    """The curves over a running sum instead of over steps."""
    result = []
    for run, points in zip(runs, losses, strict=True):
        at = list(accumulate(run.amounts(key)))
        known = bool(at) and at[-1] > 0
        result.append([(x, y) for x, (_, y) in zip(at, points, strict=True)] if known else [])
    return result


# --- numbers -------------------------------------------------------------------------------------

_COMPARED: dict[str, tuple[Number, Callable[[float], str]]] = {
    "loss, last line": (lambda run: run.loss, loss),
    "validation loss, best": (
        lambda run: finite(run.best_eval["loss"]) if run.best_eval else None,
        loss,
    ),
    "tokens per second, mean": (lambda run: run.tokens_per_second, "{:,.0f}".format),
    "GPU utilization": (lambda run: run.average("gpu_utilization"), "{:.0f} %".format),
    "MFU": (lambda run: run.average("mfu"), "{:.1%}".format),
    "peak memory": (lambda run: run.memory_peak[0] if run.memory_peak else None, gib),
    "duration, without pauses": (lambda run: run.seconds, duration),
    "of it in steps": (lambda run: run.anatomy.run.training or None, duration),
    "steps": (lambda run: run.updates, "{:,.0f}".format),
    "tokens": (lambda run: run.tokens, lambda n: count(round(n))),
}


def _numbers(runs: Sequence[RunFacts], names: Sequence[str]) -> Grid:
    """One number per row; after every run but the first its ratio to the first."""
    nothing = ["" for _ in runs]
    rows = [("verdict", *_spread([run.verdict.kind for run in runs], nothing))]
    rows.append(("state", *_spread([run.state for run in runs], nothing)))
    for name, (measure, words) in _COMPARED.items():
        values = [measure(run) for run in runs]
        if any(value is not None for value in values):
            shown = [words(value) if value is not None else "–" for value in values]
            rows.append((name, *_spread(shown, [_ratio(values[0], value) for value in values])))
    columns = ["", names[0]]
    for label in names[1:]:
        columns += [label, f"ratio {len(columns) // 2}" if len(names) > 2 else "ratio"]
    ratios = tuple(name for name in columns if name.startswith("ratio"))
    return Grid(columns=tuple(columns), rows=tuple(rows), numbers=ratios)


def _spread(shown: Sequence[str], ratios: Sequence[str]) -> list[str]:
    """The first run's cell, then two cells for every other run."""
    pairs = zip(shown[1:], ratios[1:], strict=True)
    return [shown[0], *(cell for pair in pairs for cell in pair)]


def _ratio(first: float | None, other: float | None) -> str:
    if not first or other is None:
        return "–"
    ratio = other / first
    return f"{ratio:.2f}×" if 0.1 <= abs(ratio) < 100 else f"{ratio:.3g}×"


# --- plans ---------------------------------------------------------------------------------------


def _plans(runs: Sequence[RunFacts], names: Sequence[str]) -> Block:
    flat = [dict(flattened(run.record.plan)) for run in runs]
    rows = [
        (path, *(planned_value(path, one.get(path)) for one in flat))
        for path in dict.fromkeys(path for one in flat for path in one)
        if any(one.get(path) != flat[0].get(path) for one in flat[1:])
    ]
    if not rows:
        return Words(text="The plans of these runs are identical.")
    return Grid(columns=("plan", *names), rows=tuple(rows), code=("plan",))


def flattened(plan: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Every value of a plan by its path, without the reasons."""
    found: list[tuple[str, Any]] = []
    for key, value in plan.items():
        path = f"{above}.{key}" if above else str(key)
        if path in NOT_COMPARED:
            continue
        if isinstance(value, dict) and value and path.count(".") < 3:
            found.extend(flattened(value, path))
        else:
            found.append((path, value))
    return found
