"""The next token of every row, from the scores of all: the likeliest, or one that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.jobs.sampling import Decoding


class Chooser(Protocol):
    """Takes a token of each row's scores."""

    def __call__(self, scores: Tensor) -> Tensor: ...

    def keep(self, index: Tensor) -> None:
        """Only these rows are left."""


def chooser_of(how: Decoding, numbers: Sequence[int], seed: int, device: torch.device) -> Chooser:
    """For rows with these numbers: what a row draws depends on its own and the seed alone."""
    return Likeliest() if how.temperature == 0 else Drawn(how, _draws(how, numbers, seed, device))


class Likeliest:
    """The token of the highest score."""

    def __call__(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)

    def keep(self, index: Tensor) -> None:
        """Nothing to do: it knows nothing of rows."""


class Drawn:
    """Tokens drawn with numbers that were drawn before: a row's do not depend on its neighbours."""

    def __init__(self, how: Decoding, draws: Tensor) -> None:
        self._how, self._draws, self._step = how, draws, 0

    def __call__(self, scores: Tensor) -> Tensor:
        import torch

        how = self._how
        ordered, tokens = (scores / how.temperature).sort(-1, descending=True)
        if how.top_k:
            ordered[:, how.top_k :] = float("-inf")
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares
        shares = shares.where(before < how.top_p, 0.0)
        shares = shares.where(shares >= how.min_p * shares[:, :1], 0.0)
        upto = shares.cumsum(-1)
        aims = self._draws[:, self._step, None] * upto[:, -1:]
        self._step += 1
        places = torch.searchsorted(upto, aims, right=True).clamp(max=scores.shape[1] - 1)
        return tokens.gather(1, places)[:, 0]

    def keep(self, index: Tensor) -> None:
        self._draws = self._draws[index]


def _draws(how: Decoding, numbers: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """A number from 0 to 1 for every token to come, by the seed and the number of the row."""
    import torch

    drawn = []
    for number in numbers:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        drawn.append(torch.rand(how.max_new_tokens, generator=generator))
    return torch.stack(drawn).to(device)


class Penalty:
    """Scores of tokens that a row has seen made less likely."""

    def __init__(self, factor: float, prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
        import torch

        self._factor = factor
        self._seen: Tensor = torch.zeros((len(prompts), vocabulary), dtype=torch.bool)
        for place, prompt in enumerate(prompts):
            self._seen[place, torch.tensor(prompt)] = True

    def to(self, device: torch.device) -> Penalty:
        self._seen = self._seen.to(device)
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        lower = (scores / self._factor).where(scores >= 0, scores * self._factor)
        return lower.where(self._seen, scores)

    def add(self, tokens: Tensor) -> None:
        """Every row has seen one more."""
        self._seen.scatter_(1, tokens[:, None], value=True)

    def keep(self, index: Tensor) -> None:
        self._seen = self._seen[index]
