"""Chooses the next token of every row: the most likely, or a random one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expert.answer.decoding import DecodingSettings

TIE = 1e-3
"""Float32 logits in a batch differ from those of a row alone by up to 3e-5 with `tiny`, 9e-5 with
SmolLM2-135M."""


def choose_tokens(
    scores: Tensor, rows: Sequence[Any], *, exact: bool
) -> tuple[list[int], list[bool]]:
    """The next token of every AnswerRow, and whether rounding may have decided it; changes
    `scores`. Rows with the same sampling settings are sampled together."""
    _penalise(scores, rows)
    tokens = scores.argmax(-1)
    doubtful = [False] * len(rows)
    if exact:
        first, second = scores.topk(2).values.unbind(-1)
        doubtful = (first - second < TIE).tolist()
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if row.draws is not None:
            how = row.how
            key = (how.temperature, how.top_p, how.top_k, how.min_p)
            alike.setdefault(key, []).append(place)
            doubtful[place] = False
    for places in alike.values():
        index = torch.tensor(places, device=scores.device)
        group = [rows[place] for place in places]
        draws = torch.stack([row.draws[len(row.writer.ids)] for row in group])
        tokens[index] = sample_tokens(scores[index], group[0].how, draws.to(scores.device))
    ids: list[int] = tokens.tolist()
    return ids, doubtful


def _penalise(scores: Tensor, rows: Sequence[Any]) -> None:
    """Lower the scores of tokens that a row has seen, if it has a repetition penalty."""
    seen = [
        (place, token, row.how.repetition_penalty)
        for place, row in enumerate(rows)
        if row.how.repetition_penalty != 1.0
        for token in row.ids
    ]
    if seen:
        places, ids, factors = zip(*seen, strict=True)
        index = torch.tensor(places, device=scores.device), torch.tensor(ids, device=scores.device)
        before, factor = scores[index], torch.tensor(factors, device=scores.device)
        scores[index] = torch.where(before >= 0, before / factor, before * factor)


def sample_tokens(scores: Tensor, how: DecodingSettings, draws: Tensor) -> Tensor:
    """Sample a token for every row, given a number from 0 to 1 for each."""
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


def row_draws(how: DecodingSettings, seed: int, number: int) -> Tensor:
    """A number from 0 to 1 for every coming token, from the seed and the row's number: they are
    drawn in advance, so that they do not depend on the row's neighbours."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.rand(how.max_new_tokens, generator=generator)
