"""Weights and the validation share: no row on both sides, whatever the weight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.data.drawing import draw_documents

counts = st.lists(st.integers(0, 60), min_size=1, max_size=4)


@given(counts, st.floats(0.1, 3.0), st.floats(0, 0.5), st.integers(0, 9))
def test_no_document_is_trained_on_and_held_out(sizes, weight, share, seed):
    weights = [weight] * len(sizes)
    train, held_out = draw_documents(sizes, weights, held_out_share=share, seed=seed)
    assert not set(train.tolist()) & set(held_out.tolist())
    assert set(train.tolist()) | set(held_out.tolist()) <= set(range(sum(sizes)))


@given(counts, st.floats(0, 0.5), st.integers(0, 9))
def test_with_a_weight_of_one_every_document_is_on_one_side(sizes, share, seed):
    train, held_out = draw_documents(sizes, [1.0] * len(sizes), held_out_share=share, seed=seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(sum(sizes)))


def test_a_weight_of_two_takes_every_row_twice_and_a_half_takes_half():
    train, _ = draw_documents([10, 10], [2.0, 0.5], held_out_share=0, seed=1)
    times = np.bincount(train, minlength=20)
    assert times[:10].tolist() == [2] * 10
    assert times[10:].sum() == 5
    assert times[10:].max() == 1


def test_the_draw_depends_on_the_seed_alone():
    first = draw_documents([50], [0.5], held_out_share=0.2, seed=3)
    assert np.array_equal(first[0], draw_documents([50], [0.5], held_out_share=0.2, seed=3)[0])
    assert not np.array_equal(first[0], draw_documents([50], [0.5], held_out_share=0.2, seed=4)[0])
