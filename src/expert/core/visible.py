"""Text of others in a terminal: nothing in it may act on the terminal or hide."""

from __future__ import annotations

import unicodedata

_UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Control, format (marks of direction, zero width), half a pair, private, line and paragraph."""


def visible(text: str, *, keep: str = "\n") -> str:
    """The text with every character that is not seen written out; those in `keep` stay.

    Control characters become their pictures (escape is ␛), others their number (<U+202E>).
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in _UNSEEN
        else _written(ord(character))
        for character in text
    )


def _written(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
