"""No text can become HTML or Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.text import visible
from expert.insight.page.markdown import text
from expert.insight.page.markup import MAX_TEXT, Markup, cut, escape, joined, path, tag
from tests.each import each
from tests.insight.pages import HOSTILE, Tags


def test_text_inside_a_tag_is_escaped_markup_is_not_and_none_is_left_out():
    made = tag("p", "<b>", tag("i", "&"), class_='"x"')
    assert made == '<p class="&quot;x&quot;">&lt;b&gt;<i>&amp;</i></p>'
    assert tag("p", None, "x", class_=None) == "<p>x</p>"
    assert joined(None, "<", Markup("<br>")) == "&lt;<br>"
    assert tag("meta", http_equiv="a", name="b") == '<meta http-equiv="a" name="b">'


@given(st.text())
def test_any_text_comes_back_from_html_as_it_is_seen(text: str):
    tags = Tags(tag("p", text, title=text))
    # A parser turns carriage returns into line feeds; `visible` writes them out before.
    assert "".join(tags.texts) == visible(text, keep="\n\t")
    assert tags.open == []


def test_marks_that_turn_writing_are_written_out_letters_stay_and_a_long_text_is_cut():
    assert escape("a\u202eb\u2066c\u200fd") == "a&lt;U+202E&gt;b&lt;U+2066&gt;c&lt;U+200F&gt;d"
    assert escape("x\x00\x1by\ud800") == "x␀␛y&lt;U+D800&gt;"
    for word in ("žluťoučký", "日本語", "שלום", "می\u200cخواهم", "👩\u200d🔬", "line\nbreak\ttab"):
        assert escape(word) == word
    assert not set(escape("".join(HOSTILE))) & set("<>\"'`")
    assert cut("x" * (MAX_TEXT + 5)) == "x" * MAX_TEXT + "… (5 more characters)"


def test_a_path_takes_numbers_and_commands_only():
    assert path("M0 1L2.5 3z", class_="line") == '<path class="line" d="M0 1L2.5 3z"></path>'
    with pytest.raises(AssertionError, match="commands and numbers"):
        path('M0 0"onload="x')


@each(
    ("given_text", "expected"),
    [
        ("a|b", r"a\|b"),
        ("`code`", r"\`code\`"),
        ("<b>&", "&lt;b&gt;&amp;"),
        ("[a](b)", r"\[a\](b)"),
        ("# no heading", r"\# no heading"),
        ("- no list", r"\- no list"),
        ("1. no list", r"\1. no list"),
        ("two\nlines", "two lines"),
        ("http://x.example", "http&#58;//x.example"),
        ("javascript:x", "javascript&#58;x"),
        ("-1.5", "-1.5"),
        ("data.packing, data: three of them", "data.packing, data: three of them"),
        ("see www.x.example", "see www&#46;x.example"),
        ("data:text/html,x", "data&#58;text/html,x"),
    ],
)
def test_markdown_keeps_text_as_text(given_text: str, expected: str):
    assert text(given_text) == expected
