"""Warnings about the text of examples: leftovers of other templates, and what a template drops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from expert.core.text import counted, some_of
from expert.data.examples.messages import decoded_messages
from expert.data.examples.tools import has_nulls, has_tools, left_out, tool_names
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
_AS_JSON = (
    "messages written as JSON text, which is trained on as text: write them as lists, or map the "
    "column as messages"
)
_TWICE = "tools that the system text lists as well: the model sees them twice; remove one of them"
_CALLS = re.compile(r'\s*\[?\s*\{\s*"(?:name|arguments)"\s*:')
_CALLS_AS_TEXT = (
    "calls written as JSON text, though the tools are offered in the words of the template, which "
    "writes calls in its own way; write them as tool_calls of messages"
)
_REPEATED = "the whole request in the answer, which is trained on (is the column right?)"
_NULLS = (
    "null among its tools or in the arguments of a call, which tables such as Parquet put where "
    "other rows have a key; write tools and arguments as JSON text"
)


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
    answers = (turn for turn in turns if turn.role == "assistant")
    quoted = [f'"{name}"' for name in tool_names((), example.tools)] if example.tools else []
    if any(_CALLS.match(turn.text) and any(q in turn.text for q in quoted) for turn in answers):
        yield _CALLS_AS_TEXT
    if quoted and turns[0].role == "system":
        text = turns[0].text.replace("'", '"')
        if '"name"' in text and all(name in text for name in quoted):  # not a mere mention
            yield _TWICE


def _is_conversation(text: str) -> bool:
    """Messages as JSON text; other lists may have keys like theirs, but other roles."""
    found = decoded_messages(text) or []
    return bool(found) and all(str(each.get("role", each.get("from"))) in ROLES for each in found)


@dataclass
class _Found:
    """How many examples have one kind of problem, and where the first of them are."""

    count: int = 0
    places: list[str] = field(default_factory=list)

    def note(self, place: str) -> None:
        self.count += 1
        if len(self.places) < SHOWN_PLACES:
            self.places.append(place)

    @property
    def where(self) -> str:
        return ", ".join(self.places)


@dataclass
class TextWarnings:
    """What the texts of some examples have that they should not, or lose."""

    remnants: dict[str, _Found] = field(default_factory=dict)
    transcripts: int = 0
    """Plain texts that are conversations."""
    lost: dict[str, _Found] = field(default_factory=dict)
    """Other doubts, and what the template leaves out."""
    examples: int = 0

    def note(self, example: Example, segments: Sequence[Segment], place: str) -> None:
        """Note an example; `segments` is how the model sees it."""
        self.examples += 1
        asked, answered = (example.text.find(speaker) for speaker in _IN_ONE_LINE)
        self.transcripts += bool(_TRANSCRIPT.match(example.text)) or 0 <= asked < answered
        for marker in leftover_markers(example):
            self.remnants.setdefault(marker, _Found()).note(place)
        for doubt in _doubts_about(example):
            self.lost.setdefault(doubt, _Found()).note(place)
        if len(example.turns) < 3 and not has_tools(example):
            return  # every template renders a request and an answer
        missing = sorted(left_out(example, "".join(segment.text for segment in segments)))
        kinds = [f"{kind}, {_LEFT_OUT}" for kind in missing]
        for kind in [*kinds, _NULLS] if has_nulls(example) else kinds:
            self.lost.setdefault(kind, _Found()).note(place)

    def lines(self, name: str, first: int | None = None) -> list[str]:
        """One line for each kind. `first`: how many examples were looked at, if not all."""

        def number(count: int) -> str:
            of_first = f"{count:,} of the first {counted(first or 0, 'example')}"
            return counted(count, "example") if first is None else of_first

        lines = []
        together: dict[tuple[str, int, str], list[str]] = {}  # markers of the same rows
        for marker, found in sorted(self.remnants.items(), key=lambda each: -each[1].count):
            if marker.rstrip(".") in _WORDS and 20 * found.count < self.examples:
                continue  # an input may be the word
            kind = "template remnant" if _MARKER.fullmatch(marker) else "placeholder"
            together.setdefault((kind, found.count, found.where), []).append(marker)
        groups = list(together.items())
        for (kind, count, where), markers in groups[:SHOWN_KINDS]:
            shown = some_of(markers, SHOWN_PLACES)
            lines.append(f"{name}: {kind} {shown} in {number(count)}: {where}")
        if rest := sum(len(markers) for _, markers in groups[SHOWN_KINDS:]):
            lines.append(f"{name}: {rest} more such markers")
        if self.transcripts:
            lines.append(
                f"{name}: {number(self.transcripts)} of plain text written as a "
                "conversation (User: … Assistant: …): the requests are trained on like the "
                "answers; rows with messages, or with a request and an answer, train on answers"
            )
        for kind, found in self.lost.items():
            if kind == _REPEATED and 2 * found.count < self.examples:
                continue  # some answers begin with the question
            lines.append(f"{name}: {number(found.count)} with {kind}: {found.where}")
        return lines
