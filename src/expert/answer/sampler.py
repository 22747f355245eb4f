"""Chooses the next token of every row: the most likely, or a random one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from expert.answer.decoding import DecodingSettings

Scored = tuple[int, float, list[tuple[int, float]]]
"""A token with the logarithm of its probability, and the most likely tokens with theirs: as the
model has them, before any penalty or grammar."""
TIE = 1e-3
"""Float32 logits in a batch differ from those of a row alone by up to 3e-5 with `tiny`, 9e-5 with
SmolLM2-135M."""


def choose_tokens(
    scores: Tensor, rows: Sequence[Any], *, exact: bool
) -> tuple[list[int], list[bool], dict[int, Scored]]:
    """The next token of every AnswerRow, whether rounding may have decided it, and the
    probabilities of rows that want them; changes `scores`. Rows with the same sampling settings are
    sampled together."""
    wanting = [place for place, row in enumerate(rows) if row.logprobs is not None]
    shares = (
        scores[torch.tensor(wanting, device=scores.device)].log_softmax(-1) if wanting else None
    )
    _penalise(scores, rows)
    _forbid(scores, rows)
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
    scored: dict[int, Scored] = {}
    if shares is not None:
        best = shares.topk(max(1, *(rows[place].logprobs for place in wanting)))
        values, others = best.values.tolist(), best.indices.tolist()
        for number, place in enumerate(wanting):
            most, token = rows[place].logprobs, ids[place]
            top = list(zip(others[number][:most], values[number][:most], strict=True))
            scored[place] = token, float(shares[number, token]), top
    return ids, doubtful, scored


def _penalise(scores: Tensor, rows: Sequence[Any]) -> None:
    """Lower the scores of tokens that a row has seen, if it has a repetition penalty, and of those
    in its answer, if it has a frequency or presence penalty."""
    seen = [
        (place, token, row.how.repetition_penalty)
        for place, row in enumerate(rows)
        if row.how.repetition_penalty != 1.0
        for token in row.ids
    ]
    if seen:
        index, factor = _placed(seen, scores.device)
        before = scores[index]
        scores[index] = torch.where(before >= 0, before / factor, before * factor)
    written = [
        (place, token, count * row.how.frequency_penalty + row.how.presence_penalty)
        for place, row in enumerate(rows)
        if row.how.frequency_penalty or row.how.presence_penalty
        for token, count in Counter(row.writer.ids).items()
    ]
    if written:
        index, penalty = _placed(written, scores.device)
        scores[index] -= penalty


def _forbid(scores: Tensor, rows: Sequence[Any]) -> None:
    """Rule out the tokens that the grammars of rows do not allow."""
    places = [place for place, row in enumerate(rows) if row.grammar is not None]
    if not places:
        return
    masks = [torch.frombuffer(rows[place].grammar.mask(), dtype=torch.uint8) for place in places]
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    allowed = (torch.stack(masks).to(scores.device)[:, :, None] >> bits) & 1
    allowed = allowed.flatten(1)[:, : scores.shape[1]].bool()
    index = torch.tensor(places, device=scores.device)
    scores[index] = scores[index].masked_fill(~allowed, float("-inf"))


def _placed(
    found: list[tuple[int, int, float]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Where rows have tokens, and a number for each."""
    places, ids, numbers = zip(*found, strict=True)
    index = torch.tensor(places, device=device), torch.tensor(ids, device=device)
    return index, torch.tensor(numbers, device=device)


def sample_tokens(scores: Tensor, how: DecodingSettings, draws: Tensor) -> Tensor:
    """Sample a token for every row, given a number from 0 to 1 for each."""
    if not how.top_k and how.top_p >= 1 and not how.min_p:  # sorting takes longer than all the rest
        shares = (scores / how.temperature).softmax(-1)
        upto = shares.cumsum(-1)
        found = torch.searchsorted(upto, draws[:, None] * upto[:, -1:], right=True)
        found = found.clamp(max=scores.shape[1] - 1)
        # Sums are rounded: never one without a share.
        there = shares.gather(1, found) > 0
        return torch.where(there[:, 0], found[:, 0], scores.argmax(-1))
    ordered, tokens = (scores / how.temperature).sort(-1, descending=True)
    if how.top_k:
        ordered[:, how.top_k :] = float("-inf")
    shares = ordered.softmax(-1)
    before = shares.cumsum(-1) - shares
    shares = shares.where(before < how.top_p, 0.0)
    shares = shares.where(shares >= how.min_p * shares[:, :1], 0.0)
    upto = shares.cumsum(-1)
    aims = draws[:, None] * upto[:, -1:]
    places = torch.searchsorted(upto, aims, right=True)
    # Sums are rounded: never one without a share.
    places = torch.minimum(places, (shares > 0).sum(-1, keepdim=True) - 1)
    return tokens.gather(1, places)[:, 0]


def row_draws(how: DecodingSettings, seed: int, number: int) -> Tensor:
    """A number from 0 to 1 for every coming token, from the seed and the row's number: they are
    drawn in advance, so that they do not depend on the row's neighbours."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.rand(how.max_new_tokens, generator=generator)
