"""How rows were fitted into sequences before: longest first. Kept to be compared with.

Short rows of nearly one length came out sorted: sequences, and steps of one sequence, that held
rows of a single length.
"""

from bisect import bisect_left
from heapq import heapreplace
from typing import Any, NamedTuple

import numpy as np

LEVELLED = (0.9, 0.7, 0.0)  # shares of the tokens that went to the emptiest sequence
WORTH_LEVELLING = 3
TO_SPARE = 0.005


class BinCapacity(NamedTuple):
    places: int
    pieces: int


def fit_longest_first(sizes: list[int], room: BinCapacity) -> tuple[Any, int]:
    """What `expert.data.pack.pack._fit` did: the bin of each piece, and how many bins there are."""
    order = np.argsort(-np.asarray(sizes), kind="stable")
    longest_first = [sizes[piece] for piece in order]
    total = sum(sizes)
    least = max(-(-total // room.places), -(-len(sizes) // room.pieces))
    tried = []
    shares = LEVELLED if len(sizes) >= WORTH_LEVELLING * least else LEVELLED[-1:]
    for share in shares:
        tried.append(_level(longest_first, room, least if share else 0, share * total))
        if tried[-1][1] <= least * (1 + TO_SPARE):
            break
    else:
        tried = [min(tried, key=lambda result: result[1])]
    found, bins = tried[-1]
    placed = np.empty(len(sizes), dtype=np.int64)
    placed[order] = found
    return placed, bins


def _level(
    sizes: list[int], room: BinCapacity, bins: int, levelled: float
) -> tuple[list[int], int]:
    heap = [(-room.places, name) for name in range(bins)]
    counts = [0] * bins
    placed: list[int] = []
    done = 0
    for size in sizes if bins else ():
        negative, name = heap[0]
        if done >= levelled or size > -negative or counts[name] == room.pieces:
            break
        heapreplace(heap, (negative + size, name))
        counts[name] += 1
        placed.append(name)
        done += size
    heap.sort(reverse=True)
    free = [-negative for negative, name in heap if counts[name] < room.pieces]
    names = [name for _, name in heap if counts[name] < room.pieces]
    for size in sizes[len(placed) :]:
        at = bisect_left(free, size)
        if at < len(free):
            name, spare = names.pop(at), free.pop(at) - size
        else:
            name, spare = len(counts), room.places - size
            counts.append(0)
        placed.append(name)
        counts[name] += 1
        if spare and counts[name] < room.pieces:
            at = bisect_left(free, spare)
            free.insert(at, spare)
            names.insert(at, name)
    return placed, len(counts)
