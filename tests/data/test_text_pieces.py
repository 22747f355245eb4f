"""Pieces of a text have, end to end, the tokens of the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from expert.data.examples.formats import example_of
from expert.data.read.rows import read_rows
from expert.data.records import Example, Row, Segment
from expert.data.template.templates import named_template
from expert.data.tokens.encoder import SpecialTokens, TextEncoder
from expert.data.tokens.text_pieces import PieceEncoder, find_cuts, without_normalizer
from tests.data import SHARED
from tests.data.examples.understood import understand
from tests.data.tokenizers import qwen3_encoder, small_tokenizer
from tests.each import each

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def tokenizer_of(kind: str) -> Any:
    """The small tokenizer, with the words of the named kind of model."""
    tokenizer = small_tokenizer()
    if kind != "gpt2":
        split = pre_tokenizers.Split(Regex(QWEN if kind == "qwen" else LLAMA), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def encoder_of(tokenizer: Any) -> TextEncoder:
    special = SpecialTokens(bos="", eos="<|im_end|>", chat_template=None)
    return TextEncoder(lambda: tokenizer, special, template_adds_bos=False, fingerprint="")


def encoded_whole(
    encoder: TextEncoder, documents: list[list[Segment]]
) -> list[tuple[list[int], list[list[int]]]]:
    """Tokens and trained spans of every document, encoded as one text and separated by offsets."""
    made = []
    for segments, parts in zip(documents, encoder._encode_whole(documents), strict=True):
        ends = np.cumsum([len(part) for part in parts]).tolist()
        pairs = zip([0, *ends], ends, segments, strict=False)
        spans = [[first, last] for first, last, segment in pairs if segment.learn and first < last]
        made.append(([token for part in parts for token in part], spans))
    return made


def encoded(
    encoder: TextEncoder, documents: list[list[Segment]]
) -> list[tuple[list[int], list[list[int]]]]:
    made = encoder.encode(documents)
    ids = np.split(made.ids, np.cumsum(made.lengths)[:-1])
    spans = np.split(made.spans, np.cumsum(made.span_counts)[:-1])
    return [(i.tolist(), s.reshape(-1, 2).tolist()) for i, s in zip(ids, spans, strict=True)]


# What words, blanks and cuts are made of: each kind of blank, signs, letters, digits, characters
# that are composed with others, and markers.
blanks = ["\n", "\n\n", " ", "\t", "\r", "\r\n", "\x0b", "\u2028", "\u00a0"]
words = ["a", "B", "'s", "{", "}\n", "7", "12", "<|im_end|>", "<|im_", "end|>"]
composed = ["\u0301", "e\u0301", "\u212b", "漢", "\u1100", "\u1161"]
bits = st.sampled_from([*blanks, *words, *composed, "\n"])
texts = st.lists(bits, max_size=14).map("".join)
documents = st.lists(st.builds(Segment, texts, st.booleans()), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama"])
@given(batch=st.lists(documents, min_size=1, max_size=4))
def test_documents_are_encoded_as_whole_texts_are(kind, batch):
    encoder = encoder_of(tokenizer_of(kind))
    # Some twice: pieces that repeat are encoded once.
    batch = batch + batch[:2]
    whole = encoded_whole(encoder, batch)
    for encoder.by_words in (False, True):
        assert encoded(encoder, batch) == whole


def test_lines_that_repeat_are_pieces_and_the_others_stay_together():
    pieces = PieceEncoder(tokenizer_of("qwen"))
    one = [Segment("user\nHow many?\n\nSum up.\nSchema:\n  id\n", False)]
    other = [Segment("user\nWho?\n\nSchema:\n  id\n", False)]
    assert pieces.cut([one, other]) == [
        [["user\n", "How many?\n\nSum up.\n", "Schema:\n  id\n"]],
        [["user\n", "Who?\n\n", "Schema:\n  id\n"]],
    ]


def test_ascii_text_is_cut_into_the_words_of_the_tokenizer():
    pieces = PieceEncoder(tokenizer_of("qwen"))
    texts = ["it's  a (test), 12\n\n<x>\tend ", "naïve it's"]
    cut = pieces.cut([[Segment(text, True)] for text in texts], by_words=True)
    words = [*("it", "'s", " ", " a", " (", "test", "),", " ", "1", "2"), "\n\n", "<x", ">"]
    words += ["\tend", " "]
    assert cut == [[words], [["naïve it's"]]]


def test_segments_that_meet_inside_a_word_or_at_no_cut_are_not_cut():
    pieces = PieceEncoder(tokenizer_of("qwen"))
    for first, second, by_words, cut in (
        ("one two", " three", True, [["one", " two"], [" three"]]),
        ("one tw", "o three", True, None),
        ("a\n", "b", False, [["a\n"], ["b"]]),
        ("a\n", " b", False, None),
        ("a", "b", False, None),
    ):
        meeting = [[Segment(first, False), Segment(second, True)]]
        assert pieces.cut(meeting, by_words=by_words) == [cut]
    made = encoder_of(pieces.tokenizer).encode([])  # nothing is encoded as nothing
    assert [len(part) for part in (made.ids, made.lengths, made.spans, made.span_counts)] == [0] * 4


UNKNOWN: dict[str, Callable[[Any], Any]] = {
    "other words": lambda it: setattr(it, "pre_tokenizer", pre_tokenizers.Metaspace()),
    "a space before": lambda it: setattr(
        it, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "lower case": lambda it: setattr(it, "normalizer", normalizers.Lowercase()),
    "a token that takes blanks": lambda it: it.add_tokens([AddedToken("<mask>", lstrip=True)]),
    "a token over lines": lambda it: it.add_tokens([AddedToken("a\nb")]),
    "dropout": lambda it: setattr(it.model, "dropout", 0.1),
}


@each("change", UNKNOWN.values(), ids=UNKNOWN)
def test_text_for_an_unknown_tokenizer_is_never_cut(change):
    tokenizer = tokenizer_of("gpt2")
    assert find_cuts(tokenizer) is not None
    change(tokenizer)
    assert find_cuts(tokenizer) is None
    assert PieceEncoder(tokenizer).cut([[Segment("a\nb", True)]]) == [None]


def test_a_normalizer_is_left_out_only_if_added_tokens_do_not_pass_it():
    tokenizer = tokenizer_of("qwen")
    assert without_normalizer(tokenizer).normalizer is None
    tokenizer.add_tokens([AddedToken("K", normalized=True)])
    assert without_normalizer(tokenizer) is tokenizer


def rows_of(path: Path, most: int | None = None) -> list[list[Segment]]:
    rows = [row for row in islice(read_rows(path), most) if isinstance(row, Row)]
    columns = understand(list(rows[0].values), rows[0].values)
    examples = [example_of(row, columns) for row in rows]
    template = named_template("chatml", eos="<|im_end|>")
    return [template.segments(one) for one in examples if isinstance(one, Example)]


REAL = sorted(path.relative_to(SHARED).as_posix() for path in SHARED.rglob("*.jsonl"))


@pytest.mark.skipif(not REAL, reason="the real data is not beside this checkout")
@pytest.mark.parametrize("most", [100, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REAL or ["absent"])
def test_real_rows_in_pieces_have_the_tokens_and_spans_of_whole_rows(
    name, most, monkeypatch: pytest.MonkeyPatch
):
    documents, encoder = rows_of(SHARED / name, most), qwen3_encoder()
    assert find_cuts(encoder.tokenizer) is not None
    whole = encoded_whole(encoder, documents)
    for by_words in (False, True):
        monkeypatch.setattr(encoder, "by_words", by_words)
        assert encoded(encoder, documents) == whole
