"""Text cannot become HTML or Markdown, whatever it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.text import visible
from expert.insight.page.markdown import text
from expert.insight.page.markup import MAX_TEXT, Markup, cut, escape, joined, path, tag
from tests.each import each
from tests.insight.pages import HOSTILE, Tags


def test_text_inside_a_tag_is_escaped_and_markup_is_not():
    made = tag("p", "<b>", tag("i", "&"), class_='"x"')
    assert made == '<p class="&quot;x&quot;">&lt;b&gt;<i>&amp;</i></p>'


def test_none_is_left_out_as_text_and_as_attribute():
    assert tag("p", None, "x", class_=None) == "<p>x</p>"
    assert joined(None, "<", Markup("<br>")) == "&lt;<br>"


def test_names_of_attributes_are_those_of_html():
    assert tag("meta", http_equiv="a", name="b") == '<meta http-equiv="a" name="b">'


@each("text", HOSTILE)
def test_hostile_text_makes_no_tag_and_no_attribute(text: str):
    tags = Tags(tag("p", text, title=text))
    assert [(name, list(attributes)) for name, attributes in tags.found] == [("p", ["title"])]
    assert "".join(tags.texts) == visible(text, keep="\n\t")
    assert tags.found[0][1]["title"] == visible(text, keep="\n\t")


@given(st.text())
def test_any_text_comes_back_from_html_as_it_is_seen(text: str):
    tags = Tags(tag("p", text, title=text))
    # A parser turns carriage returns into line feeds; `visible` writes them out before.
    assert "".join(tags.texts) == visible(text, keep="\n\t")
    assert tags.open == []


def test_marks_that_turn_the_direction_of_writing_are_written_out():
    assert escape("a\u202eb\u2066c\u200fd") == "a&lt;U+202E&gt;b&lt;U+2066&gt;c&lt;U+200F&gt;d"
    assert escape("x\x00\x1by\ud800") == "x␀␛y&lt;U+D800&gt;"


def test_letters_of_all_scripts_and_emoji_stay_as_they_are():
    for word in ("žluťoučký", "日本語", "שלום", "می\u200cخواهم", "👩\u200d🔬", "line\nbreak\ttab"):
        assert escape(word) == word


def test_a_long_text_is_cut_and_is_reported():
    shown = cut("x" * (MAX_TEXT + 5))
    assert shown == "x" * MAX_TEXT + "… (5 more characters)"


def test_a_path_takes_numbers_and_commands_only():
    assert path("M0 1L2.5 3z", class_="line") == '<path class="line" d="M0 1L2.5 3z"></path>'
    with pytest.raises(AssertionError, match="commands and numbers"):
        path('M0 0"onload="x')


def test_an_escaped_text_has_no_sign_that_html_knows():
    assert not set(escape("".join(HOSTILE))) & set("<>\"'`")


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
    ],
)
def test_markdown_keeps_text_as_text(given_text: str, expected: str):
    assert text(given_text) == expected


def test_addresses_are_broken_in_markdown_and_paths_of_a_plan_are_not():
    assert text("data.packing, data: three of them") == "data.packing, data: three of them"
    assert text("see http://x.example and www.x.example") == (
        "see http&#58;//x.example and www&#46;x.example"
    )
    assert text("data:text/html,x javascript:alert(1)") == (
        "data&#58;text/html,x javascript&#58;alert(1)"
    )
