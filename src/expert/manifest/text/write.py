"""Writes a tree of items as JSON or YAML that reads back as the same data and comments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

from expert.manifest.text.item import Item, Scalar

WIDTH = 100
_STEP = "  "


def to_json(root: Item) -> str:
    """JSON text with short lists on one line, without YAML comments."""
    return _json_value(root, "", 0) + "\n"


def to_yaml(root: Item, closing_comments: Iterable[str] = ()) -> str:
    """YAML text in block style, with the comments of the items."""
    blocks = [_entry_lines(_key(key, ""), item, "") for key, item in root.fields().items()]
    lines: list[str] = []
    after_section = False
    for block in blocks:
        is_section = sum(not line.startswith("#") for line in block) > 1
        lines += ["", *block] if lines and (is_section or after_section) else block
        after_section = is_section
    return "\n".join([*(lines or ["{}"]), *closing_comments]) + "\n"


# --- JSON ------------------------------------------------------------------------------------


def _json_value(item: Item, indent: str, used: int) -> str:
    """`used`: columns that the indentation and the key take."""
    value, inner = item.value, indent + _STEP
    if isinstance(value, dict):
        if not value:
            return "{}"
        parts = []
        for key, entry in value.items():
            head = f"{inner}{_json_text(key)}: "
            parts.append(head + _json_value(entry, inner, len(head)))
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    if isinstance(value, list):
        texts = [_json_scalar(e.value) for e in value if not isinstance(e.value, dict | list)]
        line = f"[{', '.join(texts)}]"
        if len(texts) == len(value) and used + len(line) < WIDTH:  # a comma may follow
            return line
        parts = [inner + _json_value(entry, inner, len(inner)) for entry in value]
        return "[\n" + ",\n".join(parts) + f"\n{indent}]"
    return _json_scalar(value)


def _json_scalar(value: Scalar) -> str:
    if isinstance(value, str):
        return _json_text(value)
    return _number(value) if isinstance(value, float) else json.dumps(value)


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _number(value: float) -> str:
    """The shortest text that reads back as the same number: 2e-5, not 2e-05."""
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be written in a manifest")
    return re.sub(r"e([-+])0", r"e\1", repr(value))


# --- YAML ------------------------------------------------------------------------------------

# Characters that a parser refuses, changes or breaks lines at.
_ESCAPED = re.compile(
    "[^ -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_NAMED_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_OPENS_WITH_SYNTAX = re.compile(r"[-?:,\[\]{}#&*!|>'\"%@`=~]|\.\.\.|<<")
_HOLDS_SYNTAX = re.compile(r": | #|:$")
_FLOW_SYNTAX = re.compile(r"[\[\]{},:?]")
_OTHER_DIALECTS = re.compile(r"[yYnN]|0o[0-7]+")
# Parsers look 1024 characters ahead for the colon of a plain key.
_LONGEST_KEY = 1000


def _entry_lines(head: str, item: Item, indent: str) -> list[str]:
    """The lines of one entry; `head` is its key with a colon, or the dash of a list."""
    value = item.value
    above = [indent + comment for comment in item.above]
    beside = f"  {item.beside}" if item.beside else ""
    if isinstance(value, str) and _fits_block_text(value):
        mark = "|" if value.endswith("\n") else "|-"
        lines = value.removesuffix("\n").split("\n")
        text = [f"{indent}{_STEP}{line}" if line else "" for line in lines]
        return [*above, f"{indent}{head} {mark}{beside}", *text]
    if isinstance(value, list):
        line = _flow_line(value, len(indent) + len(head) + 1)
        if line is not None:
            # The parser attaches a comment above `key: [a, b]` to the first value on that line.
            above += [indent + comment for entry in value[:1] for comment in entry.above]
            return [*above, f"{indent}{head} {line}{beside}"]
        below = [line for entry in value for line in _entry_lines("-", entry, indent + _STEP)]
    elif isinstance(value, dict) and value:
        inner = indent + _STEP
        below = [
            line
            for key, entry in value.items()
            for line in _entry_lines(_key(key, inner), entry, inner)
        ]
    else:
        word = "{}" if isinstance(value, dict) else _yaml_scalar(value)
        return [*above, f"{indent}{head} {word}{beside}"]
    if head == "-":
        above += [indent + item.beside] if item.beside else []
        return [*above, *_behind_dash(below, indent)]
    return [*above, f"{indent}{head}{beside}", *below]


def _behind_dash(lines: list[str], indent: str) -> list[str]:
    """Put the dash before the first line, and the comments above it before the dash."""
    first = next(n for n, line in enumerate(lines) if not line.lstrip().startswith("#"))
    comments = [indent + line.lstrip() for line in lines[:first]]
    start = f"{indent}- {lines[first].removeprefix(indent + _STEP)}"
    return [*comments, start, *lines[first + 1 :]]


def _flow_line(entries: list[Item], used: int) -> str | None:
    """`[a, b]`, or None if the list is long, nested or has comments."""
    if any(entry.beside for entry in entries) or any(entry.above for entry in entries[1:]):
        return None
    words = [
        _yaml_scalar(entry.value, in_flow=True)
        for entry in entries
        if not isinstance(entry.value, dict | list)
    ]
    line = f"[{', '.join(words)}]"
    fits = len(words) == len(entries) and used + len(line) <= WIDTH
    return line if fits else None


def _key(key: str, indent: str) -> str:
    text = _yaml_text(key)
    return f"{text}:" if len(text) <= _LONGEST_KEY else f"? {text}\n{indent}:"


def _yaml_scalar(value: Scalar, *, in_flow: bool = False) -> str:
    if isinstance(value, str):
        return _yaml_text(value, in_flow=in_flow)
    if isinstance(value, float):
        # With its dot, 2.0e-5 is a number to every YAML reader; 2e-5 only to some.
        return re.sub(r"^(-?\d+)e", r"\1.0e", _number(value))
    return json.dumps(value)


def _yaml_text(text: str, *, in_flow: bool = False) -> str:
    if not _needs_quotes(text, in_flow=in_flow):
        return text
    has_marks = '"' in text or "\\" in text
    if has_marks and "'" not in text and not _ESCAPED.search(text):
        return f"'{text}'"
    return '"' + re.sub(r'["\\]|' + _ESCAPED.pattern, _escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if match[0] in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[match[0]]
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _needs_quotes(text: str, *, in_flow: bool) -> bool:
    # Imported here: JSON manifests need no YAML parser.
    import yaml

    from expert.manifest.text.yaml_text import read_scalar

    if read_scalar(text) != text or text != text.strip() or _ESCAPED.search(text):
        return True
    if _OPENS_WITH_SYNTAX.match(text) or _HOLDS_SYNTAX.search(text):
        return True
    if in_flow and _FLOW_SYNTAX.search(text):
        return True
    # Quote what other YAML readers take for a number, a boolean or a date.
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(text[:1], [])
    return any(pattern.match(text) for _, pattern in resolvers) or bool(
        _OTHER_DIALECTS.fullmatch(text)
    )


def _fits_block_text(text: str) -> bool:
    """Whether `|` preserves the text, even in editors that strip trailing blanks."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) < 2 or _ESCAPED.search(text.replace("\n", "")):
        return False
    has_trailing_blanks = any(line != line.rstrip() for line in lines)
    opens_plainly = lines[0] != "" and not lines[0].startswith(" ")
    return opens_plainly and lines[-1] != "" and not has_trailing_blanks
