"""Follows an answer while it is generated: its text so far, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Tell = Callable[[str], None]
"""Gets the text piece by piece."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt."""

    text: str
    marked: str
    """The same with its special tokens: some templates mark tool calls by them."""
    tokens: int
    ended: bool
    """It ended by itself; otherwise it was cut."""
    note: str = ""
    """A remark for the user."""
    number: int = 0
    """Which of several answers it is."""
    refused: str = ""
    """Why there is no answer."""
    scored: Sequence[Any] = ()
    """Its tokens with their probabilities, if these were asked for."""


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop sequence starts; None if there is none."""
    places = [text.index(stop) for stop in stops if stop and stop in text]
    return min(places) if places else None


def partial_stop_length(text: str, stops: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the start of a stop sequence."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(s[:n] == text[-n:] for s in stops if len(s) > n)), 0)


class AnswerWriter:
    """Collects the tokens of one answer, reports its text, and knows when it has ended."""

    def __init__(
        self,
        tokenizer: Any,
        ends: Sequence[int],
        stops: Sequence[str],
        tell: Tell | None,
        *,
        strip: bool,
        special: bool = False,
    ) -> None:
        """`special`: special tokens are part of the text."""
        self.ids: list[int] = []
        self.ended = False
        self._tokenizer, self._ends, self._stops = tokenizer, ends, stops
        self._tell, self._strip, self._shown = tell, strip, 0
        self._special = special or bool(stops)

    def is_end(self, token: int) -> bool:
        return token in self._ends

    def take(self, token: int) -> None:
        self.ids.append(token)
        self.ended = self.is_end(token) or self._has_stop()
        if self._tell is None:
            return
        shown = self.text()
        # A character may still be missing bytes, and a stop sequence its end.
        if not self.ended and not shown.endswith("\ufffd"):
            shown = shown[: len(shown) - partial_stop_length(shown, self._stops)]
            self._tell(shown[self._shown :])
            self._shown = max(self._shown, len(shown))

    def end(self) -> None:
        """Report the text that was held back."""
        if self._tell is not None:
            self._tell(self.text()[self._shown :])

    def text(self, *, special: bool = False) -> str:
        """The text without what ended it; on request with its special tokens."""
        ids = [token for token in self.ids if token not in self._ends]
        text = self._decoded(ids, special=special or self._special)
        place = stop_position(text, self._stops)
        text = text if place is None else text[:place]
        return text.strip() if self._strip else text

    def _has_stop(self) -> bool:
        if not self._stops:
            return False
        # A character has at most four tokens; everything is decoded only if the tail has a stop.
        tail = self._decoded(self.ids[-4 * max(map(len, self._stops)) - 8 :])
        found = stop_position(tail, self._stops) is not None
        return found and stop_position(self._decoded(self.ids), self._stops) is not None

    def _decoded(self, ids: list[int], *, special: bool = True) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=not special))
