"""What follows an answer while it is generated: its text as it comes, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Tell = Callable[[str], None]
"""Told the text as it comes, piece by piece."""


def cut_at(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stops begins; None where none occurs."""
    places = [text.index(stop) for stop in stops if stop and stop in text]
    return min(places) if places else None


def writer_of(tokenizer: Any, ends: list[int], stops: list[str], tell: Tell, *, strip: bool) -> Any:
    """A streamer of transformers that follows what is generated and says when to stop."""
    import torch
    from transformers import StoppingCriteria
    from transformers.generation.streamers import BaseStreamer

    class Stops(StoppingCriteria):
        def __init__(self, over: Callable[[], bool]) -> None:
            self._over = over

        def __call__(self, input_ids: Any, scores: Any, **more: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), self._over(), device=input_ids.device)

    class Writer(BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False
            self.stops = Stops(lambda: self.ended)
            self._prompt_seen = False
            self._told = 0

        def put(self, value: Any) -> None:
            if not self._prompt_seen:  # transformers hands over the prompt first
                self._prompt_seen = True
                return
            self.ids += value.flatten().tolist()
            whole = self._whole()
            self.ended = bool(self.ids) and self.ids[-1] in ends
            self.ended = self.ended or cut_at(whole, stops) is not None
            shown = self.text()
            # A character may still lack bytes, and a stop its end.
            if not self.ended and not shown.endswith("�"):
                tell(shown[self._told :])
                self._told = max(self._told, len(shown))

        def end(self) -> None:
            tell(self.text()[self._told :])

        def _whole(self) -> str:
            return str(tokenizer.decode(self.ids, skip_special_tokens=False))

        def text(self) -> str:
            """What was said, without what ended it."""
            said = [token for token in self.ids if token not in ends]
            text = str(tokenizer.decode(said, skip_special_tokens=not stops))
            place = cut_at(text, stops)
            text = text if place is None else text[:place]
            return text.strip() if strip else text

    return Writer()
