"""Answers as OpenAI's clients expect them: whole, or chunk by chunk."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expert.jobs.sample.answer_writer import begun_stop, cut_at
from expert.jobs.serve.engine import Finished, Piece
from expert.judging.oracles.calls import NOT_UNDERSTOOD, CallMarks, NotACall, calls_in

if TYPE_CHECKING:
    from expert.jobs.serve.models import Model

_ID_LETTERS = string.ascii_letters + string.digits
CALL_ID = 9
"""Letters of a call's id: Mistral's templates want as many."""


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart."""

    text: str | None
    calls: tuple[dict[str, Any], ...] = ()
    note: str = ""


def parsed(finished: Finished, marks: CallMarks | None) -> Parsed:
    """The calls of an answer, and what is said beside them; an answer whose calls cannot be read
    stays text, with the reason."""
    if marks is None:
        return Parsed(finished.text, note=f"calls are left as text: {NOT_UNDERSTOOD}")
    try:
        found = calls_in(finished.marked, marks)
    except NotACall as fault:
        return Parsed(finished.text, note=f"calls are left as text: {fault}")
    if not found:
        return Parsed(finished.text)
    calls = tuple(
        {
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(CALL_ID)),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
        }
        for name, given in found
    )
    beside = finished.marked.partition(marks.opening)[0].strip() if marks.opening else ""
    return Parsed(beside or None, calls)


class Shown:
    """The text of an answer as it is streamed: what may be a call is held back."""

    def __init__(self, marks: CallMarks | None) -> None:
        self._marks, self._text, self._told = marks, "", 0

    def more(self, piece: str) -> str:
        """What can be shown after some more text."""
        self._text += piece
        text, upto = self._text, len(self._text)
        if self._marks is not None and self._marks.opening:
            place = cut_at(text, [self._marks.opening])
            upto = place if place is not None else upto - begun_stop(text, [self._marks.opening])
        elif self._marks is not None and text.lstrip()[:1] in ("", "{", "["):
            upto = 0  # an answer that is JSON is a call
        shown, self._told = text[self._told : upto], max(self._told, upto)
        return shown

    def rest(self, whole: str | None) -> str:
        """What is left to show of the whole."""
        return (whole or "")[self._told :]


@dataclass
class Reply:
    """The reply to one request, of a conversation or of a text."""

    model: Model
    prompt_tokens: int
    chat: bool
    offers_tools: bool = False
    counts_usage: bool = False
    """Of a stream: whether a last chunk says how many tokens there were."""
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    _shown: dict[int, Shown] = field(default_factory=dict)

    def whole(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """Every answer, in the order of their numbers."""
        choices = []
        for each in sorted(finished, key=lambda one: one.answer):
            found, reason = self._taken(each)
            if self.chat:
                said: dict[str, Any] = {"role": "assistant", "content": found.text, "refusal": None}
                said |= {"tool_calls": list(found.calls)} if found.calls else {}
                choices.append(self._choice(each.answer, reason, message=said))
            else:
                choices.append(self._choice(each.answer, reason, text=found.text))
        return {
            **self._head(chunk=False),
            "choices": choices,
            "usage": self.usage(),
            **self._told(),
        }

    def chunks(self, piece: Piece | Finished) -> list[dict[str, Any]]:
        """What a stream sends for some more text, or for the end of an answer."""
        number, found = piece.answer, []
        if number not in self._shown:
            self._shown[number] = Shown(self.model.marks if self.offers_tools else None)
            if self.chat:
                found.append(self._chunk(number, {"role": "assistant", "content": ""}))
        shown = self._shown[number]
        if isinstance(piece, Piece):
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
        return [*found, {**self._chunk(number, {}, reason), **self._told()}]

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
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

    def _taken(self, finished: Finished) -> tuple[Parsed, str]:
        self.tokens += finished.tokens
        found = Parsed(finished.text)
        if self.offers_tools:
            found = parsed(finished, self.model.marks)
        self.notes += [note for note in (finished.note, found.note) if note]
        return found, "tool_calls" if found.calls else finished.reason

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

    def _told(self) -> dict[str, Any]:
        """What is to be said of the answers, in a field that OpenAI does not have."""
        return {"notes": list(dict.fromkeys(self.notes))} if self.notes else {}
