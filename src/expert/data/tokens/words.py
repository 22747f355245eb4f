"""Cuts ASCII text into the words that a tokenizer cuts it into, so that each is encoded once.

Rows of a data set repeat most of their words: encoding from a dictionary takes a quarter of the
tokenizer's time. Which words a text has depends on the pattern of the tokenizer, so only known
patterns are trusted; with any other, and where a text is not ASCII (Python and the tokenizer may
disagree about letters), the tokenizer encodes the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**split, "invert": False}, level]}


# Qwen 2 to 3, and Llama 3, which differ in the number of digits in a word.
_QWEN_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
# The same patterns for ASCII text. $A is any added token, at which a text is divided before it is
# split; $P a punctuation character that begins none. Words of letters come first because they are
# the most frequent; nothing matched by the alternatives before theirs begins with a
# letter or a blank before one.
_ASCII_QWEN_LLAMA = (
    rf" ?[A-Za-z]+|$A|{_ENDINGS}|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]%s"
    r"| ?(?:$P)+[\r\n]*|\s*[\r\n]+|\s+(?=$A)|\s+(?!\S)|\s+"
)
_ASCII_GPT2 = r" ?[A-Za-z]+|$A|'s|'t|'re|'ve|'m|'ll|'d| ?[0-9]+| ?(?:$P)+|\s+(?=$A)|\s+(?!\S)|\s+"
# Definition of the pre-tokenizer, and the words of ASCII text.
_KNOWN: tuple[tuple[dict[str, Any], str], ...] = (
    (_split_by(_QWEN_LLAMA % ""), _ASCII_QWEN_LLAMA % ""),
    (_split_by(_QWEN_LLAMA % "{1,3}"), _ASCII_QWEN_LLAMA % "{1,3}"),
    ({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, _ASCII_GPT2),
)
MOST_KEPT_CHARACTERS = 4_000_000
"""Of words whose tokens are remembered: about 200 MB at most."""


def word_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the words of ASCII text, including added tokens; None if the tokenizer is not known,
    or if an added token begins like a word or reaches beyond its own text."""
    definition = _definition(tokenizer.pre_tokenizer)
    pattern = next((words for known, words in _KNOWN if known == definition), None)
    if pattern is None or _definition(tokenizer.normalizer) not in ({}, {"type": "NFC"}):
        return None
    if type(tokenizer.model).__name__ != "BPE" or tokenizer.model.dropout:
        return None
    tokens = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word for token in tokens):
        return None
    # Of added tokens the leftmost match wins, then the longest.
    added = [token.content for token in tokens if token.content and token.content.isascii()]
    added.sort(key=len, reverse=True)
    if any(not re.match(r"[^\sA-Za-z0-9]", token) or "\n" in token for token in added):
        return None
    firsts = sorted({token[0] for token in added})
    signs = [rf"[^\sA-Za-z0-9{re.escape(''.join(firsts))}]"]
    for first in firsts:
        rests = "|".join(re.escape(token[1:]) for token in added if token[0] == first)
        signs.append(f"{re.escape(first)}(?!{rests})")
    any_added = "|".join(map(re.escape, added)) or "(?!)"
    filled = pattern.replace("$A", f"(?:{any_added})").replace("$P", "|".join(signs))
    return re.compile(filled, re.ASCII)


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


class WordTokens:
    """The tokens of words, each encoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        pattern = word_pattern(tokenizer)
        self._find: Callable[[str], list[str]] | None = pattern.findall if pattern else None
        self._kept: dict[str, list[int]] = {}
        self._characters = 0

    def cut(self, text: str) -> list[str] | None:
        """The words of a text; None if they are not known."""
        return self._find(text) if self._find is not None and text.isascii() else None

    def tokens_of(self, words: Iterable[str]) -> dict[str, list[int]]:
        """A dictionary with the tokens of these words, and of others."""
        if self._characters > MOST_KEPT_CHARACTERS:
            self._kept, self._characters = {}, 0
        new = list(set(words).difference(self._kept))
        found = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._kept |= {word: one.ids for word, one in zip(new, found, strict=True)}
        self._characters += sum(map(len, new))
        return self._kept
