"""Where a text may be cut so that its pieces have, end to end, the tokens of the whole.

Rows of a data set repeat a lot of text: markers, labels, schemas, and most of all words. Cut into
pieces, each different piece is encoded once. Whether a cut changes a token is decided by the
pattern with which a tokenizer splits text into words, so only those that are known are trusted; for
any other there are no cuts, and texts are encoded whole. ASCII text is cut into the very words;
other text, whose letters Python and the tokenizer may not agree on, at the ends of lines.
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

# A cut is made after a line feed and before a visible ASCII character. No word of these patterns
# goes from the one to the other, so only what they see of the text behind a cut could matter: the
# look-ahead of `\s+(?!\S)`, which is true at the end of a piece and false before the character.
_LINES = re.compile(r"(?<=\n)(?=[!-~])")
# Blanks that end in line feeds are taken by `\s*[\r\n]+`, which comes before the look-ahead; or by
# the signs before them. Qwen 2 to 3, and Llama 3, which differ in how many digits make a word.
_ALL_LINE_FEEDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-2 has nothing of the kind: "a \n" ends in one word, "a \nb" has two there. A single line feed
# is one word either way.
_SINGLE_LINE_FEEDS = re.compile(r"(?<=[!-~]\n)(?=[!-~])")


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, level]}


_ENDINGS = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
# The same patterns for ASCII text: $A is any added token, at which a text is divided before it is
# split, $P a sign that begins none. Words of letters come first because most words are; nothing
# that the alternatives before theirs match begins with a letter or a blank before one.
_ASCII_LINE_FEEDS = (
    rf" ?[A-Za-z]+|$A|{_ENDINGS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]%s"
    r"| ?(?:$P)+[\r\n]*|\s*[\r\n]+|\s+(?=$A)|\s+(?!\S)|\s+"
)
_ASCII_GPT2 = r" ?[A-Za-z]+|$A|'s|'t|'re|'ve|'m|'ll|'d| ?[0-9]+| ?(?:$P)+|\s+(?=$A)|\s+(?!\S)|\s+"
# Definition of the splitting, where texts may be cut, and the words of ASCII text.
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
"""Words whose tokens are remembered from shard to shard: about 100 MB at most."""


def _ascii_words(pattern: str, added: list[str]) -> re.Pattern[str] | None:
    """The words of ASCII text, added tokens among them; None where one begins like a word.

    Of added tokens the leftmost is taken, and of those that begin there the longest.
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
    """How the texts of a tokenizer may be cut."""

    lines: re.Pattern[str]
    """Matches, without a character, at the ends of lines where a text may be cut."""
    words: re.Pattern[str] | None
    """Matches word after word of ASCII text; None where only lines can be told apart."""


def find_cuts(tokenizer: Any) -> Cuts | None:
    """How a text may be cut; None where the tokenizer is not known.

    A normalizer must keep to its side of a cut: composing characters does, as nothing is composed
    with a line feed, nor an ASCII character with what stands before it. So must added tokens.
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
    """What tokenizer.json says of a component, without what only decides offsets."""
    if component is None:
        return {}
    try:
        state = component.__getstate__()
    except Exception:  # noqa: BLE001 - one written in Python has no state, and raises a bare one
        return {"type": "unknown"}
    made: dict[str, Any] = json.loads(
        state, object_hook=lambda part: {k: v for k, v in part.items() if k != "trim_offsets"}
    )
    return made


def without_normalizer(tokenizer: Any) -> Any:
    """The same tokenizer without its normalizer, for ASCII text, of which composing characters
    changes nothing; the vocabulary is shared. It takes a quarter of the time off encoding."""
    from tokenizers import Tokenizer

    added = sorted(tokenizer.get_added_tokens_decoder().items())
    if tokenizer.normalizer is None or any(token.normalized for _, token in added):
        return tokenizer
    plain = Tokenizer(tokenizer.model)
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens([token for _, token in added])
    made = sorted(plain.get_added_tokens_decoder().items())
    return plain if repr(made) == repr(added) else tokenizer


class PieceEncoder:
    """A tokenizer that encodes documents in pieces, each different piece once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.cuts = find_cuts(tokenizer)
        self._plain = tokenizer if self.cuts is None else without_normalizer(tokenizer)
        self._kept: dict[str, list[int]] = {}

    def cut(
        self, documents: Sequence[Sequence[Segment]], *, by_words: bool = False
    ) -> list[list[list[str]] | None]:
        """The pieces of each segment of each document, lines or, of ASCII text, words; None where
        two segments meet at no cut."""
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
        """Segments that meet at the end of a line are cut apart; others are told apart by counting
        the characters of the words of the whole."""
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
        made, position, first = [], 0, 0
        for segment in segments[:-1]:
            position += len(segment.text)
            last = bisect_right(ends, position)
            if position and (last == 0 or ends[last - 1] != position):
                return None
            made.append(words[first:last])
            first = last
        return [*made, words[first:]]

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
        """The tokens of each piece; where they are words they are kept for the next shards."""
        kept = self._kept if keep else {}
        if len(kept) > MOST_KEPT_WORDS:
            kept.clear()
        new = [piece for piece in pieces if piece not in kept]
        ascii_pieces = [piece for piece in new if piece.isascii()]
        others = [piece for piece in new if not piece.isascii()]
        plain = self._plain.encode_batch_fast(ascii_pieces, add_special_tokens=False)
        other = self.tokenizer.encode_batch_fast(others, add_special_tokens=False)
        made = {piece: found.ids for piece, found in zip(ascii_pieces, plain, strict=True)}
        made |= {piece: found.ids for piece, found in zip(others, other, strict=True)}
        found = [made[piece] if piece in made else kept[piece] for piece in pieces]
        # Lines of text that is not ASCII are among the pieces; they seldom come again.
        kept |= {
            piece: ids
            for piece, ids in made.items()
            if len(piece) <= LONGEST_KEPT_WORD and " " not in piece[1:]
        }
        return found


def _join_unrepeated(pieces: list[str], seen: Counter[str]) -> list[str]:
    """Neighbours that occur once are one piece: an encoding of its own costs a line of verse
    a third of its time."""
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
