"""Responses in OpenAI's format: complete, or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expert.answer.writer import Answer, partial_stop_length, stop_position
from expert.jobs.serve.engine import TextPiece
from expert.judging.oracles.calls import UNREADABLE_CALLS, CallMarks, NotACall, calls_in

if TYPE_CHECKING:
    from expert.jobs.serve.models import ServedModel

_ID_LETTERS = string.ascii_letters + string.digits
CALL_ID = 9
"""Length of a tool call's id: Mistral's templates require nine letters."""


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer split into text and tool calls."""

    text: str | None
    calls: tuple[dict[str, Any], ...] = ()
    note: str = ""


def parse_answer(finished: Answer, marks: CallMarks | None) -> ParsedAnswer:
    """The tool calls of an answer and the text before them; invalid calls stay text, with a
    note."""
    if marks is None:
        return ParsedAnswer(finished.text, note=f"calls are left as text: {UNREADABLE_CALLS}")
    try:
        named = calls_in(finished.marked, marks)
    except NotACall as fault:
        return ParsedAnswer(finished.text, note=f"calls are left as text: {fault}")
    if not named:
        return ParsedAnswer(finished.text)
    calls = tuple(
        {
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(CALL_ID)),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in named
    )
    before = finished.marked.partition(marks.opening)[0].strip() if marks.opening else ""
    return ParsedAnswer(before or None, calls)


class StreamedText:
    """The streamed text of an answer; what may be a tool call is held back."""

    def __init__(self, marks: CallMarks | None) -> None:
        self._marks, self._text, self._sent = marks, "", 0

    def more(self, piece: str) -> str:
        """Add text; returns what can be sent."""
        self._text += piece
        text, upto = self._text, len(self._text)
        if self._marks is not None and self._marks.opening:
            place = stop_position(text, [self._marks.opening])
            upto = (
                place
                if place is not None
                else upto - partial_stop_length(text, [self._marks.opening])
            )
        elif self._marks is not None and text.lstrip()[:1] in ("", "{", "["):
            upto = 0  # an answer in JSON is a tool call
        fresh, self._sent = text[self._sent : upto], max(self._sent, upto)
        return fresh

    def rest(self, whole: str | None) -> str:
        """What is left to send of the whole text."""
        return (whole or "")[self._sent :]


@dataclass
class Reply:
    """The response to one chat or text completion request."""

    model: ServedModel
    prompt_tokens: int
    chat: bool
    offers_tools: bool = False
    counts_usage: bool = False
    """Whether a stream ends with a chunk of token counts."""
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    _shown: dict[int, StreamedText] = field(default_factory=dict)

    def whole(self, finished: Sequence[Answer]) -> dict[str, Any]:
        """The complete response with all answers."""
        choices = []
        for answer in sorted(finished, key=lambda answer: answer.number):
            found, reason = self._taken(answer)
            if self.chat:
                calls = {"tool_calls": list(found.calls)} if found.calls else {}
                message = {"role": "assistant", "content": found.text, "refusal": None, **calls}
                choices.append(self._choice(answer.number, reason, message=message))
            else:
                choices.append(self._choice(answer.number, reason, text=found.text))
        return {
            **self._head(chunk=False),
            "choices": choices,
            "usage": self.usage(),
            **self._noted(),
        }

    def chunks(self, piece: TextPiece | Answer) -> list[dict[str, Any]]:
        """The chunks to stream for a piece of text, or for the end of an answer."""
        number, found = piece.number, []
        if number not in self._shown:
            self._shown[number] = StreamedText(self.model.marks if self.offers_tools else None)
            if self.chat:
                found.append(self._chunk(number, {"role": "assistant", "content": ""}))
        shown = self._shown[number]
        if isinstance(piece, TextPiece):
            if text := shown.more(piece.text):
                found.append(self._chunk(number, {"content": text}))
            return found
        whole, reason = self._taken(piece)
        rest = "" if whole.calls else shown.rest(whole.text)
        if rest:
            found.append(self._chunk(number, {"content": rest}))
        if whole.calls:
            calls = [{"index": place, **call} for place, call in enumerate(whole.calls)]
            found.append(self._chunk(number, {"tool_calls": calls}))
        return [*found, {**self._chunk(number, {}, reason), **self._noted()}]

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunks at the end of a stream."""
        if not self.counts_usage:
            return []
        return [{**self._head(chunk=True), "choices": [], "usage": self.usage()}]

    def usage(self) -> dict[str, int]:
        whole = self.prompt_tokens + self.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": whole,
        }

    def _taken(self, finished: Answer) -> tuple[ParsedAnswer, str]:
        self.tokens += finished.tokens
        found = ParsedAnswer(finished.text)
        if self.offers_tools:
            found = parse_answer(finished, self.model.marks)
        self.notes += [note for note in (finished.note, found.note) if note]
        return found, "tool_calls" if found.calls else "stop" if finished.ended else "length"

    def _chunk(
        self, number: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        what = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        chunk = {**self._head(chunk=True), "choices": [self._choice(number, reason, **what)]}
        return {**chunk, "usage": None} if self.counts_usage else chunk

    def _choice(self, number: int, reason: str | None, **what: Any) -> dict[str, Any]:
        return {"index": number, **what, "logprobs": None, "finish_reason": reason}

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }

    def _noted(self) -> dict[str, Any]:
        """Notes on the answers, in a field that OpenAI does not have."""
        return {"notes": list(dict.fromkeys(self.notes))} if self.notes else {}
