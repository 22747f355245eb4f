"""Where a text may be cut so that its pieces have, end to end, the tokens of the whole.

Rows of a data set repeat a lot of text: markers, labels, schemas. Cut into pieces, each different
piece of a shard is encoded once. Whether a cut changes a token is decided by the pattern with which
a tokenizer splits text into words, so only those that are known are trusted; for any other there
are no cuts, and texts are encoded whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

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


_KNOWN = (
    (_split_by(_ALL_LINE_FEEDS % ""), _LINES),
    (_split_by(_ALL_LINE_FEEDS % "{1,3}"), _LINES),
    ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, _SINGLE_LINE_FEEDS),
)


def find_cuts(tokenizer: Any) -> re.Pattern[str] | None:
    """What matches, without a character, at places where a text may be cut; None if it is unknown.

    A normalizer must keep to its side of a cut: composing characters does, as nothing is composed
    with a line feed, nor an ASCII character with what stands before it. So must added tokens.
    """
    words = _definition(tokenizer.pre_tokenizer)
    known = next((cuts for definition, cuts in _KNOWN if definition == words), None)
    if known is None or _definition(tokenizer.normalizer) not in ({}, {"type": "NFC"}):
        return None
    if type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    return None if any("\n" in token.content for token in added) else known


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

    def cut(self, documents: Sequence[Sequence[Segment]]) -> list[list[list[str]] | None]:
        """The pieces of each segment of each document; None where two segments meet at no cut."""
        cut = [self._cut_one(segments) for segments in documents]
        seen = Counter(piece for made in cut for some in made or () for piece in some)
        return [made and [_join_unrepeated(some, seen) for some in made] for made in cut]

    def _cut_one(self, segments: Sequence[Segment]) -> list[list[str]] | None:
        if self.cuts is None:
            return None
        if len(segments) > 1:
            text = "".join(segment.text for segment in segments)
            position = 0
            for segment in segments[:-1]:
                position += len(segment.text)
                if not self.cuts.match(text, position):
                    return None
        return [self.cuts.split(segment.text) for segment in segments]

    def encode(self, pieces: Sequence[str]) -> list[list[int]]:
        """The tokens of each piece."""
        ascii_pieces = [piece for piece in pieces if piece.isascii()]
        others = [piece for piece in pieces if not piece.isascii()]
        plain = iter(self._plain.encode_batch_fast(ascii_pieces, add_special_tokens=False))
        other = iter(self.tokenizer.encode_batch_fast(others, add_special_tokens=False))
        return [next(plain if piece.isascii() else other).ids for piece in pieces]


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
