"""Documents written down as lists, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from expert.data.tokens.documents import Shard
from expert.planning.run_plan import LoaderPlan


def loader_plan(workers: int = 0) -> LoaderPlan:
    """A loader that pins nothing."""
    return LoaderPlan(workers=workers, prefetch=2, persistent_workers=False, pin_memory=False)


def read_back(data: Any) -> list[tuple[str, str]]:
    """(what is trained on, the rest) of every prepared document, decoded token by token."""
    store, decode, found = data.train.open(), data.encoder.decode, []
    for number in range(len(store)):
        ids = np.asarray(store.tokens(number))
        trained = np.zeros(len(ids), np.bool_)
        for start, stop in np.asarray(store.spans(number)).reshape(-1, 2):
            trained[start:stop] = True
        found.append((decode(ids[trained].tolist()), decode(ids[~trained].tolist())))
    return found


def shard_of(tokens: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]]) -> Shard:
    """Documents from lists: the tokens and the trained spans of each."""
    return Shard(
        np.asarray([token for document in tokens for token in document], dtype=np.int32),
        np.cumsum([0, *map(len, tokens)]),
        np.asarray([end for some in spans for span in some for end in span], np.int32),
        np.cumsum([0, *(2 * len(some) for some in spans)]),
    )
