"""Pages as HTML: text stays text, lines keep their spikes, figures are complete."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.text import visible
from expert.insight.page.figures import (
    BUCKETS,
    Figure,
    Series,
    clock_words,
    listed_values,
    thinned,
)
from expert.insight.page.render import MAX_TEXT, make_environment, make_section, shown
from tests.each import each
from tests.insight.pages import (
    HOSTILE,
    Tags,
    check_harmless,
    hostile_run,
    html_of,
    usual,
    write_run,
)


@pytest.mark.fault(29)
@each("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text_on_the_page(tmp_path: Path, text: str):
    plain = check_harmless(html_of(hostile_run(tmp_path / "a", "harmless")))
    tags = check_harmless(html_of(hostile_run(tmp_path / "b", text)))
    assert [name for name, _ in tags.found] == [name for name, _ in plain.found]
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b\ud800]", "".join(tags.texts))
    "".join(tags.texts).encode("utf-8")


@pytest.mark.fault(29)
def test_a_hostile_folder_name_stays_text(tmp_path: Path):
    folder = tmp_path / "runs" / "<script>alert(1)< script>'\"`|-20260101-000000"
    check_harmless(html_of(write_run(folder, usual()), write_run(tmp_path / "other", usual())))


@given(st.text(max_size=50))
def test_any_text_comes_back_from_html_as_it_is_seen(text: str):
    made = make_environment().from_string('<p title="{{ text }}">{{ text }}</p>')
    tags = Tags(made.render(text=text))
    # A parser turns carriage returns into line feeds; `visible` writes them out before.
    assert "".join(tags.texts) == visible(text, keep="\n\t")
    assert [attributes["title"] for _, attributes in tags.found] == [visible(text, keep="\n\t")]


def test_hidden_characters_are_written_out_letters_stay_secrets_go_and_a_long_text_is_cut():
    assert shown("a\u202eb\u2066c\x00\ud800") == "a<U+202E>b<U+2066>c␀<U+D800>"
    for word in ("žluťoučký", "日本語", "שלום", "می\u200cخواهم", "👩\u200d🔬", "line\nbreak\ttab"):
        assert shown(word) == word
    assert "hf_" not in shown("hf_" + "a" * 34)
    assert shown("x" * (MAX_TEXT + 5)) == "x" * MAX_TEXT + "… (5 more characters)"


def test_a_long_series_keeps_its_spike_its_dip_its_ends_and_its_holes():
    draw_number = random.Random(0).random
    values = [draw_number() for _ in range(10_000)]
    values[3_333], values[7_777] = 99.0, -99.0
    points = list(zip(map(float, range(10_000)), values, strict=True))
    thin = thinned(points)
    assert len(thin) <= 2 * BUCKETS + 2
    assert {points[0], points[-1], points[3_333], points[7_777]} <= set(thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    holed = [(float(x), None if 2_000 <= x < 4_000 else 1.0) for x in range(6_000)]
    assert any(value is None for _, value in thinned(holed))


def test_a_line_chart_has_its_points_for_the_script_and_its_values_for_a_reader():
    points = [(1.0, 2.0), (2.0, None), (3.0, 1e300)]
    figure = Figure(name="x", title="X", series=(Series(name="a <b>", points=points, colour=1),))
    tags = Tags(make_section("s", "S", [figure], "w", layout="curves").html)
    [data] = [found["data-chart"] for _, found in tags.found if "data-chart" in found]
    [line] = json.loads(data)["series"]
    assert (line["name"], line["x"], line["y"]) == ("a <b>", [1, 2, 3], [2, None, 1e300])
    assert listed_values(figure) == [("1", "2"), ("2", "–"), ("3", "1e+300")]
    assert [clock_words(t) for t in (0, 43.0857, 84, 4500)] == ["0", "43.1 s", "1:24 min", "1:15 h"]


def test_bars_have_their_share_of_the_space():
    rows = [("low", 10.0, "10", "", 1), ("top", 30.0, "30", "", 1), ("bad", None, "failed", "", 7)]
    bars = make_section("ladder", "B", "", "", "Speed", rows, ("a", "b", "c"), [], [])
    parts = make_section("time", "T", [("a", 1.0, "1 s", 1), ("b", 3.0, "3 s", 2)], "", [], "")
    for section, places in (
        (bars, ["width:33.33%", "width:100.00%", "width:0.00%"]),
        (parts, ["width:25.00%", "width:75.00%"]),
    ):
        found = Tags(section.html).found
        assert [attributes["style"] for _, attributes in found if "style" in attributes] == places
