"""Warnings about the text of examples: leftovers of other templates, and what a template drops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from expert.core.text import counted, some_of
from expert.data.examples.columns import Columns
from expert.data.examples.messages import decoded_messages, has_other_system_text
from expert.data.examples.tools import has_tools, left_out
from expert.data.records import Example, Segment
from expert.manifest.schema.message_names import ROLES

SHOWN_PLACES = 5
SHOWN_KINDS = 20

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"),
    *("<|end_of_text|>", "<|end_of_turn|>", "<｜User｜>", "<｜Assistant｜>"),
    "<｜end▁of▁sentence｜>",
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    *("### Instruction:", "### Response:", "### Human:", "### User:", "### Assistant:"),
)
_MARKER = re.compile("|".join(map(re.escape, MARKERS)) + r"|</s>(?=\s*\Z)")  # else it is HTML
_TRANSCRIPT = re.compile(
    r"\s*<?(?:User|Human|Question|Q)>? ?:.*?\n[ \t]*<?(?:Assistant|AI|Bot|Answer|A)>? ?:",
    re.DOTALL | re.IGNORECASE,
)
_IN_ONE_LINE = ("USER: ", " ASSISTANT: ")  # as Vicuna was trained
_ASKS = re.compile(r"\s*(?:User|Human) ?:", re.IGNORECASE)
_TO_BE_ANSWERED = re.compile(r"\n[ \t]*(?:Assistant|AI|Bot) ?:\Z", re.IGNORECASE)
# Things that should have been filled in: {{name}}, image or audio placeholders, and an empty table
# cell as written by pandas, alone or as the input of a request, or in other words for no input.
_PLACEHOLDER = re.compile(
    r"\{\{\s*[A-Za-z_][\w.]*\s*\}\}|<\|?(?:image|video|audio|img)(?:_\d+|_pad)?\|?>"
    r"|(?:(?<=:\n)|\A)(?:nan|NaN|<NA>)\Z"
    r"|(?:(?<=\n\nInput:\n)|(?<=\n\nContext:\n))(?:None|null|NULL|N/A|<noinput>|No input)\.?\Z"
)
_WORDS = ("None", "null", "NULL", "N/A")
# UTF-8 that was decoded as Windows-1252 (ü, é, ’), and bytes that could not be decoded.
_MISREAD = re.compile("\ufffd|Ã[¡-ª¬-º¼-¿Ÿœ]|â€[™œ˜¦¢\u009d]")
_LONG_ENOUGH = 20
"""Characters of a request from which an answer does not contain it by chance."""
_LEFT_OUT = "which the model's own template leaves out: the model does not see it"
_WRONG_ENCODING = "characters of a wrong encoding (such as Ã¼ for ü): convert them to UTF-8 again"
_ONE_TURN = (
    "a request that ends as a conversation does (Human: … Assistant:): the model sees it as one "
    "turn; write it as messages"
)
_AS_TEXT = (
    "plain text written as a conversation (User: … Assistant: …): the requests are trained on like "
    "the answers; rows with messages, or with a request and an answer, train on answers"
)
_AS_JSON = (
    "messages written as JSON text, which is trained on as text: write them as lists, or map the "
    "column as messages"
)
_REPEATED = "the whole request in the answer, which is trained on (is the column right?)"


def leftover_markers(example: Example) -> list[str]:
    """Markers of prompt templates, then unfilled placeholders, each once."""
    texts = [example.text, *(turn.text for turn in example.turns)]
    patterns = (_MARKER, _PLACEHOLDER)
    matches = (
        each
        for pattern in patterns
        for text in texts
        for each in pattern.findall(text)
        if each != "</s>" or text.lstrip().rfind("<s>") <= 0  # else it is HTML
    )
    return list(dict.fromkeys(matches))


def _doubts_about(example: Example) -> Iterator[str]:
    """What is odd about an example, independent of the template."""
    turns = example.turns
    asked, answered = (example.text.find(speaker) for speaker in _IN_ONE_LINE)
    if _TRANSCRIPT.match(example.text) or 0 <= asked < answered:
        yield _AS_TEXT
    if any(_MISREAD.search(text) for text in (example.text, *(turn.text for turn in turns))):
        yield _WRONG_ENCODING
    requests = [turn.text for turn in turns if turn.role == "user"]
    if any(_ASKS.match(text) and _TO_BE_ANSWERED.search(text.rstrip()[-20:]) for text in requests):
        yield _ONE_TURN
    if any(_is_conversation(t.text) for t in turns if t.role in ("user", "assistant")):
        yield _AS_JSON
    pairs = ((asked.text.strip(), told) for asked, told in pairwise(turns) if asked.role == "user")
    if any(
        told.role == "assistant" and len(request) >= _LONG_ENOUGH and request in told.text
        for request, told in pairs
    ):
        yield _REPEATED


def _is_conversation(text: str) -> bool:
    """Messages as JSON text; other lists may have keys like theirs, but other roles."""
    found = decoded_messages(text) or []
    return bool(found) and all(str(each.get("role", each.get("from"))) in ROLES for each in found)


def overruled_system(values: Mapping[str, Any], columns: Columns) -> list[str]:
    """The warning about a system column that is ignored in a row with a system text of its own."""
    if not columns.system:
        return []
    talk = values.get(columns.messages or columns.instruction)
    if not has_other_system_text(talk, values.get(columns.system)):
        return []
    return [f"{columns.system!r} ignored, since the messages begin with their own system text"]


@dataclass
class _Found:
    """How many examples have one kind of problem, and where the first of them are."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def note(self, place: str) -> None:
        self.count += 1
        if len(self.places) < SHOWN_PLACES:
            self.places.append(place)


@dataclass
class TextWarnings:
    """What the texts of some examples have that they should not, or lose."""

    remnants: dict[str, _Found] = field(default_factory=dict)
    doubts: dict[str, _Found] = field(default_factory=dict)
    """Other doubts, and what the template leaves out."""
    examples: int = 0

    def note(
        self, example: Example, segments: Sequence[Segment], place: str, more: Sequence[str] = ()
    ) -> None:
        """Note an example; `segments` is how the model sees it, `more` what else is odd."""
        self.examples += 1
        for marker in leftover_markers(example):
            self.remnants.setdefault(marker, _Found()).note(place)
        doubts = [*_doubts_about(example), *more]
        if len(example.turns) > 2 or has_tools(example):  # all render a request and an answer
            missing = left_out(example, "".join(segment.text for segment in segments))
            doubts += [f"{kind}, {_LEFT_OUT}" for kind in sorted(missing)]
        for doubt in doubts:
            self.doubts.setdefault(doubt, _Found()).note(place)

    def lines(self, name: str, first: int | None = None) -> list[str]:
        """One line for each kind. `first`: how many examples were looked at, if not all."""

        def number(count: int) -> str:
            of_first = f"{count:,} of the first {counted(first or 0, 'example')}"
            return counted(count, "example") if first is None else of_first

        together: dict[tuple[str, int, str], list[str]] = {}  # markers of the same rows
        for marker, found in sorted(self.remnants.items(), key=lambda each: -each[1].count):
            if marker.rstrip(".") in _WORDS and 20 * found.count < self.examples:
                continue  # an input may be the word
            kind = "template remnant" if _MARKER.fullmatch(marker) else "placeholder"
            key = (kind, found.count, ", ".join(found.places))
            together.setdefault(key, []).append(marker)
        lines = [
            f"{name}: {kind} {some_of(markers, SHOWN_PLACES)} in {number(count)}: {where}"
            for (kind, count, where), markers in together.items()
        ]
        if more := len(lines[SHOWN_KINDS:]):
            lines[SHOWN_KINDS:] = [f"{name}: {more} more kinds of such markers"]
        for doubt, found in self.doubts.items():
            if doubt == _REPEATED and 2 * found.count < self.examples:
                continue  # some answers begin with the question
            lines.append(f"{name}: {number(found.count)} with {doubt}: {', '.join(found.places)}")
        return lines
