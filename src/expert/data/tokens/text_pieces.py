"""Cuts text into pieces whose tokens, concatenated, are the tokens of the whole.

Rows of a data set repeat a lot of text: markers, labels, schemas, and above all words. Each
distinct piece is encoded once. Whether a cut changes a token depends on the pattern with which the
tokenizer splits text into words, so only known patterns are trusted; with any other, texts are
encoded whole. ASCII text is cut into exactly those words; other text, on whose letters Python and
the tokenizer may disagree, only at the ends of lines.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from expert.data.records import Segment

# Cut after a line feed and before a visible ASCII character. No word of these patterns spans the
# two, so only look-ahead past the cut could matter: `\s+(?!\S)`, which matches at the end of a
# piece but not before the character.
_LINES = re.compile(r"(?<=\n)(?=[!-~])")
# Blanks that end in line feeds are matched by `\s*[\r\n]+`, before the look-ahead, or by the
# punctuation before them. Qwen 2 to 3, and Llama 3, which differ in the number of digits in a word.
_ALL_LINE_FEEDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2 has no such pattern: the blanks in "a \n" are one word, those in "a \nb" are two. A single
# line feed is one word in either case.
_SINGLE_LINE_FEEDS = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, level]}


_ENDINGS = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
# The same patterns for ASCII text. $A is any added token, at which a text is divided before it is
# split; $P a punctuation character that begins none. Words of letters come first because they are
# the most frequent; nothing matched by the alternatives before theirs begins with a
# letter or a blank before one.
_ASCII_LINE_FEEDS = (
    rf" ?[A-Za-z]+|$A|{_ENDINGS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]%s"
    r"| ?(?:$P)+[\r\n]*|\s*[\r\n]+|\s+(?=$A)|\s+(?!\S)|\s+"
)
_ASCII_GPT2 = r" ?[A-Za-z]+|$A|'s|'t|'re|'ve|'m|'ll|'d| ?[0-9]+| ?(?:$P)+|\s+(?=$A)|\s+(?!\S)|\s+"
# Definition of the pre-tokenizer, where texts may be cut, and the words of ASCII text.
_KNOWN: tuple[tuple[dict[str, Any], re.Pattern[str], str], ...] = (
    (_split_by(_ALL_LINE_FEEDS % ""), _LINES, _ASCII_LINE_FEEDS % ""),
    (_split_by(_ALL_LINE_FEEDS % "{1,3}"), _LINES, _ASCII_LINE_FEEDS % "{1,3}"),
    (
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        _SINGLE_LINE_FEEDS,
        _ASCII_GPT2,
    ),
)
LONGEST_KEPT_WORD = 24
MOST_KEPT_WORDS = 500_000
"""Words whose tokens are cached between shards: about 100 MB at most."""


def _ascii_words(pattern: str, added: list[str]) -> re.Pattern[str] | None:
    """The words of ASCII text, including added tokens; None if one of those begins like a word.

    Of added tokens the leftmost match wins, then the longest.
    """
    added = sorted((token for token in added if token.isascii()), key=len, reverse=True)
    if any(not re.match(r"[^\sA-Za-z0-9]", token) for token in added):
        return None
    firsts = sorted({token[0] for token in added})
    signs = [rf"[^\sA-Za-z0-9{re.escape(''.join(firsts))}]"]
    for first in firsts:
        rests = "|".join(re.escape(token[1:]) for token in added if token[0] == first)
        signs.append(f"{re.escape(first)}(?!{rests})")
    tokens = "|".join(map(re.escape, added)) or "(?!)"
    filled = pattern.replace("$A", f"(?:{tokens})").replace("$P", "|".join(signs))
    return re.compile(filled, re.ASCII)


class Cuts(NamedTuple):
    """How texts may be cut for a tokenizer."""

    lines: re.Pattern[str]
    """Matches the empty string at the ends of lines where a text may be cut."""
    words: re.Pattern[str] | None
    """Matches the words of ASCII text; None if only lines can be separated."""


def find_cuts(tokenizer: Any) -> Cuts | None:
    """How texts may be cut; None if the tokenizer is not known.

    The normalizer must not work across a cut: NFC does not, as nothing composes with a line feed,
    nor an ASCII character with what precedes it. Neither must added tokens.
    """
    words = _definition(tokenizer.pre_tokenizer)
    known = next((entry for entry in _KNOWN if entry[0] == words), None)
    if known is None or _definition(tokenizer.normalizer) not in ({}, {"type": "NFC"}):
        return None
    if type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if any("\n" in token.content for token in added):
        return None
    _, lines, pattern = known
    return Cuts(lines, _ascii_words(pattern, [token.content for token in added if token.content]))


def _definition(component: Any) -> dict[str, Any]:
    """The definition of a component in tokenizer.json, without what only affects offsets."""
    if component is None:
        return {}
    try:
        state = component.__getstate__()
    except Exception:  # noqa: BLE001 - a component written in Python has no state
        return {"type": "unknown"}
    definition: dict[str, Any] = json.loads(
        state, object_hook=lambda part: {k: v for k, v in part.items() if k != "trim_offsets"}
    )
    return definition


def without_normalizer(tokenizer: Any) -> Any:
    """The same tokenizer without its normalizer, for ASCII text, which NFC does not change; the
    vocabulary is shared. Encoding takes a quarter less time."""
    from tokenizers import Tokenizer

    added = sorted(tokenizer.get_added_tokens_decoder().items())
    if tokenizer.normalizer is None or any(token.normalized for _, token in added):
        return tokenizer
    plain = Tokenizer(tokenizer.model)
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens([token for _, token in added])
    copied = sorted(plain.get_added_tokens_decoder().items())
    return plain if repr(copied) == repr(added) else tokenizer


class PieceEncoder:
    """A tokenizer that encodes documents in pieces, each distinct piece once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.cuts = find_cuts(tokenizer)
        self._plain = tokenizer if self.cuts is None else without_normalizer(tokenizer)
        self._kept: dict[str, list[int]] = {}

    def cut(
        self, documents: Sequence[Sequence[Segment]], *, by_words: bool = False
    ) -> list[list[list[str]] | None]:
        """The pieces of each segment of each document: lines or, for ASCII text, words; None if two
        segments do not meet at a cut."""
        if self.cuts is None:
            return [None] * len(documents)
        texts = ["".join([segment.text for segment in segments]) for segments in documents]
        by_words = by_words and self.cuts.words is not None
        in_words = [by_words and text.isascii() for text in texts]
        cut = [
            self._words(segments, text) if words else self._lines(segments, text)
            for segments, text, words in zip(documents, texts, in_words, strict=True)
        ]
        lines = [made for made, words in zip(cut, in_words, strict=True) if made and not words]
        seen = Counter(piece for made in lines for some in made for piece in some)
        return [
            made if words or made is None else [_join_unrepeated(some, seen) for some in made]
            for made, words in zip(cut, in_words, strict=True)
        ]

    def _words(self, segments: Sequence[Segment], text: str) -> list[list[str]] | None:
        """Segments that meet at the end of a line are cut separately; otherwise the whole text is
        cut, and its words are assigned to segments by counting characters."""
        assert self.cuts is not None
        assert self.cuts.words is not None
        find, meets = self.cuts.words.findall, self.cuts.lines.match
        position = 0
        for segment in segments[:-1]:
            position += len(segment.text)
            if not meets(text, position):
                return self._words_apart(segments, find(text))
        return [find(segment.text) for segment in segments]

    def _words_apart(self, segments: Sequence[Segment], words: list[str]) -> list[list[str]] | None:
        ends = list(accumulate(map(len, words)))
        pieces_of_segments, position, first = [], 0, 0
        for segment in segments[:-1]:
            position += len(segment.text)
            last = bisect_right(ends, position)
            if position and (last == 0 or ends[last - 1] != position):
                return None
            pieces_of_segments.append(words[first:last])
            first = last
        return [*pieces_of_segments, words[first:]]

    def _lines(self, segments: Sequence[Segment], text: str) -> list[list[str]] | None:
        assert self.cuts is not None
        lines = self.cuts.lines
        position = 0
        for segment in segments[:-1]:
            position += len(segment.text)
            if not lines.match(text, position):
                return None
        return [lines.split(segment.text) for segment in segments]

    def encode(self, pieces: Sequence[str], *, keep: bool = False) -> list[list[int]]:
        """The tokens of each piece; `keep`: cache them for the next shards."""
        kept = self._kept if keep else {}
        if len(kept) > MOST_KEPT_WORDS:
            kept.clear()
        new = [piece for piece in pieces if piece not in kept]
        ascii_pieces = [piece for piece in new if piece.isascii()]
        others = [piece for piece in new if not piece.isascii()]
        plain = self._plain.encode_batch_fast(ascii_pieces, add_special_tokens=False)
        other = self.tokenizer.encode_batch_fast(others, add_special_tokens=False)
        encoded = {piece: found.ids for piece, found in zip(ascii_pieces, plain, strict=True)}
        encoded |= {piece: found.ids for piece, found in zip(others, other, strict=True)}
        found = [encoded[piece] if piece in encoded else kept[piece] for piece in pieces]
        # Lines of text that is not ASCII are among the pieces; they seldom repeat.
        kept |= {
            piece: ids
            for piece, ids in encoded.items()
            if len(piece) <= LONGEST_KEPT_WORD and " " not in piece[1:]
        }
        return found


def _join_unrepeated(pieces: list[str], seen: Counter[str]) -> list[str]:
    """Join neighbours that occur once: a separate encoding costs a third of the time of a line of
    verse."""
    joined: list[str] = []
    goes_on = False
    for piece in pieces:
        once = seen[piece] == 1
        if once and goes_on:
            joined[-1] += piece
        else:
            joined.append(piece)
        goes_on = once
    return joined
