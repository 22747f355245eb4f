"""Axes with round numbers, lines that keep their spikes, and complete figures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.insight.page.blocks import (
    Bar,
    BarPart,
    Bars,
    Chart,
    EventTimeline,
    Histogram,
    LineChart,
    Mark,
    Series,
    StackChart,
    Unit,
    WideBar,
)
from expert.insight.page.charts import draw
from expert.insight.page.markdown import spark
from expert.insight.page.scales import BUCKETS, clock_words, labels, scale_of, si, smoothed, thinned
from tests.each import each
from tests.insight.pages import Tags

FINITE = st.floats(min_value=-1e12, max_value=1e12)


# --- axes ----------------------------------------------------------------------------------------


@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_every_value_is_inside_its_scale(values: list[float], from_zero: bool):
    scale = scale_of(values, from_zero=from_zero)
    for value in values:
        assert -1e-6 <= scale.share(value) <= 1 + 1e-6  # rounding of the ticks
    assert 1 <= len(scale.ticks) <= 12


@each(
    ("values", "kind", "unit", "expected"),
    [
        ([0.31, 2.7], {}, "number", "0|1|2|3"),
        ([1, 3], {"whole": True, "tight": True}, "count", "1|2|3"),
        ([0.0, 30 * 2**30], {"from_zero": True, "binary": True}, "bytes",
         "0 GiB|8 GiB|16 GiB|24 GiB|32 GiB"),
        ([0.0, 170.0], {"clock": True, "tight": True, "wanted": 6}, "seconds",
         "0|30 s|1:00 min|1:30 min|2:00 min|2:30 min"),
        ([0.02, 50.0], {"log": True}, "number", "0.01|0.1|1|10|100"),
    ],
    ids=["values", "steps", "bytes", "clock", "logarithmic"],
)  # fmt: skip
def test_ticks_are_round_numbers_of_their_kind(values, kind, unit, expected):
    assert labels(scale_of(values, **kind).ticks, unit) == expected.split("|")


@each(
    ("values", "kind", "value", "share"),
    [
        ([5.0], {"tight": True, "whole": True}, 5.0, 0.5),  # a single value is in the middle
        ([0.02, 50.0], {"log": True}, 1.0, 0.5),  # the middle of four powers of ten
        ([0.31, 2.7], {}, 1.5, 0.5),  # the scale is 0 to 3
        ([0.999], {"share": True}, 1.0, 1.0),  # shares end at 100 %
        ([0.5, 1.2], {"share": True}, 1.2, 1.0),  # unless a value is larger
    ],
)
def test_a_value_has_its_place_on_the_scale(values, kind, value, share):
    assert scale_of(values, **kind).share(value) == pytest.approx(share)


@each(
    ("ticks", "unit", "expected"),
    [
        ((0.0, 0.25, 0.5), "number", ["0.00", "0.25", "0.50"]),
        ((0.0, 0.2, 0.4), "number", ["0.0", "0.2", "0.4"]),
        ((0.0, 5e-5, 1e-4), "number", ["0", "5e-5", "0.0001"]),
        ((0.0, 0.5, 1.0), "percent", ["0 %", "50 %", "100 %"]),
        ((0, 20000, 40000), "si", ["0", "20k", "40k"]),
    ],
)
def test_labels_have_the_digits_their_distance_needs(
    ticks: tuple[float, ...], unit: Unit, expected: list[str]
):
    assert labels(ticks, unit) == expected


def test_numbers_and_times_are_short_on_an_axis():
    numbers = (0, 850, 9999, 12_000, 1.5e6)
    assert [si(value) for value in numbers] == ["0", "850", "9,999", "12k", "1.5M"]
    assert [clock_words(t) for t in (0, 43.0857, 84, 4500)] == ["0", "43.1 s", "1:24 min", "1:15 h"]


# --- long and noisy series -----------------------------------------------------------------------


def test_a_long_series_keeps_its_spike_its_dip_its_ends_and_its_holes():
    draw_number = random.Random(0).random
    values = [draw_number() for _ in range(10_000)]
    values[3_333], values[7_777] = 99.0, -99.0
    points = list(zip(map(float, range(10_000)), values, strict=True))
    thin = thinned(points)
    assert len(thin) <= 2 * BUCKETS + 2
    assert {points[0], points[-1], points[3_333], points[7_777]} <= set(thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    points = [(float(x), None if 2_000 <= x < 4_000 else 1.0) for x in range(6_000)]
    assert any(value is None for _, value in thinned(points))


def test_smoothing_is_the_mean_of_the_neighbours_by_their_tokens_past_what_is_missing():
    points = [(float(x), float(x % 7)) for x in range(100)]
    weights = [float(1 + x % 3) for x in range(100)]
    half = 2  # a twenty-fifth of 100 is 4: two on each side
    for place in (0, 1, 50, 99):
        near = range(max(0, place - half), min(100, place + half + 1))
        plain = sum(points[n][1] * weights[n] for n in near) / sum(weights[n] for n in near)
        # Sums from the start against a sum of five: 100 additions of numbers below 20.
        assert smoothed(points, weights)[place][1] == pytest.approx(plain, rel=1e-12)
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0)]
    assert smoothed(points, [1.0, 1.0, 1.0]) == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def test_a_series_becomes_a_sparkline():
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert spark([5.0, 5.0]) == "▄▄"
    assert len(spark(list(range(1000)))) == 48


# --- drawings ------------------------------------------------------------------------------------


def line_chart(*values: float | None, **more: object) -> LineChart:
    points = [(float(place + 1), value) for place, value in enumerate(values)]
    return LineChart(series=(Series(name="loss", points=points, colour=1),), **more)  # type: ignore[arg-type]


def drawn_paths(chart: LineChart) -> list[str]:
    tags = Tags(draw(chart))
    assert tags.open == []
    return [found["d"] for name, found in tags.found if name == "path" and "line" in found["class"]]


def tags_of(drawn: Chart | str, name: str) -> list[tuple[str, dict[str, str]]]:
    html = drawn if isinstance(drawn, str) else draw(drawn)
    return [found for found in Tags(html).found if found[0] == name]


def test_a_line_runs_from_edge_to_edge_down_at_high_values_and_is_broken_where_there_are_none():
    assert drawn_paths(line_chart(0.0, 1.0)) == ["M0.0 1000L1000.0 0"]
    assert drawn_paths(line_chart(0.0, None, 1.0))[0].count("M") == 2


@each(
    ("values", "drawn"),
    [
        ((2.0,), 'class="dot c1" d="M500.0 500z"'),  # a single point is a dot
        ((0.5, 1.5, 2.0), "step 2\nloss 1.5"),  # the values under the pointer
    ],
)
def test_a_line_chart_has_its_dots_and_values(values, drawn):
    assert drawn in draw(line_chart(*values))


def test_parts_of_a_stack_fill_the_whole_height():
    chart = StackChart(
        parts=("a", "b"), colours=(1, 2), at=(1.0, 2.0), columns=((1.0, 3.0), (2.0, 2.0))
    )
    fills = [found["d"] for name, found in tags_of(chart, "path") if "fill" in found["class"]]
    upper, lower = "M0.0 750L500.0 750L500.0 500L1000.0 500", "L1000.0 1000L500.0 1000L500.0 1000"
    assert fills[0] == f"{upper}{lower}L0.0 1000z"
    assert fills[1].startswith("M0.0 0L500.0 0L500.0 0L1000.0 0L1000.0 500")


def test_a_wide_bar_gives_every_part_its_share_and_names_it():
    forward = BarPart(name="forward", amount=3.0, words="3 ms", colour=1)
    backward = BarPart(name="backward", amount=1.0, words="1 ms", colour=4)
    html = draw(WideBar(segments=(forward, backward)))
    assert [float(found["width"]) for _, found in tags_of(html, "rect")] == [750.0, 250.0]
    assert "forward 3 ms, 75.0%" in html


def test_the_longest_bar_is_as_wide_as_its_space_and_a_marked_one_is_grey():
    bars = Bars(bars=(
        Bar(name="low", amount=10.0, words="10"),
        Bar(name="top", amount=40.0, words="40"),
        Bar(name="bad", amount=None, words="failed", marked=True),
    ))  # fmt: skip
    rects = [found for _, found in tags_of(bars, "rect")]
    assert [float(rect["width"]) for rect in rects] == [250.0, 1000.0, 0.0]
    assert rects[2]["class"] == "fill c7"


def test_a_histogram_has_a_column_for_every_count():
    html = draw(Histogram(labels=("≤16", "≤32"), counts=(5, 10), what="rows"))
    assert [float(found["height"]) for _, found in tags_of(html, "rect")] == [500.0, 1000.0]
    assert "≤16: 5 rows" in html


def test_marks_are_where_they_happened():
    marks = EventTimeline(
        lanes=("saves",), counts=(7,), marks=(Mark(lane="saves", at=5.0, words="x"),), end=10.0
    )
    html = draw(marks)
    assert "M500.0 500z" in html
    assert "<small>7</small>" in html


@each("values", [(1.0,), (0.0, 0.0), (-1.0, 1.0), (1e-9, 1e9), (1e300, 1e300)])
@each("log", [False, True])
def test_no_value_makes_a_drawing_fail(values: tuple[float, ...], log: bool):
    html = draw(line_chart(*values, log=log))
    assert not any(word in html for word in ("nan", "inf"))
    assert math.isfinite(len(html))
