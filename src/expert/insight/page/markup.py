"""HTML that no text can break: all tags are made and all text is escaped here."""

from __future__ import annotations

import re
from typing import Any

from expert.core.secrets import redacted
from expert.core.text import visible

MAX_TEXT = 2_000
"""Characters shown of one text; a row or an error may have a million."""
_NO_CONTENT = {"meta", "br", "hr", "input", "link"}
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;", "`": "&#96;"}
_STYLE = re.compile(r"[a-z0-9.:;%-]+")
_HTML_PLACES = re.compile("[&<>\"'`]")


class Markup(str):
    """Text that is already HTML: only `tag` and `joined` make it."""

    __slots__ = ()


def cut(text: object) -> str:
    """The text without secrets, cut to the shown length."""
    shown = redacted(str(text), ())
    if len(shown) > MAX_TEXT:
        shown = f"{shown[:MAX_TEXT]}… ({len(shown) - MAX_TEXT:,} more characters)"
    return shown


def escape(text: object) -> str:
    """Text for HTML, between tags or in an attribute."""
    return _HTML_PLACES.sub(lambda found: _HTML[found[0]], visible(cut(text), keep="\n\t"))


def tag(name: str, /, *inside: object, **attributes: Any) -> Markup:
    """An element. Content is escaped and None left out; `class_` and `aria_label` work."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if key == "style":  # used for hundreds of labels and columns
            assert _STYLE.fullmatch(value), "a style holds names and numbers only"
            parts.append(f' style="{value}"')
        elif value is not None:
            parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"')
    parts.append(">")
    if name in _NO_CONTENT:
        return Markup("".join(parts))
    parts.append(joined(*inside))
    parts.append(f"</{name}>")
    return Markup("".join(parts))


def path(d: str, **attributes: Any) -> Markup:
    """An SVG path; `d` is made of numbers and may be longer than any text."""
    assert not set(d) - set("MLHVZz0123456789.- "), "a path holds commands and numbers only"
    start = tag("path", **attributes).removesuffix("></path>")
    return Markup(f'{start} d="{d}"></path>')


def joined(*inside: object) -> Markup:
    """Several pieces in a row; anything that is not markup is escaped."""
    return Markup(
        "".join(
            piece if isinstance(piece, Markup) else escape(piece)
            for piece in inside
            if piece is not None
        )
    )
