"""Packing: every token once, no bin too long, few places empty, the order random."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ExpertError
from expert.data.pack.pack import pack_best_fit, pack_blocks, pack_concat, pack_none, shifted_blocks
from expert.data.pack.pack_index import PackIndex
from tests.each import each

POLICIES = ("cut", "split", "drop")

Pack = Callable[..., PackIndex]


def best_fit(lengths, length: int, **more) -> PackIndex:
    return pack_best_fit(lengths, length, 1, window=16, **more)


def concat(lengths, length: int, overlong: str = "split", **more) -> PackIndex:
    assert overlong == "split"
    return pack_concat(lengths, length, 1, **more)


every_rule = pytest.mark.parametrize("pack", [best_fit, concat, pack_none])
document_lengths = st.lists(st.integers(0, 70), max_size=80).map(lambda some: np.array(some, int))
policies = st.sampled_from(POLICIES)


def lognormal_lengths(mean: float, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sigma = 0.9
    return np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)).astype(np.int32)


def pieces_of(index: PackIndex) -> list[list[tuple[int, int, int]]]:
    return [list(index.pieces(number)) for number in range(index.bins)]


@every_rule
@given(lengths=document_lengths, length=st.integers(5, 40), policy=policies, soft=st.integers(0, 4))
def test_every_token_is_in_one_piece_or_counted_as_lost(pack: Pack, lengths, length, policy, soft):
    policy = "split" if pack is concat else policy
    index = pack(lengths, length, overlong=policy, soft_tokens=soft)
    bins, pieces = pieces_of(index), list(chain(*pieces_of(index)))
    tokens = Counter((document, at) for document, a, b in pieces for at in range(a, b))
    assert set(tokens.values()) <= {1}
    limit = length - soft
    kept = {
        "cut": np.minimum(lengths, limit),
        "split": lengths,
        "drop": lengths * (lengths <= limit),
    }
    expected = {(d, place) for d, stop in enumerate(kept[policy]) for place in range(stop)}
    assert set(tokens) == expected
    assert index.overlong.tokens_lost == lengths.sum() - len(expected)
    counted = {"cut": index.overlong.cut, "split": index.overlong.split}
    assert counted.get(policy, index.overlong.dropped) == int((lengths > limit).sum())
    # No bin is empty or too long.
    taken = [sum(stop - start + soft for _, start, stop in some) for some in bins]
    assert all(0 < places <= length for places in taken)
    assert index.bin_lengths().tolist() == taken
    # The examples of all pieces are the rows that an unpacked run would have.
    examples = [index.examples_in(start, stop) for _, start, stop in pieces]
    assert min(examples, default=0) >= 0
    unpacked = pack_none(lengths, length, overlong=policy, soft_tokens=soft)
    assert sum(examples) == index.examples == unpacked.bins
    if pack is pack_none:
        assert {len(some) for some in bins} <= {1}
        assert (np.diff(index.piece_document) >= 0).all()


@every_rule
def test_pieces_without_trained_tokens_are_left_out_and_counted(pack):
    lengths = np.array([4, 5, 0, 12, 3])
    index = pack(lengths, 5, overlong="split", unlearnt=np.array([0, 2]))
    found = {document for some in pieces_of(index) for document, _, _ in some}
    if index.rule == "concat":  # there a number is that of a document with tokens: 0 and 3 go
        assert (found, index.overlong.unlearnt, index.examples) == ({1, 4}, 2, 2)
    else:  # documents 0 and the first part of 3 go; the rest of 3 stays
        assert (found, index.overlong.unlearnt, index.examples) == ({1, 3, 4}, 1, 4)


@each(
    ("lengths", "length"),
    [
        *((lognormal_lengths(mean, 20_000), n) for mean in (404, 983) for n in (2048, 4096, 16384)),
        # 4,096 documents fill 20 bins and a bit; with that bit left in each window it is 97 %.
        (lognormal_lengths(82, 40_000), 16384),
        # Like the rows of a table of questions: no short ones to close the gaps. 95 % where the
        # emptiest bins of a window are not given another chance.
        (np.random.default_rng(0).normal(92, 12, 25_000).astype(np.int32), 16384),
    ],
)
def test_best_fit_fills_bins_to_99_percent(lengths: np.ndarray, length: int):
    assert pack_best_fit(lengths, length, 7).statistics().fill >= 0.99


# --- what stands together ------------------------------------------------------------------------


def likeness(groups: list[np.ndarray]) -> float:
    """The correlation of the lengths of two rows of one group: 1 if each group has one length."""
    every = np.concatenate(groups).astype(float)
    away = [group - every.mean() for group in groups]
    pairs = sum(len(group) * (len(group) - 1) for group in groups)
    apart = float(sum(part.sum() ** 2 - (part**2).sum() for part in away))
    return apart / pairs / float(every.var())


@each(
    ("draw", "length"),
    [
        (lambda rng: rng.integers(22, 25, 8000), 384),  # equal rows
        (lambda rng: rng.normal(80, 20, 8000).clip(30, 263), 1024),  # rows of a table
        (lambda rng: rng.lognormal(np.log(198), 1.2, 8000).clip(27, 20_000), 4096),  # some long
        (lambda rng: rng.integers(900, 1001, 8000), 2048),  # two fill a bin
    ],
    ids=["equal", "table", "some long", "two in a bin"],
)
def test_rows_that_share_a_bin_are_random(draw: Callable[..., np.ndarray], length: int):
    """Longest first has a likeness near 1. By chance it is below 0: a long row leaves room for a
    short one; where few rows fill a bin the last is chosen to fit, which makes them a little
    alike."""
    lengths = draw(np.random.default_rng(5)).astype(np.int32)
    index = pack_best_fit(lengths, length, 7)
    sizes = index.piece_stop - index.piece_start
    assert likeness(np.split(sizes, index.bin_offsets[1:-1])) <= 0.1


@each(
    ("pack", "known"),
    [(best_fit, "02f00d5b7294abdb"), (concat, "6d5f2275813239ca"), (pack_none, "4dd52240265db8ad")],
)
def test_the_pack_index_of_a_seed_never_changes(pack: Pack, known: str):
    """Written down once: an index in a cache is used again, and a resumed run needs its own."""
    index = pack(np.arange(500) * 7919 % 97 + 1, 128, overlong="split", soft_tokens=2)
    arrays = (index.piece_document, index.piece_start, index.piece_stop, index.bin_offsets)
    content = b"".join(array.tobytes() for array in arrays)
    assert hashlib.sha256(content).hexdigest()[:16] == known


@given(document_lengths, st.integers(5, 40), st.integers(0, 5))
def test_concat_fills_every_bin_but_the_last_and_goes_on_with_a_cut_document(lengths, length, seed):
    index = pack_concat(lengths, length, seed)
    assert set(index.bin_lengths()[:-1].tolist()) <= {length}
    for before, after in pairwise(pieces_of(index)):
        document, _, stop = before[-1]
        goes_on = stop < lengths[document]
        assert after[0][:2] == (document, stop) if goes_on else after[0][1] == 0


@given(document_lengths, st.integers(5, 40), st.integers(1, 6), policies)
def test_a_bin_is_closed_when_it_has_as_many_pieces_as_it_may(lengths, length, most, policy):
    index = best_fit(lengths, length, overlong=policy, most_pieces=most)
    plain = best_fit(lengths, length, overlong=policy)
    assert max((len(pieces) for pieces in pieces_of(index)), default=0) <= most
    assert sorted(chain(*pieces_of(index))) == sorted(chain(*pieces_of(plain)))


def test_statistics_count_tokens_and_filled_places():
    assert pack_best_fit(np.array([6, 4, 3, 7, 1]), 10, 0).statistics() == (21, 21 / 30)
    # Places of a soft prompt are filled.
    assert pack_none(np.array([6, 4]), 10, soft_tokens=2).statistics() == (10, 14 / 20)
    assert pack_best_fit(np.array([], int), 10, 0).statistics() == (0, 0.0)


@each("pack", [best_fit, concat, pack_none])
@each("count", [0, 1, 300])
def test_an_index_is_the_same_after_saving_and_opening(pack: Pack, count: int, tmp_path: Path):
    made = pack(lognormal_lengths(60, count), 100, overlong="split", soft_tokens=3)
    made.save(tmp_path / "a folder" / "index.arrow")
    opened = PackIndex.open(tmp_path / "a folder" / "index.arrow")
    for name in PackIndex.__slots__:
        assert np.array_equal(getattr(opened, name), getattr(made, name)), name
    arrays = (opened.piece_document, opened.piece_start, opened.piece_stop, opened.bin_offsets)
    assert [array.dtype for array in arrays] == ["int32", "int32", "int32", "int64"]
    if count:  # they lie in the mapped file
        assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    assert {path.name for path in (tmp_path / "a folder").iterdir()} == {
        "index.arrow",
        ".index.arrow.sha256",
    }


@each("damage", ["text", "another version"])
def test_a_file_that_is_no_index_is_named_and_may_be_deleted(damage: str, tmp_path: Path):
    path = tmp_path / "index.arrow"
    path.write_text("not an index", encoding="utf-8")
    if damage == "another version":
        schema = pa.schema([("x", pa.int32())], metadata={b"expert.pack": b'{"format": 0}'})
        with pa.ipc.new_file(str(path), schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1], pa.int32())], schema=schema))
    with pytest.raises(ExpertError, match="not an index of packed") as error:
        PackIndex.open(path)
    assert str(error.value).startswith(str(path))
    assert str(error.value).endswith("delete it and it will be made again")


@given(st.lists(st.integers(1, 700), min_size=1, max_size=5), st.integers(2, 40), st.integers(0, 9))
def test_blocks_lie_in_their_text_one_to_a_bin_and_lose_less_than_a_block(lengths, length, epoch):
    sizes = np.array(lengths, np.int32)
    index = shifted_blocks(pack_blocks(sizes, length), sizes, seed=3, epoch=epoch)
    assert np.diff(index.bin_offsets).tolist() == [1] * index.bins
    for document, size in enumerate(lengths):
        mine = index.piece_document == document
        starts, stops = index.piece_start[mine], index.piece_stop[mine]
        assert starts.min() >= 0
        assert stops.max() <= size
        assert (starts[1:] == stops[:-1]).all(), "blocks follow one another"
        taken = int((stops - starts).sum())
        assert taken == size if size < 8 * length else taken > size - 2 * length
