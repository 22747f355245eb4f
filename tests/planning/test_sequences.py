"""Packed sequences hold as many rows of an update as were asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.pack import bins_per_update, pack_best_fit
from expert.planning.sequences import ROWS_OFF, packing_of


def rows_of_an_update(lengths: np.ndarray, length: int, examples: int, **more: bool) -> float:
    """The mean, of rows packed as the rule says."""
    made = packing_of(
        examples, mean=float(lengths.mean()), longest=float(lengths.max()), length=length, **more
    )
    index = pack_best_fit(lengths, made.length, 0, most_pieces=made.most_rows)
    return bins_per_update(index, examples) * index.examples / index.bins


@given(
    examples=st.integers(1, 80),
    mean=st.integers(8, 300),
    spread=st.floats(0.0, 0.9),
    length=st.sampled_from([256, 1000, 1024, 2048]),
)
def test_an_update_has_the_rows_that_were_asked_for(examples, mean, spread, length):
    draw = np.random.default_rng(0)
    low, high = max(1, int(mean * (1 - spread))), int(mean * (1 + spread)) + 1
    lengths = np.minimum(draw.integers(low, high + 1, 4000), length).astype(np.int32)
    # Twice what the rule allows: 4,000 rows fill their last sequences less than 99 %. And a row: 9
    # rows in 2 sequences are 4 or 5 in each.
    rows = rows_of_an_update(lengths, length, examples)
    assert rows == pytest.approx(examples, rel=2 * ROWS_OFF, abs=1)


@pytest.mark.parametrize("shorter", [True, False])
def test_one_long_row_does_not_fill_updates_with_short_ones(shorter):
    lengths = np.full(2000, 22, dtype=np.int32)
    lengths[7] = 900
    assert rows_of_an_update(lengths, 1024, 16, shorter=shorter) == pytest.approx(16, rel=0.01)


def test_sequences_keep_their_length_where_whole_ones_hold_the_rows():
    assert packing_of(64, mean=100, longest=900, length=1024) == (6, 1024, None)
    assert packing_of(8, mean=2000, longest=2048, length=2048) == (8, 2048, None)


def test_sequences_are_shorter_where_one_holds_more_rows_than_an_update():
    made = packing_of(16, mean=22, longest=40, length=1024)
    assert made == (1, 360, None)  # 16 · 22 / 0.99 = 355.6, to a multiple of 8


def test_an_update_of_one_row_is_one_row():
    assert packing_of(1, mean=20, longest=40, length=512) == (1, 40, 1)
