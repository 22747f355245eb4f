"""Splits text with turn markers (ChatML or the older `<|user|> … <|end|>`) into turns, so that the
model's own template can render them."""

from __future__ import annotations

import re

from expert.data.records import RowError

CHATML_START = "<|im_start|>"
CHATML_END = "<|im_end|>"
LEGACY_END = "<|end|>"
END_OF_TEXT = "<|endoftext|>"

_LEGACY_TAG = re.compile(r"<\|(system|user|assistant|end)\|>")
_LEGACY_BEGINNING = re.compile(r"\s*<\|(?:system|user|assistant)\|>")
_ANY_MARKER = re.compile(r"<\|(?:im_start|im_end|system|user|assistant|end)\|>")
_ROLE_LINE = re.compile(r"[ \t]*(\w+)[ \t]*(?:\r\n|\n|\r)")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|User|Assistant|System): ?")
_EDGES = re.compile(r"\A(?:\r\n|\n|\r)|(?:\r\n|\n|\r)\Z")
_SHOWN_CHARACTERS = 40


def marked_turns(text: str) -> list[tuple[str, str]] | None:
    """(role, text) of every turn; None for plain text without markers."""
    if "<|" not in text:
        return None
    if text.lstrip().startswith(CHATML_START):
        return _chatml_turns(text)
    if _LEGACY_BEGINNING.match(text):
        return _legacy_turns(text)
    marker = _ANY_MARKER.search(text)
    if marker is None:
        return None
    raise RowError(f"the text has turn markers ({marker[0]}) but does not begin with one")


def transcript_turns(text: str) -> list[tuple[str, str]] | None:
    """(role, text) of a conversation written as "Human: … Assistant: …", separated by blank lines;
    None for other text."""
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip():
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [(name.lower(), said.strip("\n")) for name, said in turns]


def _chatml_turns(text: str) -> list[tuple[str, str]]:
    turns = []
    for number, part in enumerate(text.split(CHATML_START)[1:], 1):
        line = _ROLE_LINE.match(part)
        if line is None:
            raise RowError(f"ChatML turn {number}: no role and line break after {CHATML_START}")
        body, end, rest = part[line.end() :].partition(CHATML_END)
        if not end:
            raise RowError(f"ChatML turn {number}: {CHATML_END} is missing")
        _nothing_outside(rest)
        turns.append((line[1], body))
    return turns


def _legacy_turns(text: str) -> list[tuple[str, str]]:
    turns: list[tuple[str, str]] = []
    # [before, tag, text, tag, text, …]: every second text is between two turns.
    parts = _LEGACY_TAG.split(text)
    for at in range(1, len(parts), 4):
        role, body = parts[at], parts[at + 1]
        if role == "end":
            raise RowError(f"{LEGACY_END} without a turn before it")
        if parts[at + 2 : at + 3] != ["end"]:
            raise RowError(f"turn {len(turns) + 1} (<|{role}|>): {LEGACY_END} is missing")
        _nothing_outside(parts[at + 3])
        # One line break on either side belongs to the marker.
        turns.append((role, _EDGES.sub("", body)))
    return turns


def _nothing_outside(gap: str) -> None:
    """Allow only blanks or an end of text between and after turns."""
    left = gap.strip()
    if left and left != END_OF_TEXT:
        raise RowError(f"text outside the turns: {left[:_SHOWN_CHARACTERS]!r}")
