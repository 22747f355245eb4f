"""The same page as Markdown: figures become sparklines and the numbers that matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from expert.core.text import in_markdown
from expert.insight.page.blocks import (
    MADE_BY,
    Bars,
    Block,
    CaseExample,
    Chart,
    EventTimeline,
    Figure,
    Folded,
    Grid,
    Histogram,
    LineChart,
    Lines,
    Page,
    Series,
    StackChart,
    Tiles,
    Tone,
    WideBar,
    Words,
)
from expert.insight.page.markup import cut
from expert.insight.page.scales import format_value

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 48
SIGNS: dict[Tone, str] = {"good": "✓ ", "note": "– ", "warning": "! ", "error": "✗ ", "plain": ""}


def page_markdown(page: Page) -> str:
    lines = [f"# {text(page.title)}", "", text(page.subtitle), ""]
    kind = f"{text(page.kind)}: " if page.kind else ""
    lines += [f"**{kind}{text(page.verdict)}**", ""]
    lines += [text(page.reasons), ""] if page.reasons else []
    for section in page.sections:
        lines += [f"## {text(section.title)}", ""]
        for block in section.inside:
            lines += [*_block(block), ""]
    lines += ["---", "", text(page.footer), ""]
    return "\n".join(lines)


def is_page(markdown: str) -> bool:
    """Whether a text is such a page, of this or an earlier version, by its footer."""
    *_, rule, between, last = ["", "", "", *markdown.rstrip().splitlines()]
    return (rule, between) == ("---", "") and last.startswith(MADE_BY)


def text(value: object) -> str:
    """Text on one line that cannot become a heading, a table, a link or HTML."""
    return in_markdown(cut(value))


def _block(block: Block) -> Iterator[str]:
    match block:
        case Figure():
            yield from _figure(block)
        case Tiles():
            rows = [(card.name, card.value, card.note) for card in block.cards]
            yield from _table(("number", "value", ""), rows, ("value",))
        case Words():
            yield text(block.text)
        case Grid():
            yield from _table(block.columns, block.rows, block.numbers)
        case Lines():
            yield from (f"- {SIGNS[tone]}{text(line)}" for tone, line in block.lines)
        case CaseExample():
            yield from (f"- {text(name)}: {text(value)}" for name, value in block.texts)
        case Folded():
            yield f"**{text(block.title)}**"
            for inner in block.inside:
                yield ""
                yield from _block(inner)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]
) -> Iterator[str]:
    yield f"| {' | '.join(map(text, columns))} |"
    yield f"| {' | '.join('---:' if name in numbers else '---' for name in columns)} |"
    for row in rows:
        yield f"| {' | '.join(map(text, row))} |"


# --- figures -------------------------------------------------------------------------------------


def _figure(figure: Figure) -> Iterator[str]:
    yield f"### {text(figure.title)}"
    yield ""
    yield from _chart(figure.chart)
    if figure.note:
        yield ""
        yield text(figure.note)


def _chart(chart: Chart) -> Iterator[str]:
    match chart:
        case LineChart():
            shown = [line for line in chart.series if line.look != "faint"]
            yield from (_spark_line(line, chart) for line in shown)
        case StackChart():
            rows = zip(chart.parts, zip(*chart.columns, strict=True), strict=True)
            wholes = [sum(column) or 1.0 for column in chart.columns]
            for name, amounts in rows:
                shares = [amount / whole for amount, whole in zip(amounts, wholes, strict=True)]
                mean = f"{sum(shares) / len(shares):.1%} on average"
                yield f"- {text(name)}: `{spark(shares, low=0.0, high=1.0)}` {mean}"
        case WideBar():
            whole = sum(part.amount for part in chart.segments) or 1.0
            for part in chart.segments:
                yield f"- {text(part.name)}: {part.words}, {part.amount / whole:.1%}"
        case Bars():
            rows_ = [(bar.name, bar.words, bar.note) for bar in chart.bars]
            yield from _table(("setting", "speed", ""), rows_, ("speed",))
        case Histogram():
            pairs = [
                (label, f"{count:,}")
                for label, count in zip(chart.labels, chart.counts, strict=True)
            ]
            yield from _table(("tokens", chart.what), pairs, (chart.what,))
        case EventTimeline():
            counted = zip(chart.lanes, chart.counts, strict=True)
            yield ", ".join(f"{text(lane)}: {count:,}" for lane, count in counted)


def _spark_line(line: Series, chart: LineChart) -> str:
    known = [(x, y) for x, y in line.points if y is not None]
    if not known:
        return f"- {text(line.name)}: no value"
    values = [y for _, y in known]
    low, high = min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1])
    ends = format_value(values[0], chart.unit), format_value(values[-1], chart.unit)
    x = chart.x_name
    return (
        f"- {text(line.name)}: `{spark(values)}` {ends[0]} → {ends[1]}; lowest "
        f"{format_value(low[1], chart.unit)} at {x} {format_value(low[0], chart.x_unit)}, highest "
        f"{format_value(high[1], chart.unit)} at {x} {format_value(high[0], chart.x_unit)}"
    )


def spark(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """The values as a sparkline, each block the mean of its part."""
    count = min(SPARK_WIDTH, len(values))
    means = []
    for place in range(count):
        part = values[place * len(values) // count : (place + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    bottom = min(means) if low is None else low
    span = (max(means) if high is None else high) - bottom
    steps = [round((mean - bottom) / span * 7) if span > 0 else 3 for mean in means]
    return "".join(BLOCKS[min(7, max(0, step))] for step in steps)
