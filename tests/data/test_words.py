"""Words of a text have, end to end, the tokens of the whole."""

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
from expert.data.tokens.words import WordTokens, word_pattern
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
    for segments in documents:
        text = "".join(segment.text for segment in segments)
        encoding = encoder.tokenizer.encode(text, add_special_tokens=False)
        tokens, edges = encoder._edges(segments, encoding)
        pairs = zip(edges, edges[1:], segments, strict=False)
        spans = [[first, last] for first, last, segment in pairs if segment.learn and first < last]
        made.append((tokens, spans))
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
    batch = batch + batch[:2]  # some twice: words that repeat are encoded once
    assert encoded(encoder, batch) == encoded_whole(encoder, batch)


def test_ascii_text_is_cut_into_the_words_of_the_tokenizer():
    words = WordTokens(tokenizer_of("qwen"))
    found = [*("it", "'s", " ", " a", " (", "test", "),", " ", "1", "2"), "\n\n", "<x", ">"]
    assert words.cut("it's  a (test), 12\n\n<x>\tend ") == [*found, "\tend", " "]
    assert words.cut("naïve it's") is None
    made = encoder_of(tokenizer_of("qwen")).encode([])  # nothing is encoded as nothing
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
    assert word_pattern(tokenizer) is not None
    change(tokenizer)
    assert word_pattern(tokenizer) is None
    assert WordTokens(tokenizer).cut("a\nb") is None


def rows_of(path: Path, most: int | None = None) -> list[list[Segment]]:
    rows = [row for row in islice(read_rows(path), most) if isinstance(row, Row)]
    columns = understand(list(rows[0].values), rows[0].values)
    examples = [example_of(row, columns) for row in rows]
    template = named_template("chatml", eos="<|im_end|>")
    return [template.segments(one) for one in examples if isinstance(one, Example)]


REAL = sorted(path.relative_to(SHARED).as_posix() for path in SHARED.rglob("*.jsonl"))


@pytest.mark.skipif(not REAL, reason="the real data is not beside this checkout")
@pytest.mark.parametrize("most", [40, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REAL or ["absent"])
def test_real_rows_in_words_have_the_tokens_and_spans_of_whole_rows(name, most):
    documents, encoder = rows_of(SHARED / name, most), qwen3_encoder()
    assert word_pattern(encoder.tokenizer) is not None
    assert encoded(encoder, documents) == encoded_whole(encoder, documents)
