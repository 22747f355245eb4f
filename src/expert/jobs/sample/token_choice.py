"""Chooses the next token of every row: the most likely, or a random one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from expert.jobs.sample.answer_steps import AnswerModel
    from expert.jobs.sample.decoding import DecodingSettings


class TokenChoice:
    """Chooses the next token of every row, with an optional repetition penalty.

    A row's random numbers depend only on its number and the seed.
    """

    def __init__(
        self,
        how: DecodingSettings,
        prompts: Mapping[int, Sequence[int]],
        seed: int,
        answer_model: AnswerModel,
    ) -> None:
        """`prompts`: by row number."""
        self._how, self._step = how, 0
        self._draws: Tensor | None = None
        """Drawn in advance, so that a row's numbers do not depend on its neighbours."""
        if how.temperature > 0:
            self._draws = row_draws(how, prompts, seed).to(answer_model.device)
        self._penalty: Penalty | None = None
        if how.repetition_penalty != 1.0:
            seen = seen_tokens(list(prompts.values()), answer_model.vocabulary).to(
                answer_model.device
            )
            self._penalty = Penalty(how.repetition_penalty, seen)

    def of(self, scores: Tensor) -> Tensor:
        """The next tokens for these scores."""
        if self._penalty is not None:
            scores = self._penalty(scores)
        if self._draws is None:
            return scores.argmax(-1)
        self._step += 1
        return sample_tokens(scores, self._how, self._draws[:, self._step - 1])

    def append_tokens(self, tokens: Tensor) -> None:
        """Record the tokens that were added to the rows."""
        if self._penalty is not None:
            self._penalty.add(tokens)

    def keep(self, index: Tensor) -> None:
        if self._draws is not None:
            self._draws = self._draws[index]
        if self._penalty is not None:
            self._penalty.keep(index)


def sample_tokens(scores: Tensor, how: DecodingSettings, draws: Tensor) -> Tensor:
    """Sample a token for every row, given a number from 0 to 1 for each."""
    import torch

    ordered, tokens = (scores / how.temperature).sort(-1, descending=True)
    if how.top_k:
        ordered[:, how.top_k :] = float("-inf")
    shares = ordered.softmax(-1)
    before = shares.cumsum(-1) - shares
    shares = shares.where(before < how.top_p, 0.0)
    shares = shares.where(shares >= how.min_p * shares[:, :1], 0.0)
    upto = shares.cumsum(-1)
    aims = draws[:, None] * upto[:, -1:]
    places = torch.searchsorted(upto, aims, right=True).clamp(max=scores.shape[1] - 1)
    return tokens.gather(1, places)[:, 0]


class Penalty:
    """Lowers the scores of tokens that a row has seen."""

    def __init__(self, factor: float, seen: Tensor) -> None:
        self._factor, self._seen, self.device = factor, seen, seen.device

    def __call__(self, scores: Tensor) -> Tensor:
        lower = (scores / self._factor).where(scores >= 0, scores * self._factor)
        return lower.where(self._seen, scores)

    def add(self, tokens: Tensor) -> None:
        """Record the tokens that were added to the rows."""
        self._seen.scatter_(1, tokens[:, None], value=True)

    def keep(self, index: Tensor) -> None:
        self._seen = self._seen[index]


def row_draws(how: DecodingSettings, numbers: Iterable[int], seed: int) -> Tensor:
    """A number from 0 to 1 for every coming token, from the seed and the row number."""
    import torch

    draws = []
    for number in numbers:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        draws.append(torch.rand(how.max_new_tokens, generator=generator))
    return torch.stack(draws)


def seen_tokens(prompts: Sequence[Sequence[int]], vocabulary: int) -> Tensor:
    """Which tokens are in each prompt."""
    import torch

    seen = torch.zeros((len(prompts), vocabulary), dtype=torch.bool)
    for place, prompt in enumerate(prompts):
        seen[place, torch.tensor(prompt)] = True
    return seen
