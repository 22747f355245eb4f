"""The board's pages from its templates and those of the report."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.insight.page.render import make_environment

if TYPE_CHECKING:
    from jinja2 import Environment

STATE_TONES = {
    **{"running": "note", "finished": "good", "stopped": "warning", "failed": "error"},
    **{"gone": "error", "loading": "note", "ready": "good"},
}


@cache
def environment() -> Environment:
    folder = Path(str(files("expert.jobs.board"))) / "templates"
    return make_environment(folder, state_tones=STATE_TONES)


def page(name: str, title: str, *, read_only: bool = False, here: str = "", **values: Any) -> str:
    """A complete page; `here`: its name in the navigation."""
    template = environment().get_template(f"{name}.html")
    return template.render(title=title, read_only=read_only, here=here, **values)


def part(name: str, *values: Any) -> str:
    """An element that is updated while the page is open: a macro of parts.html."""
    macros: Any = environment().get_template("parts.html").module
    return str(getattr(macros, name)(*values)).strip()
