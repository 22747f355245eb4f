"""A page as one HTML file that opens from disk: no script, no external link, no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files

from expert.insight.page.blocks import (
    Block,
    CaseExample,
    Figure,
    Folded,
    Grid,
    Lines,
    Page,
    PageSection,
    Tiles,
    Tone,
    Words,
)
from expert.insight.page.charts import draw
from expert.insight.page.markup import Markup, joined, tag

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
"""The browser may load nothing, so text that slipped past escaping could do nothing."""
SIGNS: dict[Tone, str] = {"good": "✓", "note": "–", "warning": "!", "error": "✗", "plain": "·"}
STACKED_FROM = 3
"""Tables with at least this many columns turn into blocks on a phone."""


def page_html(page: Page) -> str:
    style = files("expert.insight.page").joinpath("style.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{page.title}: {page.verdict}"),
        Markup(f"<style>\n{style}</style>"),
    )
    links = [tag("a", section.title, href=f"#{section.name}") for section in page.sections]
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", page.title),
            tag("p", page.subtitle, class_="subtitle"),
            tag(
                "div",
                tag("span", page.kind, class_="kind") if page.kind else None,
                tag("strong", page.verdict),
                tag("p", page.reasons, class_="reasons") if page.reasons else None,
                class_=f"verdict tone-{page.tone}",
            ),
        ),
        tag("nav", *links, aria_label="sections"),
        tag("main", *(section_html(section) for section in page.sections)),
        tag("footer", page.footer),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def section_html(section: PageSection) -> Markup:
    """A section with its heading, for the report and the board."""
    inside = tag("div", *(block_html(block) for block in _paired(section.inside)), class_="grid")
    return tag("section", tag("h2", section.title), inside, id=section.name)


def _paired(blocks: Sequence[Block]) -> list[Block]:
    """Half-width figures come in pairs; a last one without a partner takes the full width."""
    alone: list[int] = []
    for place, block in enumerate(blocks):
        if isinstance(block, Figure) and not block.wide:
            alone = [] if alone else [place]
        elif alone:
            break
    return [
        replace(block, wide=True) if isinstance(block, Figure) and place in alone else block
        for place, block in enumerate(blocks)
    ]


def block_html(block: Block) -> Markup:
    match block:
        case Figure():
            return _figure(block)
        case Tiles():
            return _cards(block)
        case Words():
            return tag("p", block.text, class_=f"words tone-{block.tone}")
        case Grid():
            return _table(block)
        case Lines():
            return _lines(block)
        case CaseExample():
            return _example(block)
        case Folded():
            inside = tag("div", *(block_html(inner) for inner in block.inside), class_="grid")
            opened = "open" if block.shown else None
            return tag("details", tag("summary", block.title), inside, open=opened)


def _figure(figure: Figure) -> Markup:
    return tag(
        "figure",
        tag("figcaption", figure.title),
        draw(figure.chart),
        tag("p", " ".join(filter(None, (figure.look, figure.note))))
        if figure.look or figure.note
        else None,
        id=f"figure-{figure.name}",
        class_="wide" if figure.wide else None,
    )


def _cards(cards: Tiles) -> Markup:
    items = [
        tag(
            "li",
            tag("span", card.name),
            tag("b", card.value),
            tag("small", card.note) if card.note else None,
        )
        for card in cards.cards
    ]
    return tag("ul", *items, class_="cards")


def _table(grid: Grid) -> Markup:
    kinds = ["number" if name in grid.numbers else None for name in grid.columns]
    head = [tag("th", name, class_=kind) for name, kind in zip(grid.columns, kinds, strict=True)]
    rows = []
    for place, row in enumerate(grid.rows):
        tone = grid.tones[place] if grid.tones else None
        rows.append(tag("tr", *_cells(grid, row, kinds, tone)))
    stacked = "stacked" if len(grid.columns) >= STACKED_FROM else None
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows), class_=stacked)
    return tag("div", table, class_="scroll")


def _cells(
    grid: Grid, row: Sequence[str], kinds: Sequence[str | None], tone: Tone | None
) -> list[Markup]:
    cells = []
    for place, (name, text) in enumerate(zip(grid.columns, row, strict=True)):
        toned = f"toned tone-{tone}" if tone is not None and place == 0 else ""
        code = "code" if name in grid.code else ""
        classes = " ".join(part for part in (kinds[place] or "", toned, code) if part)
        cells.append(tag("td", text, class_=classes or None, data_name=name))
    return cells


def _lines(lines: Lines) -> Markup:
    items = [
        tag("li", tag("i", SIGNS[tone]), text, class_=f"tone-{tone}") for tone, text in lines.lines
    ]
    return tag("ul", *items, class_="checks")


def _example(example: CaseExample) -> Markup:
    tone = {True: "good", False: "error", None: "plain"}[example.passed]
    texts = [joined(tag("dt", name), tag("dd", text)) for name, text in example.texts]
    return tag("dl", *texts, class_=f"example tone-{tone}")
