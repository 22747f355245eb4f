"""The figures, drawn as SVG. A drawing is stretched to its space; the words stand beside it as
text of the page, so they are as large on a phone as on a screen. Nothing here needs a script."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from expert.insight.page.blocks import (
    Bars,
    Chart,
    Histogram,
    LineChart,
    Mark,
    Marks,
    Point,
    Series,
    StackChart,
    Unit,
    WideBar,
)
from expert.insight.page.markup import Markup, joined, path, tag
from expert.insight.page.scales import SIZE, Scale, labels, said, scale_of, thinned

TOOLTIPS = 80
"""Columns of a chart that show their values below the pointer, or where a finger taps."""
LISTED = 10
"""Rows of the table of values below a chart, for keyboards, screen readers and paper."""
DOTS = 30
"""So many points are drawn as dots too."""
ROOM_ON_A_PHONE = 4
"""Labels under a drawing; of more every other one is hidden there."""
LABEL_SHARE = 0.12
"""A part of a bar at least so wide has its number written into it."""


def draw(chart: Chart) -> Markup:
    """The figure as HTML and SVG."""
    match chart:
        case LineChart():
            return _lines(chart)
        case StackChart():
            return _stack(chart)
        case WideBar():
            return _wide_bar(chart)
        case Bars():
            return _bars(chart)
        case Histogram():
            return _histogram(chart)
        case Marks():
            return _marks(chart)


# --- the frame -----------------------------------------------------------------------------------


def _frame(
    drawn: Markup,
    x: Scale,
    y: Scale,
    *,
    units: tuple[Unit, Unit],
    x_name: str,
    tips: Sequence[Markup] = (),
) -> Markup:
    """The drawing between its axes, and over it the columns that tell their values."""
    shown = zip(y.ticks, labels(y.ticks, units[1]), strict=True)
    beside = [tag("span", text, style=f"bottom:{_percent(y.share(t))}") for t, text in shown]
    grid = "".join(f"M0 {_down(y.share(tick))}H{SIZE}" for tick in y.ticks)
    svg = _svg(joined(path(grid, class_="grid"), drawn))
    return tag(
        "div",
        tag("div", *beside, class_="ys", aria_hidden="true"),
        svg,
        tag("div", *tips, class_="tips", aria_hidden="true"),
        tag("div", x_name, class_="x-name"),
        _below(x, units[0]),
        class_="plot",
    )


def _below(x: Scale, unit: Unit) -> Markup:
    """The words under the drawing; those at the edges stay inside."""
    words = []
    for tick, text in zip(x.ticks, labels(x.ticks, unit), strict=True):
        share = x.share(tick)
        side = "first" if share < 0.03 else "last" if share > 0.97 else None
        words.append(tag("span", text, class_=side, style=f"left:{_percent(share)}"))
    dense = "xs dense" if len(words) > ROOM_ON_A_PHONE else "xs"
    return tag("div", *words, class_=dense, aria_hidden="true")


def _svg(inside: Markup) -> Markup:
    box = f"0 0 {SIZE} {SIZE}"
    return tag("svg", inside, class_="area", viewBox=box, preserveAspectRatio="none")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _down(share: float) -> str:
    """How far from the top; SVG counts downwards."""
    return f"{SIZE * (1 - share):.0f}"


def _across(share: float) -> str:
    return f"{SIZE * share:.1f}"


def _legend(names: Sequence[tuple[str, int]]) -> Markup:
    items = [tag("li", tag("i", class_=f"swatch c{colour}"), name) for name, colour in names]
    return tag("ul", *items, class_="legend")


# --- lines ---------------------------------------------------------------------------------------


def _lines(chart: LineChart) -> Markup:
    thin = [thinned(line.points) for line in chart.series]  # the extremes are in it
    known = [(x, y) for points in thin for x, y in points if y is not None]
    x = scale_of(
        [place for place, _ in known],
        whole=chart.x_unit == "count",
        from_zero=chart.x_unit != "count",
        clock=chart.x_unit == "seconds",
        tight=True,
        wanted=6,
    )
    y = scale_of(
        [value for _, value in known],
        from_zero=chart.from_zero,
        log=chart.log,
        binary=chart.unit == "bytes",
        share=chart.unit == "percent",
    )
    drawn = [_line(line, points, x, y) for line, points in zip(chart.series, thin, strict=True)]
    plot = _frame(
        joined(*drawn),
        x,
        y,
        units=(chart.x_unit, chart.unit),
        x_name=chart.x_name,
        tips=list(_columns(chart, x)),
    )
    names = [
        (f"{line.name}{_ends(line, chart)}", line.colour)
        for line in chart.series
        if line.look != "faint"
    ]
    legend = _legend(names) if len(chart.series) > 1 else None
    return joined(legend, plot, _values(chart))


def _ends(line: Series, chart: LineChart) -> str:
    """`: 0.0090, lowest 1.01 at step 300`: the last value, and of a loss its lowest before that."""
    known = [(at, value) for at, value in line.points if value is not None]
    if not known:
        return ""
    last, low = known[-1], min(known, key=lambda point: point[1])
    text = f": {said(last[1], chart.unit)}"
    if line.look != "dots" or chart.unit != "number" or low[1] >= last[1]:
        return text
    where = f"{chart.x_name} {said(low[0], chart.x_unit)}"
    return f"{text}, lowest {said(low[1], chart.unit)} at {where}"


def _values(chart: LineChart) -> Markup:
    """Some of the values as a table, folded: the first, the last and those between."""
    shown = [line for line in chart.series if line.look != "faint"]
    places = sorted({at for line in shown for at, value in line.points if value is not None})
    step = max(1, (len(places) - 1) / (LISTED - 1))
    some = [places[round(number * step)] for number in range(min(LISTED, len(places)))]
    few = [line for line in shown if len(line.points) <= LISTED]  # of these all
    some = sorted({*some, *(at for line in few for at, value in line.points if value is not None)})
    rows = []
    for place in some:
        cells = [tag("td", _value_at(line, place, chart.unit), class_="number") for line in shown]
        rows.append(tag("tr", tag("td", said(place, chart.x_unit)), *cells))
    names = [tag("th", line.name, class_="number") for line in shown]
    table = tag(
        "table",
        tag("thead", tag("tr", tag("th", chart.x_name), *names)),
        tag("tbody", *rows),
    )
    return tag(
        "details", tag("summary", "Values"), tag("div", table, class_="scroll"), class_="values"
    )


def _value_at(line: Series, place: float, unit: Unit) -> str:
    found = bisect_left(line.points, place, key=lambda point: point[0])
    at, value = line.points[found] if found < len(line.points) else (None, None)
    return said(value, unit) if at == place and value is not None else "–"


def _line(line: Series, points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    drawn = [path(_path(points, x, y), class_=f"{line.look} c{line.colour}")]
    alone = list(_alone(points))
    dotted = points if line.look == "dots" or len(points) <= DOTS else alone
    if line.look != "faint" or alone:
        drawn.append(path(_dots(dotted, x, y), class_=f"dot c{line.colour}"))
    return joined(*drawn)


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """The line, broken where a value is missing."""
    parts, pen = [], "M"
    for place, value in points:
        if value is None:
            pen = "M"
            continue
        parts.append(f"{pen}{_across(x.share(place))} {_down(y.share(value))}")
        pen = "L"
    return "".join(parts)


def _alone(points: Sequence[Point]) -> Iterator[Point]:
    """Points without a neighbour, of which a line would show nothing."""
    values = [None, *(value for _, value in points), None]
    for place, point in enumerate(points):
        if point[1] is not None and values[place] is None and values[place + 2] is None:
            yield point


def _dots(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Lines without length: their round ends stay round however the drawing is stretched."""
    return "".join(
        f"M{_across(x.share(place))} {_down(y.share(value))}z"
        for place, value in points
        if value is not None
    )


def _columns(chart: LineChart, x: Scale) -> Iterator[Markup]:
    """Columns nobody sees until the pointer or a finger is on them: they tell the values there."""
    some = [line.points[:: 1 + len(line.points) // TOOLTIPS] for line in chart.series]
    shown = sorted({place for points in some for place, _ in points})
    edges = [x.low, *((a + b) / 2 for a, b in pairwise(shown)), x.high]
    for place, (left, right) in zip(shown, pairwise(edges), strict=True):
        texts = [f"{chart.x_name} {said(place, chart.x_unit)}"]
        for line in chart.series:
            value = _value_at(line, place, chart.unit)
            if value != "–":
                texts.append(f"{line.name} {value}")
        yield _column(x.share(left), x.share(right), "\n".join(texts))


def _column(left: float, right: float, text: str) -> Markup:
    """Shown by the style sheet alone; the words stand on the side where there is room."""
    style = f"left:{_percent(left)};width:{_percent(max(0.0, right - left))}"
    side = "tip late" if left + right > 1 else "tip"
    return tag("span", tag("b", text), class_=side, style=style, tabindex="-1")


# --- stacks and bars -----------------------------------------------------------------------------


def _stack(chart: StackChart) -> Markup:
    """Shares of every column, one part on the other."""
    count = len(chart.columns)
    heights = []
    for column in chart.columns:
        whole, sums = sum(column) or 1.0, [0.0]
        for amount in column:
            sums.append(sums[-1] + amount / whole)
        heights.append(sums)
    drawn = []
    for part, colour in enumerate(chart.colours):
        upper = "".join(_flat(place, count, sums[part + 1]) for place, sums in enumerate(heights))
        lower = "".join(
            _flat(place, count, heights[place][part], back=True) for place in reversed(range(count))
        )
        drawn.append(path(f"M{upper[1:]}{lower}z", class_=f"fill c{colour}"))
    tips = []
    for place, column in enumerate(chart.columns):
        texts = [f"{chart.x_name} {said(chart.at[place], 'count')}"]
        texts += [
            f"{name} {said(amount, 'ms')}"
            for name, amount in zip(chart.parts, column, strict=True)
            if amount
        ]
        tips.append(_column(place / count, (place + 1) / count, "\n".join(texts)))
    x = scale_of(chart.at, whole=True, tight=True, wanted=6)
    y = scale_of([0.0, 1.0])
    units: tuple[Unit, Unit] = ("count", "percent")
    plot = _frame(joined(*drawn), x, y, units=units, x_name=chart.x_name, tips=tips)
    return joined(_legend(list(zip(chart.parts, chart.colours, strict=True))), plot)


def _flat(place: int, count: int, share: float, *, back: bool = False) -> str:
    """The edge of one column, drawn to the right or back to the left."""
    ends = (place / count, (place + 1) / count)
    first, last = reversed(ends) if back else ends
    down = _down(share)
    return f"L{_across(first)} {down}L{_across(last)} {down}"


def _wide_bar(chart: WideBar) -> Markup:
    whole = sum(part.amount for part in chart.segments) or 1.0
    drawn, texts, items, left = [], [], [], 0.0
    for part in chart.segments:
        share = part.amount / whole
        words = f"{part.name} {part.words}, {share:.1%}"
        drawn.append(
            tag(
                "rect",
                tag("title", words),
                class_=f"fill c{part.colour}",
                x=_across(left),
                y=0,
                width=_across(share),
                height=SIZE,
            )
        )
        if share >= LABEL_SHARE:
            place = f"left:{_percent(left)};width:{_percent(share)}"
            texts.append(tag("span", part.words, style=place))
        items.append(
            tag(
                "li",
                tag("i", class_=f"swatch c{part.colour}"),
                tag("span", part.name),
                tag("b", part.words),
                tag("small", f"{share:.1%}"),
            )
        )
        left += share
    bar = tag("div", _svg(joined(*drawn)), *texts, class_="wide-bar")
    return joined(bar, tag("ul", *items, class_="parts"))


def _bars(chart: Bars) -> Markup:
    longest = max((bar.amount or 0.0 for bar in chart.bars), default=0.0) or 1.0
    rows = []
    for bar in chart.bars:
        share = (bar.amount or 0.0) / longest
        drawn = tag(
            "rect",
            tag("title", f"{bar.name}: {bar.words}"),
            class_="fill c7" if bar.marked else "fill c1",
            x=0,
            y=0,
            width=_across(share),
            height=SIZE,
        )
        name = tag("span", bar.name, tag("small", bar.note) if bar.note else None, class_="name")
        inside = (name, tag("div", _svg(drawn), class_="bar"), tag("b", bar.words))
        rows.append(tag("li", *inside, class_="marked" if bar.marked else None))
    return tag("ul", *rows, class_="bars")


def _histogram(chart: Histogram) -> Markup:
    y = scale_of(chart.counts, from_zero=True, whole=True)
    count = len(chart.counts)
    drawn, words, tips = [], [], []
    for place, (label, number) in enumerate(zip(chart.labels, chart.counts, strict=True)):
        top = SIZE * (1 - y.share(number))
        text = f"{label}: {number:,} {chart.what}"
        drawn.append(
            tag(
                "rect",
                class_="fill c1",
                x=_across((place + 0.08) / count),
                y=f"{top:.0f}",
                width=_across(0.84 / count),
                height=f"{SIZE - top:.0f}",
            )
        )
        tips.append(_column(place / count, (place + 1) / count, text))
        words.append(tag("span", label, style=f"left:{_percent((place + 0.5) / count)}"))
    beside = [
        tag("span", text, style=f"bottom:{_percent(y.share(tick))}")
        for tick, text in zip(y.ticks, labels(y.ticks, "count"), strict=True)
    ]
    grid = path("".join(f"M0 {_down(y.share(tick))}H{SIZE}" for tick in y.ticks), class_="grid")
    return tag(
        "div",
        tag("div", *beside, class_="ys", aria_hidden="true"),
        _svg(joined(grid, *drawn)),
        tag("div", *tips, class_="tips", aria_hidden="true"),
        tag("div", "tokens", class_="x-name"),
        tag("div", *words, class_="xs bins", aria_hidden="true"),
        class_="plot",
    )


# --- what happened when --------------------------------------------------------------------------


def _marks(chart: Marks) -> Markup:
    x = scale_of([0.0, chart.end or 1.0], tight=True, clock=True, wanted=6)
    lanes = [
        _lane(name, count, [mark for mark in chart.marks if mark.lane == name], x)
        for name, count in zip(chart.lanes, chart.counts, strict=True)
    ]
    axis = tag("div", tag("span"), _below(x, "seconds"), class_="lane axis")
    return tag("div", *lanes, axis, class_="lanes")


def _lane(name: str, count: int, marks: Sequence[Mark], x: Scale) -> Markup:
    drawn = [path(f"M0 {SIZE // 2}H{SIZE}", class_="grid")]
    for mark in marks:
        place = _across(x.share(min(mark.at, x.high)))
        drawn.append(
            tag("g", tag("title", mark.words), path(f"M{place} {SIZE // 2}z", class_="mark"),
                class_=f"tone-{mark.tone}")
        )  # fmt: skip
    words = tag("span", name, tag("small", f"{count:,}"))
    return tag("div", words, _svg(joined(*drawn)), class_="lane")
