"""Numbers as people say them; the words themselves lie in core, where reports read them too."""

from __future__ import annotations

from expert.core.text import count, counted, duration, gib, loss, value_in_words

__all__ = ["count", "counted", "duration", "gib", "loss", "value_in_words"]
