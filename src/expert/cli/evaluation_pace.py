"""How far an evaluation is, how fast it goes, and how long it will still take, in words."""

from __future__ import annotations

from dataclasses import dataclass

from expert.cli.event_words import time_in_words

SECONDS_UNSEEN = 2.0
"""An evaluation that is shorter than this is over before anybody asks how far it is."""


@dataclass
class EvaluationPace:
    """One evaluation, from its first batch on."""

    split: str
    total: int
    began: float
    first: tuple[int, float] | None = None
    """Rows of the first batch, and when it was launched: that one may compile."""

    def moved(self, rows: int, now: float) -> None:
        """So many rows were launched by now."""
        if self.first is None and rows:
            self.first = (rows, now)

    def is_long(self, now: float) -> bool:
        """Whether it has taken so long that it is shown."""
        return now - self.began >= SECONDS_UNSEEN

    def parts(self, rows: int, now: float) -> dict[str, str]:
        """What is shown of it, in order; a pace is not known before the second batch."""
        words = {"step": f"evaluating {self.split}: {rows:,}/{self.total:,} rows"}
        before, since = self.first or (rows, now)
        if rows <= before or now <= since:
            return words
        rate = (rows - before) / (now - since)
        left = max(0, self.total - rows) / rate
        fast = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return words | {"speed": f"{fast} rows/s", "eta": f"ETA {time_in_words(left)}"}
