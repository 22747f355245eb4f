"""The packed sequences of a step hold the requested number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.pack.pack import bins_per_step, pack_best_fit, pack_concat
from expert.data.pack.packing import best_packing
from expert.planning.choose.sequences import ROWS_TOLERANCE, concatenation_of
from tests.each import each


def packed(lengths: np.ndarray, length: int, examples: int, *, streaming: bool = False):
    """Rows of a step on average, and the share of places that hold a token."""
    sizes = lengths.astype(np.int32)
    shortest = length if streaming else int(sizes.max())
    made = best_packing(sizes, examples, length, shortest=shortest)
    index = pack_best_fit(sizes, made.length, 0, most_pieces=made.most_rows)
    rows = bins_per_step(index, examples) * index.examples / index.bins
    return rows, index.statistics().fill


@given(
    examples=st.integers(1, 80),
    mean=st.integers(8, 300),
    spread=st.floats(0.0, 0.9),
    length=st.sampled_from([256, 1000, 1024, 2048]),
)
def test_a_step_has_the_requested_number_of_rows(examples, mean, spread, length):
    draw = np.random.default_rng(0)
    low, high = max(1, int(mean * (1 - spread))), int(mean * (1 + spread)) + 1
    lengths = np.minimum(draw.integers(low, high + 1, 1000), length)
    rows, _ = packed(lengths, length, examples)
    # And half a row: 9 rows in 2 sequences are 4 or 5 in each.
    assert rows == pytest.approx(examples, rel=1.5 * ROWS_TOLERANCE, abs=0.5)


@each(
    ("lengths", "length", "examples"),
    [
        (np.full(3000, 300), 1024, 16),
        (np.random.default_rng(1).lognormal(np.log(500) - 0.4, 0.9, 3000), 2048, 16),
        (np.random.default_rng(2).choice([50, 1000], 3000, p=[0.85, 0.15]), 1024, 8),
        (np.r_[np.full(2000, 22), 900], 1024, 16),
    ],
    ids=["300", "lognormal", "two kinds", "one long row"],
)
def test_steps_have_the_requested_rows_for_all_length_distributions(lengths, length, examples):
    rows, _ = packed(np.minimum(lengths, length), length, examples)
    assert rows == pytest.approx(examples, rel=0.07)


def test_sequences_are_as_they_were_as_full_and_as_long_as_the_rows_allow():
    rows, _ = packed(np.full(2000, 22), 1024, 16, streaming=True)  # of one length in a stream
    assert rows == pytest.approx(16, rel=0.01)
    lengths = np.random.default_rng(0).integers(20, 180, 4000).astype(np.int32)
    assert best_packing(lengths, 64, 1024, shortest=180) == (6, 1024, None)  # whole ones do
    _, fill = packed(np.random.default_rng(0).integers(10, 40, 4000), 1024, 16)
    assert fill > 0.93
    assert best_packing(np.arange(10, 41, dtype=np.int32), 1, 512, shortest=40) == (1, 40, 1)


@given(examples=st.integers(1, 80), mean=st.integers(8, 1000))
def test_steps_of_concatenated_rows_have_the_requested_rows(examples, mean):
    lengths = np.full(4000, mean)
    made = concatenation_of(examples, mean=mean, length=1024)
    index = pack_concat(lengths, made.length, 0)
    rows = made.sequences * index.examples / index.bins
    # A sequence is a multiple of 8 places, and a row of 8 places a sequence of its own.
    assert rows == pytest.approx(examples, rel=ROWS_TOLERANCE, abs=8 / mean)
