"""A baseline that has learnt nothing: the answer of the training row whose prompt is most alike.

Where it does well, the task needs no learning. Prompts are compared by their runs of three
characters, weighed down by how many rows share them (TF-IDF and cosine).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from data_making.rows import Made

GRAM = 3


class Nearest:
    """Training rows, ready to be searched."""

    def __init__(self, rows: Sequence[Made]) -> None:
        self._rows = rows
        counted = [_grams(row.prompt) for row in rows]
        found_in = Counter(gram for grams in counted for gram in grams)
        self._weight = {gram: math.log(1 + len(rows) / n) for gram, n in found_in.items()}
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, grams in enumerate(counted):
            weighed = {gram: n * self._weight[gram] for gram, n in grams.items()}
            length = math.sqrt(sum(w * w for w in weighed.values())) or 1.0
            for gram, w in weighed.items():
                self._postings[gram].append((number, w / length))

    def answer(self, prompt: str) -> str:
        """The answer of the row that is most alike."""
        scores: dict[int, float] = defaultdict(float)
        for gram, n in _grams(prompt).items():
            for number, weight in self._postings.get(gram, ()):
                scores[number] += n * self._weight[gram] * weight
        best = max(scores, key=lambda number: (scores[number], -number), default=0)
        return self._rows[best].output


def _grams(text: str) -> Counter[str]:
    return Counter(text[at : at + GRAM] for at in range(len(text) - GRAM + 1))
