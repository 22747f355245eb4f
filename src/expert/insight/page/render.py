"""Pages as HTML, from templates. All text is made harmless in one place: `shown`."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.core.files import read_bytes
from expert.core.secrets import redacted
from expert.core.text import times, visible
from expert.insight.page.figures import Figure, Tone, listed_values, thinned

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(str(files("expert.insight.page")))
MAX_TEXT = 2_000
"""Characters shown of one text; a row or an error may have a million."""


@dataclass(frozen=True)
class PageSection:
    """A part of a page with a heading; `html` was made by a template. Folded ones open on a
    click."""

    name: str
    title: str
    html: str
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str
    kind: str
    """The verdict in a word, such as data-bound."""
    verdict: str
    tone: Tone
    reasons: str
    """The text below the verdict."""
    sections: tuple[PageSection, ...]


def shown(value: Any) -> Any:
    """Text as a page shows it: without secrets, with hidden characters visible, cut to a length.
    The template escapes it; what a template made already stays as it is."""
    if value is None or hasattr(value, "__html__"):
        return "" if value is None else value
    text = redacted(str(value), ())
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}… ({len(text) - MAX_TEXT:,} more characters)"
    return visible(text, keep="\n\t")


def make_environment(*folders: Path, **values: Any) -> Environment:
    """Templates of these folders and of this one. Every expression passes through `shown` and is
    escaped; an unknown name is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([*folders, HERE]),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["times"] = times
    made.globals |= {"chart_data": _chart_data, "listed_values": listed_values}
    made.globals |= {"version": __version__, **values}
    return made


@cache
def _environment() -> Environment:
    return make_environment()


def make_section(
    name: str, title: str, *values: Any, layout: str = "", **named: Any
) -> PageSection:
    """A section of a page: the macro of sections.html of that name, or called `layout`."""
    macros: Any = _environment().get_template("sections.html").module
    return PageSection(name, title, getattr(macros, layout or name)(*values, **named))


def page_html(page: Page, *, made: float | None = None) -> str:
    """A page as one file that opens from disk and loads nothing; `made`: now by default.

    The browser runs only the script with this hash, so text that slipped past escaping could do
    nothing."""
    script = "".join([
        f"/*!\n{_file('uplot.LICENSE')}\n*/\n", _file("uplot.min.js"), _file("charts.js"),
        "drawCharts();\n",
    ])  # fmt: skip
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template("report.html").render(
        page=page,
        script=script,
        style=_file("uplot.min.css") + _file("style.css"),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        made=time.strftime("%Y-%m-%d %H:%M", time.localtime(made)),
    )  # fmt: skip


@cache
def _file(name: str) -> str:
    return read_bytes(HERE / name).decode("utf-8")


def _chart_data(figure: Figure) -> str:
    """A line chart for charts.js, as JSON for an attribute."""
    series = []
    for line in figure.series:
        points = thinned(line.points)
        series.append({
            "name": shown(line.name), "colour": line.colour, "look": line.look,
            "x": [_short(x) for x, _ in points], "y": [_short(y) for _, y in points],
        })  # fmt: skip
    facts = {key: getattr(figure, key) for key in
             ("unit", "from_zero", "log")}  # fmt: skip
    return json.dumps({**facts, "series": series}, separators=(",", ":"))


def _short(number: float | None) -> float | None:
    """Six digits are more than a screen shows."""
    if number is None:
        return None
    return int(number) if abs(number) < 2**53 and number == int(number) else float(f"{number:.6g}")
