"""Responses in OpenAI's format: complete, or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from expert.answer.writer import Answer, partial_stop_length, stop_position
from expert.jobs.serve.engine import TextPiece
from expert.jobs.serve.requests import ChatRequest, TextRequest
from expert.judging.oracles.calls import UNREADABLE_CALLS, CallMarks, NotACall, calls_in

if TYPE_CHECKING:
    from expert.jobs.serve.models import ServedModel

_ID_LETTERS = string.ascii_letters + string.digits
CALL_ID = 9
"""Length of a tool call's id: Mistral's templates require nine letters."""
Calls = list[dict[str, Any]]


def parse_answer(finished: Answer, marks: CallMarks | None) -> tuple[str | None, Calls]:
    """The text of an answer before its tool calls, and these; NotACall if they are invalid."""
    if marks is None:
        raise NotACall(UNREADABLE_CALLS)
    calls = [
        {
            "id": "".join(secrets.choice(_ID_LETTERS) for _ in range(CALL_ID)),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in calls_in(finished.marked, marks)
    ]
    if not calls:
        return finished.text, []
    before = finished.marked.partition(marks.opening)[0].strip() if marks.opening else ""
    return before or None, calls


def length_before_calls(text: str, marks: CallMarks | None) -> int:
    """How much of the beginning of an answer cannot be a tool call, nor the start of one."""
    if marks is not None and marks.opening:
        place = stop_position(text, [marks.opening])
        return len(text) - partial_stop_length(text, [marks.opening]) if place is None else place
    # Without a mark an answer in JSON is a tool call.
    return 0 if marks is not None and text.lstrip()[:1] in ("", "{", "[") else len(text)


@dataclass
class Reply:
    """The response to one chat or text completion request."""

    model: ServedModel
    request: ChatRequest | TextRequest
    prompt_tokens: int
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    _texts: dict[int, str] = field(default_factory=dict)
    """Of a stream: the texts so far, by number."""
    _sent: dict[int, int] = field(default_factory=dict)
    """How much of each was sent; what may be a tool call is held back."""
    _scored: dict[int, list[Any]] = field(default_factory=dict)
    """Tokens whose probabilities are still to be sent, by number."""
    _offsets: dict[int, int] = field(default_factory=dict)
    """Where the text of the next of them starts."""

    @property
    def chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    def whole(self, finished: Sequence[Answer]) -> dict[str, Any]:
        """The complete response with all answers."""
        choices = []
        for answer in sorted(finished, key=lambda answer: answer.number):
            text, calls, reason = self._taken(answer)
            what: dict[str, Any] = {"text": text}
            if self.chat:
                called = {"tool_calls": calls} if calls else {}
                message = {"role": "assistant", "content": text, "refusal": None, **called}
                what = {"message": message}
            choices.append(self._choice(answer.number, reason, answer.scored, **what))
        told = {"usage": self.usage(), **self._noted()}
        return {**self._head(chunk=False), "choices": choices, **told}

    def chunks(self, piece: TextPiece | Answer) -> list[dict[str, Any]]:
        """The chunks to stream for a piece of text, or for the end of an answer."""
        number, found = piece.number, []
        if number not in self._texts:
            self._texts[number], self._sent[number], self._scored[number] = "", 0, []
            if self.chat:
                found.append(self._chunk(number, {"role": "assistant", "content": ""}))
        sent = self._sent[number]
        if isinstance(piece, TextPiece):
            self._scored[number] += piece.scored
            text = self._texts[number] = self._texts[number] + piece.text
            marks = self.model.marks if self.request.offers_tools else None
            upto = self._sent[number] = max(sent, length_before_calls(text, marks))
            if upto > sent:
                found.append(self._chunk(number, {"content": text[sent:upto]}))
            return found
        whole, calls, reason = self._taken(piece)
        if calls:
            numbered = [{"index": place, **call} for place, call in enumerate(calls)]
            found.append(self._chunk(number, {"tool_calls": numbered}))
        elif rest := (whole or "")[sent:]:
            found.append(self._chunk(number, {"content": rest}))
        return [*found, {**self._chunk(number, {}, reason), **self._noted()}]

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunks at the end of a stream."""
        if not self.request.counts_usage:
            return []
        return [{**self._head(chunk=True), "choices": [], "usage": self.usage()}]

    def usage(self) -> dict[str, int]:
        whole = self.prompt_tokens + self.tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": whole,
        }

    def _taken(self, finished: Answer) -> tuple[str | None, Calls, str]:
        """The text and the calls of an answer, and why it ended; invalid calls stay text, with a
        note."""
        self.tokens += finished.tokens
        self.notes += [finished.note] if finished.note else []
        text: str | None = finished.text
        calls: Calls = []
        if self.request.offers_tools:
            try:
                text, calls = parse_answer(finished, self.model.marks)
            except NotACall as fault:
                self.notes.append(f"calls are left as text: {fault}")
        return text, calls, "tool_calls" if calls else "stop" if finished.ended else "length"

    def _chunk(
        self, number: int, delta: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        what = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        scored: list[Any] = []
        if "role" not in delta:
            scored, self._scored[number] = self._scored[number], []
        choice = self._choice(number, reason, scored, **what)
        chunk = {**self._head(chunk=True), "choices": [choice]}
        return {**chunk, "usage": None} if self.request.counts_usage else chunk

    def _choice(
        self, number: int, reason: str | None, scored: Sequence[Any], **what: Any
    ) -> dict[str, Any]:
        shares = None
        if self.request.alternatives is not None and scored:
            shares = (
                self._chat_logprobs(scored) if self.chat else self._text_logprobs(number, scored)
            )
        return {"index": number, **what, "logprobs": shares, "finish_reason": reason}

    def _chat_logprobs(self, scored: Sequence[Any]) -> dict[str, Any]:
        def entry(token: int, share: float) -> dict[str, Any]:
            text = self._token(token)
            known = list(text.encode()) if "\ufffd" not in text else None  # part of a character
            return {"token": text, "logprob": share, "bytes": known}

        entries = [
            {**entry(token, share), "top_logprobs": [entry(*each) for each in top]}
            for token, share, top in scored
        ]
        return {"content": entries, "refusal": None}

    def _text_logprobs(self, number: int, scored: Sequence[Any]) -> dict[str, Any]:
        tokens, shares, best = zip(*scored, strict=True)
        texts = [self._token(token) for token in tokens]
        *starts, end = accumulate(map(len, texts), initial=self._offsets.get(number, 0))
        self._offsets[number] = end
        tops = [{self._token(token): share for token, share in top} for top in best]
        return {
            "tokens": texts,
            "token_logprobs": list(shares),
            "top_logprobs": tops,
            "text_offset": starts,
        }

    def _token(self, token: int) -> str:
        return str(self.model.trained.encoder.decode([token]))

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
