"""Figures drawn as SVG without scripts. A drawing is stretched to its space; its labels are page
text, as large on a phone as on a screen."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from expert.insight.page.blocks import (
    Bars,
    Chart,
    EventTimeline,
    Histogram,
    LineChart,
    Mark,
    Point,
    Series,
    StackChart,
    Unit,
    WideBar,
)
from expert.insight.page.markup import Markup, joined, path, tag
from expert.insight.page.scales import (
    SIZE,
    Scale,
    format_value,
    labels,
    scale_of,
    spans_magnitudes,
    thinned,
)

TOOLTIPS = 80
"""Columns of a chart that show their values on hover or tap."""
LISTED = 10
"""Rows of the value table below a chart, for keyboards, screen readers and paper."""
DOTS = 30
"""Up to this many points are also drawn as dots."""
LABELS_ON_A_PHONE = 4
"""Labels under a drawing; if there are more, every other one is hidden on a phone."""
LABEL_SHARE = 0.12
"""Parts of a bar at least this wide have their number inside."""


def draw(chart: Chart) -> Markup:
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
        case EventTimeline():
            return _marks(chart)


def sparkline(points: Sequence[Point], words: str) -> Markup:
    """A small curve without axes; `words` describe it for screen readers."""
    known = [value for _, value in points if value is not None]
    if len(known) < 2:
        return tag("span", class_="spark")
    thin = thinned(points, 60)
    x = scale_of([place for place, _ in thin], tight=True)
    y = scale_of(known, log=spans_magnitudes(points), tight=True)
    box = f"0 0 {SIZE} {SIZE}"
    drawn = path(_path(thin, x, y), class_="line c1")
    about = {"role": "img", "aria_label": words, "preserveAspectRatio": "none"}
    return tag("svg", drawn, class_="spark", viewBox=box, **about)


# --- the frame -----------------------------------------------------------------------------------


def _frame(
    drawn: Sequence[Markup], y: Scale, unit: Unit, *, below: Markup, x_name: str, tips: list[Markup]
) -> Markup:
    """The drawing between its axes, with the tooltip columns on top."""
    shown = zip(y.ticks, labels(y.ticks, unit), strict=True)
    beside = [tag("span", text, style=f"bottom:{_percent(y.share(t))}") for t, text in shown]
    grid = "".join(f"M0 {_down(y.share(tick))}H{SIZE}" for tick in y.ticks)
    return tag(
        "div",
        tag("div", *beside, class_="ys", aria_hidden="true"),
        _svg(path(grid, class_="grid"), *drawn),
        tag("div", *tips, class_="tips", aria_hidden="true"),
        tag("div", x_name, class_="x-name"),
        below,
        class_="plot",
    )


def _below(x: Scale, unit: Unit) -> Markup:
    """The labels under the drawing; labels at the edges stay inside."""
    words = []
    for tick, text in zip(x.ticks, labels(x.ticks, unit), strict=True):
        share = x.share(tick)
        side = "first" if share < 0.03 else "last" if share > 0.97 else None
        words.append(tag("span", text, class_=side, style=f"left:{_percent(share)}"))
    dense = "xs dense" if len(words) > LABELS_ON_A_PHONE else "xs"
    return tag("div", *words, class_=dense, aria_hidden="true")


def _svg(*inside: Markup) -> Markup:
    box = f"0 0 {SIZE} {SIZE}"
    return tag("svg", *inside, class_="area", viewBox=box, preserveAspectRatio="none")


def _rect(
    colour: int, left: float, width: float, *, top: float = 0.0, title: str | None = None
) -> Markup:
    """A filled rectangle in shares of the drawing, down to its lower edge."""
    return tag(
        "rect",
        tag("title", title) if title else None,
        class_=f"fill c{colour}",
        x=_across(left),
        y=f"{SIZE * top:.0f}",
        width=_across(width),
        height=f"{SIZE * (1 - top):.0f}",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _down(share: float) -> str:
    """Distance from the top, as SVG counts it."""
    return f"{SIZE * (1 - share):.0f}"


def _across(share: float) -> str:
    return f"{SIZE * share:.1f}"


def _swatch(colour: int) -> Markup:
    return tag("i", class_=f"swatch c{colour}")


def _legend(names: Sequence[tuple[str, int]]) -> Markup:
    items = [tag("li", _swatch(colour), name) for name, colour in names]
    return tag("ul", *items, class_="legend")


def _tip(left: float, right: float, *texts: str) -> Markup:
    """A column that shows its texts on hover, by CSS alone, on the side with room."""
    style = f"left:{_percent(left)};width:{_percent(max(0.0, right - left))}"
    side = "tip late" if left + right > 1 else "tip"
    return tag("span", tag("b", "\n".join(texts)), class_=side, style=style, tabindex="-1")


# --- lines ---------------------------------------------------------------------------------------


def _lines(chart: LineChart) -> Markup:
    thin = [thinned(line.points) for line in chart.series]  # keeps the extremes
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
    below, tips = _below(x, chart.x_unit), list(_tips(chart, x))
    plot = _frame(drawn, y, chart.unit, below=below, x_name=chart.x_name, tips=tips)
    shown = [line for line in chart.series if line.look != "faint"]
    names = [(f"{line.name}{_ends(line, chart)}", line.colour) for line in shown]
    return joined(_legend(names) if len(chart.series) > 1 else None, plot, _values(chart, shown))


def _ends(line: Series, chart: LineChart) -> str:
    """`: 0.0090, lowest 1.01 at step 300`: the last value, and a loss's lowest before that."""
    known = [(at, value) for at, value in line.points if value is not None]
    if not known:
        return ""
    last, low = known[-1], min(known, key=lambda point: point[1])
    text = f": {format_value(last[1], chart.unit)}"
    if line.look != "dots" or chart.unit != "number" or low[1] >= last[1]:
        return text
    where = f"{chart.x_name} {format_value(low[0], chart.x_unit)}"
    return f"{text}, lowest {format_value(low[1], chart.unit)} at {where}"


def _values(chart: LineChart, shown: Sequence[Series]) -> Markup:
    """A folded table of values: the first, the last and some between; short series in full."""
    places = [{at for at, value in line.points if value is not None} for line in shown]
    every = sorted(set().union(*places))
    step = max(1, (len(every) - 1) / (LISTED - 1))
    some = {every[round(number * step)] for number in range(min(LISTED, len(every)))}
    short = (at for line, at in zip(shown, places, strict=True) if len(line.points) <= LISTED)
    rows = []
    for place in sorted(some.union(*short)):
        cells = [tag("td", _value_at(line, place, chart.unit), class_="number") for line in shown]
        rows.append(tag("tr", tag("td", format_value(place, chart.x_unit)), *cells))
    names = [tag("th", line.name, class_="number") for line in shown]
    head = tag("thead", tag("tr", tag("th", chart.x_name), *names))
    table = tag("div", tag("table", head, tag("tbody", *rows)), class_="scroll")
    return tag("details", tag("summary", "Values"), table, class_="values")


def _value_at(line: Series, place: float, unit: Unit) -> str:
    found = bisect_left(line.points, place, key=lambda point: point[0])
    at, value = line.points[found] if found < len(line.points) else (None, None)
    return format_value(value, unit) if at == place and value is not None else "–"


def _line(line: Series, points: Sequence[Point], x: Scale, y: Scale) -> Markup:
    drawn = [path(_path(points, x, y), class_=f"{line.look} c{line.colour}")]
    alone = list(_isolated_points(points))
    dotted = points if line.look == "dots" or len(points) <= DOTS else alone
    if line.look != "faint" or alone:
        # Lines of zero length: their round ends stay round however the drawing is stretched.
        dots = "".join(
            f"M{_at(place, value, x, y)}z" for place, value in dotted if value is not None
        )
        drawn.append(path(dots, class_=f"dot c{line.colour}"))
    return joined(*drawn)


def _at(place: float, value: float, x: Scale, y: Scale) -> str:
    return f"{_across(x.share(place))} {_down(y.share(value))}"


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """The line, broken where a value is missing."""
    parts, pen = [], "M"
    for place, value in points:
        if value is not None:
            parts.append(f"{pen}{_at(place, value, x, y)}")
        pen = "M" if value is None else "L"
    return "".join(parts)


def _isolated_points(points: Sequence[Point]) -> Iterator[Point]:
    """Points without a neighbour, which a line would not show."""
    values = [None, *(value for _, value in points), None]
    for place, point in enumerate(points):
        if point[1] is not None and values[place] is None and values[place + 2] is None:
            yield point


def _tips(chart: LineChart, x: Scale) -> Iterator[Markup]:
    some = [line.points[:: 1 + len(line.points) // TOOLTIPS] for line in chart.series]
    shown = sorted({place for points in some for place, _ in points})
    edges = [x.low, *((a + b) / 2 for a, b in pairwise(shown)), x.high]
    for place, (left, right) in zip(shown, pairwise(edges), strict=True):
        values = [(line.name, _value_at(line, place, chart.unit)) for line in chart.series]
        texts = [f"{name} {value}" for name, value in values if value != "–"]
        where = f"{chart.x_name} {format_value(place, chart.x_unit)}"
        yield _tip(x.share(left), x.share(right), where, *texts)


# --- stacks and bars -----------------------------------------------------------------------------


def _stack(chart: StackChart) -> Markup:
    """Shares of every column, stacked."""
    count = len(chart.columns)
    heights = []
    for column in chart.columns:
        whole = sum(column) or 1.0
        heights.append(list(accumulate((amount / whole for amount in column), initial=0.0)))
    drawn = []
    for part, colour in enumerate(chart.colours):
        upper = [_edge(place, count, sums[part + 1]) for place, sums in enumerate(heights)]
        lower = [_edge(place, count, sums[part], back=True) for place, sums in enumerate(heights)]
        line = "".join([*upper, *reversed(lower)])
        drawn.append(path(f"M{line[1:]}z", class_=f"fill c{colour}"))
    tips = []
    for place, column in enumerate(chart.columns):
        parts = zip(chart.parts, column, strict=True)
        texts = [f"{name} {format_value(amount, 'ms')}" for name, amount in parts if amount]
        where = f"{chart.x_name} {format_value(chart.at[place], 'count')}"
        tips.append(_tip(place / count, (place + 1) / count, where, *texts))
    below = _below(scale_of(chart.at, whole=True, tight=True, wanted=6), "count")
    y = scale_of([0.0, 1.0])
    plot = _frame(drawn, y, "percent", below=below, x_name=chart.x_name, tips=tips)
    return joined(_legend(list(zip(chart.parts, chart.colours, strict=True))), plot)


def _edge(place: int, count: int, share: float, *, back: bool = False) -> str:
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
        title = f"{part.name} {part.words}, {share:.1%}"
        drawn.append(_rect(part.colour, left, share, title=title))
        if share >= LABEL_SHARE:
            place = f"left:{_percent(left)};width:{_percent(share)}"
            texts.append(tag("span", part.words, style=place))
        amount = (tag("b", part.words), tag("small", f"{share:.1%}"))
        items.append(tag("li", _swatch(part.colour), tag("span", part.name), *amount))
        left += share
    bar = tag("div", _svg(*drawn), *texts, class_="wide-bar")
    return joined(bar, tag("ul", *items, class_="parts"))


def _bars(chart: Bars) -> Markup:
    longest = max((bar.amount or 0.0 for bar in chart.bars), default=0.0) or 1.0
    rows = []
    for bar in chart.bars:
        title = f"{bar.name}: {bar.words}"
        drawn = _rect(7 if bar.marked else 1, 0.0, (bar.amount or 0.0) / longest, title=title)
        name = tag("span", bar.name, tag("small", bar.note) if bar.note else None, class_="name")
        inside = (name, tag("div", _svg(drawn), class_="bar"), tag("b", bar.words))
        rows.append(tag("li", *inside, class_="marked" if bar.marked else None))
    return tag("ul", *rows, class_="bars")


def _histogram(chart: Histogram) -> Markup:
    y = scale_of(chart.counts, from_zero=True, whole=True)
    count = len(chart.counts)
    drawn, words, tips = [], [], []
    for place, (label, number) in enumerate(zip(chart.labels, chart.counts, strict=True)):
        left = place / count
        drawn.append(_rect(1, left + 0.08 / count, 0.84 / count, top=1 - y.share(number)))
        tips.append(_tip(left, (place + 1) / count, f"{label}: {number:,} {chart.what}"))
        words.append(tag("span", label, style=f"left:{_percent((place + 0.5) / count)}"))
    below = tag("div", *words, class_="xs bins", aria_hidden="true")
    return _frame(drawn, y, "count", below=below, x_name="tokens", tips=tips)


# --- the timeline --------------------------------------------------------------------------------


def _marks(chart: EventTimeline) -> Markup:
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
        dot = path(f"M{_across(x.share(min(mark.at, x.high)))} {SIZE // 2}z", class_="mark")
        drawn.append(tag("g", tag("title", mark.words), dot, class_=f"tone-{mark.tone}"))
    words = tag("span", name, tag("small", f"{count:,}"))
    return tag("div", words, _svg(*drawn), class_="lane")
