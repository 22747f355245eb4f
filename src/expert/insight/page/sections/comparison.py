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
from expert.insight.page.sections.curves import line_figure, smooth_loss
from expert.insight.step.anatomy import finite

COLOURS = 6
NOT_COMPARED = ("decisions", "remarks")


def comparison_section(runs: Sequence[RunFacts]) -> PageSection:
    names: list[str] = []  # the folder names; equal ones are numbered
    for run in runs:
        again = sum(other.name == run.name for other in runs[: len(names)])
        names.append(f"{run.name} ({again + 1})" if again else run.name)
    losses = [smooth_loss(run) for run in runs]

    def drawn(name: str, title: str, curves: Sequence[Sequence[Point]], **how: Any) -> list[Figure]:
        """One curve per run, each in its colour."""
        colours = (1 + place % COLOURS for place in range(len(names)))
        curve_of = zip(names, curves, colours, strict=True)
        return line_figure(name, title, *curve_of, **{"log": True, **how})

    def over(key: str) -> list[list[Point]]:
        """The losses over a running sum instead of over steps."""
        result = []
        for run, points in zip(runs, losses, strict=True):
            at = list(accumulate(run.amounts(key)))
            known = bool(at) and at[-1] > 0
            result.append([(x, y) for x, (_, y) in zip(at, points, strict=True)] if known else [])
        return result

    evals = [run.eval_points("loss") for run in runs]
    rates = [run.points("tokens_per_second") for run in runs]
    figures = [
        *drawn("loss-by-step", "Loss by step", losses),
        *drawn("loss-by-tokens", "Loss by tokens", over("tokens"), x=("tokens", "si")),
        *drawn("loss-by-time", "Loss by time in steps", over("seconds"), x=("time", "seconds")),
        *drawn("evals-by-step", "Validation loss by step", evals, dots=True),
        *drawn("speed-by-step", "Tokens per second by step", rates, unit="si", from_zero=True,
               log=False),
    ]  # fmt: skip
    doubts = not_comparable([run.record for run in runs], names)
    inside: list[Block] = [Words(text=text, tone="warning") for text in doubts]
    inside += [_numbers(runs, names), *figures, _plans(runs, names)]
    return PageSection(name="comparison", title="Comparison", inside=tuple(inside))


_COMPARED: dict[str, tuple[Callable[[RunFacts], float | None], Callable[[float], str]]] = {
    "loss, last line": (lambda run: run.last_loss[1] if run.last_loss else None, loss),
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
    columns, rows = ["", names[0]], []
    for label in names[1:]:
        columns += [label, f"ratio {len(columns) // 2}" if len(names) > 2 else "ratio"]
    for name, words in (("verdict", [run.verdict.kind for run in runs]),
                        ("state", [run.state for run in runs])):  # fmt: skip
        rows.append((name, words[0], *(cell for word in words[1:] for cell in (word, ""))))
    for name, (measure, write) in _COMPARED.items():
        values = [measure(run) for run in runs]
        if all(value is None for value in values):
            continue
        cells = [name, write(values[0]) if values[0] is not None else "–"]
        for value in values[1:]:
            ratio = value / values[0] if values[0] and value is not None else None
            cells.append(write(value) if value is not None else "–")
            cells.append("–" if ratio is None else f"{ratio:.2f}×" if 0.1 <= abs(ratio) < 100
                         else f"{ratio:.3g}×")  # fmt: skip
        rows.append(tuple(cells))
    ratios = tuple(name for name in columns if name.startswith("ratio"))
    return Grid(columns=tuple(columns), rows=tuple(rows), numbers=ratios)


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
