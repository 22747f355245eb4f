"""Warnings about the text of examples: leftovers of other templates, and what a template drops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from expert.core.text import counted
from expert.data.examples.tools import has_nulls, has_tools, left_out
from expert.data.records import Example, Segment

SHOWN_PLACES = 5
SHOWN_KINDS = 20

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    *("### Instruction:", "### Response:", "### Human:", "### User:", "### Assistant:"),
)
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_TRANSCRIPT = re.compile(
    r"\s*(?:User|Human|Question|Q) ?:.*?\n\s*(?:Assistant|AI|Bot|Answer|A) ?:",
    re.DOTALL | re.IGNORECASE,
)
# Things that should have been filled in: {{name}}, image or audio placeholders, and an empty table
# cell as written by pandas, alone or as the input of a request.
_PLACEHOLDER = re.compile(
    r"\{\{\s*[A-Za-z_][\w.]*\s*\}\}|<\|?(?:image|video|audio|img)(?:_\d+|_pad)?\|?>"
    r"|(?:(?<=:\n)|\A)(?:nan|NaN)\Z"
)
_LEFT_OUT = "which the model's own template leaves out: the model does not see it"
_NULLS = (
    "null among its tools or in the arguments of a call, which tables such as Parquet put where "
    "other rows have a key; write tools and arguments as JSON text"
)


def remnants_in(example: Example) -> list[str]:
    """Markers of prompt templates, then unfilled placeholders, each once."""
    texts = [example.text, *(turn.text for turn in example.turns)]
    patterns = (_MARKER, _PLACEHOLDER)
    matches = (each for pattern in patterns for text in texts for each in pattern.findall(text))
    return list(dict.fromkeys(matches))


@dataclass
class _Found:
    """Examples with one thing, and the first places of them."""

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

    def note(self, example: Example, segments: Sequence[Segment], place: str) -> None:
        """Note an example; `segments` is how the model sees it."""
        self.transcripts += bool(_TRANSCRIPT.match(example.text))
        for marker in remnants_in(example):
            self.remnants.setdefault(marker, _Found()).note(place)
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
        kinds = sorted(self.remnants.items(), key=lambda each: -each[1].count)
        for marker, found in kinds[:SHOWN_KINDS]:
            kind = "placeholder" if _PLACEHOLDER.fullmatch(marker) else "template remnant"
            lines.append(f"{name}: {kind} {marker} in {number(found.count)}: {found.where}")
        if len(kinds) > SHOWN_KINDS:
            lines.append(f"{name}: {len(kinds) - SHOWN_KINDS} more such markers")
        if self.transcripts:
            lines.append(
                f"{name}: {number(self.transcripts)} of plain text written as a "
                "conversation (User: … Assistant: …): the requests are trained on like the "
                "answers; rows with messages, or with a request and an answer, train on answers"
            )
        for kind, found in self.lost.items():
            lines.append(f"{name}: {number(found.count)} with {kind}: {found.where}")
        return lines
