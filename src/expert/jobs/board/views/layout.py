"""Shared parts of all pages: head, navigation, small elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from expert import __version__
from expert.insight.page.markup import Markup, tag

if TYPE_CHECKING:
    from expert.jobs.board.live import View

NAV: tuple[tuple[str, str, str], ...] = (
    ("/", "Runs", "runs"),
    ("/start", "Start", "start"),
    ("/new", "New", "new"),
    ("/chat", "Chat", "chat"),
)
"""Path, label and name of every page in the navigation."""
STATE_TONES = {"running": "note", "finished": "good", "stopped": "warning", "failed": "error",
               "gone": "error", "unreadable": "plain"}  # fmt: skip


def page(
    title: str, *inside: object, here: str = "", read_only: bool = False, script: str = ""
) -> str:
    """A complete page; `here`: its name in the navigation, `script`: one besides board.js."""
    items = [
        tag("a", words, href=place, aria_current="page" if name == here else None)
        for place, words, name in NAV
        if not (read_only and name != "runs")
    ]
    mark = pill("read-only", "plain") if read_only else None
    bar = tag(
        "header",
        tag("a", tag("span", "expert", class_="logo"), " board", href="/", class_="brand"),
        tag("nav", *items, aria_label="pages"),
        mark,
        tag("span", "", id="connection", class_="connection", role="status"),
        class_="bar",
    )
    body = (
        tag("a", "Skip to content", href="#content", class_="skip"),
        bar,
        tag("main", *inside, id="content", tabindex="-1"),
        tag("div", "", id="toast", role="status", aria_live="polite"),
        tag("footer", f"expert {__version__}. The board reads run folders; a run never needs it."),
    )
    return _document(title, tag("body", *body), ("board.js", script) if script else ("board.js",))


def plain_page(title: str, text: str, field: str) -> str:
    """A page for refused requests, without navigation and scripts; `field`: an input to show."""
    form = None
    if field:
        entry = tag("input", name=field, type="password", aria_label=field, autocomplete="off")
        form = tag("form", entry, tag("button", "Open"), method="get", action="/", class_="row")
    inside = tag("main", tag("h1", title), tag("p", text), form, class_="alone")
    return _document(title, tag("body", inside))


def _document(title: str, body: Markup, scripts: Sequence[str] = ()) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} – expert board"),
        tag("link", rel="icon", href="/static/icon.svg"),
        tag("link", rel="stylesheet", href="/static/report.css"),
        tag("link", rel="stylesheet", href="/static/board.css"),
        *(tag("script", src=f"/static/{name}", defer="") for name in scripts),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def live(view: View, address: str) -> Markup:
    """A view's elements, which the script keeps up to date."""
    inside = [Markup(view.html(name)) for name in view.html("order").split()]
    return tag("div", *inside, id="parts", data_live=address, data_seen=view.seen)


def pill(text: str, tone: str, **attributes: Any) -> Markup:
    return tag("span", text, class_=f"pill tone-{tone}", **attributes)


def state_word(state: str) -> str:
    return "killed" if state == "gone" else state


def state_pill(state: str) -> Markup:
    return pill(state_word(state), STATE_TONES.get(state, "plain"), data_state=state)


def progress_bar(share: float | None, label: str) -> Markup | None:
    """A progress bar, also for screen readers."""
    if share is None:
        return None
    percent = round(100 * share)
    filled = tag("i", style=f"width:{100 * share:.1f}%")
    about = {"aria_valuemin": 0, "aria_valuemax": 100, "aria_valuenow": percent}
    return tag("div", filled, class_="progress", role="progressbar", aria_label=label, **about)


def button(words: object, action: str, **attributes: Any) -> Markup:
    """A button handled by the script; `action`: a path to POST to, or `copy`."""
    return tag("button", words, type="button", data_action=action, **attributes)


def fact(name: str, value: object) -> Markup | None:
    """A value with its name; None if unknown."""
    if value in (None, ""):
        return None
    return tag("span", tag("b", value), tag("small", name), class_="fact")


def title_row(title: str, *beside: object) -> Markup:
    return tag("div", tag("h1", title), tag("div", *beside, class_="row"), class_="title")
