"""Weights and the validation share: no row on both sides, whatever the weight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expert.data.pack.drawing import draw_documents, held_out_warning
from expert.data.tokens.documents import FlatDocuments
from expert.data.tokens.row_keys import RowKeys
from tests.data.shards import shard_of
from tests.each import each

counts = st.lists(st.integers(0, 60), min_size=1, max_size=4)


@given(counts, st.just(1.0) | st.floats(0.1, 3.0), st.floats(0, 0.5), st.integers(0, 9))
def test_no_document_is_trained_on_and_held_out(sizes, weight, share, seed):
    weights = [weight] * len(sizes)
    train, held_out = draw_documents(sizes, weights, held_out_share=share, seed=seed)
    assert not set(train.tolist()) & set(held_out.tolist())
    assert set(train.tolist()) | set(held_out.tolist()) <= set(range(sum(sizes)))
    if weight == 1:  # every document is on one side
        assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(sum(sizes)))


def test_a_weight_of_two_takes_every_row_twice_and_a_half_takes_half():
    train, _ = draw_documents([10, 10], [2.0, 0.5], held_out_share=0, seed=1)
    times = np.bincount(train, minlength=20)
    assert times[:10].tolist() == [2] * 10
    assert times[10:].sum() == 5
    assert times[10:].max() == 1


def held_out(count: int, share: float, seed: int) -> list[int]:
    _, found = draw_documents([count], [1.0], held_out_share=share, seed=seed)
    return [int(number) for number in found]


def test_the_draw_is_the_same_for_the_same_seed_and_another_for_another():
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    draws = [draw_documents([50], [0.5], held_out_share=0.2, seed=seed) for seed in (3, 3, 4)]
    assert draws[0][0].tolist() == draws[1][0].tolist() != draws[2][0].tolist()
    assert held_out(1000, 0.1, 42) == held_out(1000, 0.1, 42) != held_out(1000, 0.1, 43)
    # Pinned: a run that is resumed later must hold back the rows it held back before.
    assert held_out(40, 0.1, 42) == [7, 18, 32, 39]
    assert len(held_out(100, 0.07, 42)) == 7  # 7.000000000000001 in floating point
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


def keys(prompts: list[int], answers: list[int] | None = None) -> RowKeys:
    """Documents of a token of prompt and a token of answer, of which the answer is trained on."""
    answers = answers if answers is not None else [0] * len(prompts)
    tokens = [list(pair) for pair in zip(prompts, answers, strict=True)]
    return RowKeys.of(FlatDocuments([shard_of(tokens, [[(1, 2)]] * len(tokens))]))


def drawn(known: RowKeys, share: float, seed: int = 3) -> tuple[list[int], list[int]]:
    count = len(known.whole)
    train, held = draw_documents([count], [1.0], held_out_share=share, seed=seed, keys=known)
    return train.tolist(), held.tolist()


@given(st.lists(st.integers(1, 5), min_size=10, max_size=40), st.integers(0, 9))
def test_rows_with_one_prompt_are_never_on_both_sides(times, seed):
    prompts = [prompt for turn in range(5) for prompt, n in enumerate(times) if turn < n]
    train, held = drawn(keys(prompts, list(range(len(prompts)))), 0.3, seed)
    shared = {prompts[row] for row in train} & {prompts[row] for row in held}
    wanted = -(-len(prompts) * 3 // 10)
    assert not shared
    assert wanted <= 2 * len(held) <= 4 * wanted


@given(st.integers(2, 200), st.floats(0.01, 0.5), st.integers(0, 9))
def test_without_a_repeated_row_the_draw_is_what_it_would_be_without_keys(count, share, seed):
    plain = draw_documents([count], [1.0], held_out_share=share, seed=seed)
    assert drawn(keys(list(range(count))), share, seed) == tuple(side.tolist() for side in plain)


@each(
    ("prompts", "answers", "share", "many", "told"),
    [
        # All have one prompt: only equal answers stay together.
        ([7] * 40, [row // 2 for row in range(40)], 0.1, 4, False),
        # All stand three times: they are held out together even when one was asked for.
        ([row // 3 for row in range(9)], None, 0.1, 3, False),
        # Two stand five hundred times each, or all are equal: as many as were asked for.
        ([row % 2 for row in range(1000)], None, 0.01, 10, True),
        ([1] * 100, None, 0.1, 10, True),
    ],
    ids=["prompt", "three times", "two rows", "equal"],
)
def test_rows_that_repeat_stay_together_as_far_as_the_share_allows(
    prompts, answers, share, many, told
):
    known = keys(prompts, answers)
    train, held = drawn(known, share)
    assert len(held) == many
    assert bool(set(known.whole[train].tolist()) & set(known.whole[held].tolist())) is told
    said = held_out_warning(known, np.array(train), np.array(held))
    assert ("so much that 10 of 10 rows" in said) is told


documents = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), min_size=1)),
    min_size=1,
    max_size=12,
)


@given(documents, st.integers(1, 5))
def test_documents_have_one_key_exactly_where_they_have_the_same_tokens(rows, shard_rows):
    shards = []
    for first in range(0, len(rows), shard_rows):
        part = rows[first : first + shard_rows]
        spans = [[(len(prompt), len(prompt) + len(answer))] for prompt, answer in part]
        shards.append(shard_of([[*prompt, *answer] for prompt, answer in part], spans))
    found = RowKeys.of(FlatDocuments(shards))
    whole = [(*prompt, *answer) for prompt, answer in rows]
    asked = [tuple(prompt) or text for (prompt, _), text in zip(rows, whole, strict=True)]
    for column, texts in ((found.whole, whole), (found.prompt, asked)):
        for one in range(len(rows)):
            same = [texts[one] == text for text in texts]
            assert (column == column[one]).tolist() == same


def test_held_out_rows_that_share_a_prompt_with_training_rows_are_reported():
    """Two requests, ten rows: keeping each on one side would hold out half of the rows."""
    keys = RowKeys(np.array([1, 2] * 5, np.uint64), np.arange(10, dtype=np.uint64))
    train, held_out = draw_documents([10], [1.0], held_out_share=0.1, seed=0, keys=keys)
    told = held_out_warning(keys, train, held_out)
    assert told.startswith("1 of 1 row held out for validation repeat prompts of training rows")
    apart = RowKeys(np.arange(10, dtype=np.uint64), keys.whole)
    assert held_out_warning(apart, train, held_out) == ""
