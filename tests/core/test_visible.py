"""Untrusted text in a terminal."""

from __future__ import annotations

from expert.core.text import visible
from tests.each import each


@each(
    ("text", "shown"),
    [
        ("plain text", "plain text"),
        ("\x1b[2J\x07\x00\x7f", "␛[2J␇␀␡"),
        ("\x9b31m", "<U+009B>31m"),
        ("a\u202eb\u200bc\u2028d", "a<U+202E>b<U+200B>c<U+2028>d"),
        ("\ud800", "<U+D800>"),
        ("é 日本 😀", "é 日本 😀"),
        ("a\nb\tc", "a\nb␉c"),
    ],
)
def test_invisible_characters_are_written_out_unless_kept(text, shown):
    assert visible(text) == shown
    assert visible("a\nb\tc", keep="\t") == "a␊b\tc"
