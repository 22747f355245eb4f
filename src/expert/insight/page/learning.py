"""How the run learnt: loss, evaluations, learning rate, gradient norm."""

from __future__ import annotations

from collections.abc import Sequence

from expert.insight.page.blocks import Figure, LineChart, Point, Section, Series, Unit, Words
from expert.insight.page.facts import RunFacts, number
from expert.insight.page.thinning import smoothed

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
