"""Reading, judging, printing and comparing benchmark results."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.core.errors import ExpertError
from expert.insight.ladder import (
    COLUMNS,
    MARKS,
    doubts_of,
    headline,
    read_ladder,
    table_rows,
    verdict,
)
from tests.each import each
from tests.insight.ladders import ladder, measured, setting

CLIMBED = ladder(
    setting("baseline", 100.0, cumulative=1.0),
    setting("packing", 250.0, gain=2.5, cumulative=2.5, loss_difference=0.001, tolerance=0.05),
    setting("compile", None, "not here"),
    setting("attention", 90.0, "slower", gain=0.36, cumulative=0.9),
)
DIFFERS = "the loss differs by"


@each(
    ("here", "tolerance", "status", "words"),
    [
        # Speed decides beyond the spread.
        (measured(150.0, spread=10.0), 0.001, "kept", ""),
        (measured(99.0), 0.001, "no difference", "0.99x ± 0.02"),
        (measured(90.0, spread=31.5), 0.001, "no difference", "0.90x ± 0.35"),
        (measured(91.0), 0.001, "slower", "0.91x ± 0.02"),
        # A setting holds only when its loss agrees.
        (measured(150.0, loss=2.0019), 0.001, "kept", ""),
        (measured(150.0, loss=2.0021), 0.001, "disagrees", f"{DIFFERS} +0.10%, allowed is 0.1%"),
        (measured(150.0, loss=1.99), 0.001, "disagrees", f"{DIFFERS} -0.50%, allowed is 0.1%"),
        (measured(150.0, loss=3.0), None, "kept", ""),  # other rows share a step: only shown
        (measured(150.0, loss=None), None, "disagrees", "the loss is not a number"),
    ],
)
def test_speed_beyond_the_spread_and_the_loss_decide(here, tolerance, status, words):
    found, why = verdict(measured(100.0), here, tolerance=tolerance)
    assert (found, why.partition(" as fast")[0]) == (status, words)
    without = measured(100.0, loss=None)  # without a loss speed alone decides
    assert verdict(without, measured(150.0, loss=None), tolerance=0.001) == ("kept", "")


def test_a_result_is_read_back_as_it_was_written(tmp_path):
    (tmp_path / "ladder.json").write_text(CLIMBED.model_dump_json(), encoding="utf-8")
    assert read_ladder(tmp_path) == CLIMBED
    assert read_ladder(tmp_path / "ladder.json").winner == CLIMBED.rungs[1]


@each(
    ("text", "words"),
    [
        ("{", "not a result of expert benchmark"),
        ("[]", "not a result of expert benchmark: the whole"),
        ('{"format": 1, "kind": "song"}', "not a result of expert benchmark: kind"),
        (CLIMBED.model_copy(update={"format": 99}).model_dump_json(), "is of format 99, newer"),
    ],
)
def test_what_is_no_result_is_refused_in_words(tmp_path, text, words):
    (tmp_path / "ladder.json").write_text(text, encoding="utf-8")
    with pytest.raises(ExpertError, match=words):
        read_ladder(tmp_path / "ladder.json")


def test_every_setting_has_a_row_of_the_tables_width():
    rows = table_rows(CLIMBED)
    assert [row[0] for row in rows] == ["✓ baseline", "✓ packing", "– compile", "↓ attention"]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    by = dict(zip(COLUMNS, rows[1], strict=True))
    assert (by["tokens/s"], by["gain"], by["in all"]) == ("250", "2.50x", "2.50x")
    assert (by["loss"], by["off by"]) == ("2.0000", "+0.10% (±5.0%)")
    other = setting("packing", 250.0, loss_difference=0.5, tolerance=None)
    assert "+50.00%*" in table_rows(ladder(other))[0]  # how_measured says why
    why = ["", "", f"{MARKS['not here'][1]}: for a reason", "slower: for a reason"]
    assert [row[-1] for row in rows] == why


@each("file", sorted(Path("docs/benchmarks").glob("ladder-*.json")))
def test_the_results_in_the_documents_are_read(file):
    assert "times the baseline" in headline(read_ladder(file))


def test_the_headline_is_the_last_setting_that_held():
    told = "demo on Test CPU: 250 tokens/s, 2.5 times the baseline; the loss agrees on 1 kept "
    assert headline(CLIMBED).startswith(told)
    nothing = ladder(setting("baseline", None, "failed"))
    assert headline(nothing) == "demo on Test CPU: nothing could be measured"
    assert doubts_of(nothing) == []


@each(
    ("drift", "spread", "rate", "doubts"),
    [
        (0.05, 0.0, 200.0, []),
        (-0.12, 0.0, 200.0, ["the baseline's rate changed by -12% meanwhile"]),
        (0.0, 52.0, 200.0, ["windows of 'packing' are 26% apart"]),
        (0.0, 0.0, 101.0, ["no difference from the baseline was measured: 1.01x"]),
    ],
)
def test_doubts_about_the_best_setting(drift, spread, rate, doubts):
    best = setting(
        "packing",
        rate,
        measured=measured(rate, spread=spread),
        gain=rate / 100,
        cumulative=rate / 100,
    )
    found = ladder(setting("baseline", 100.0, cumulative=1.0), best, drift=drift)
    assert doubts_of(found) == doubts
    doubted = found.model_copy(update={"doubts": doubts})
    assert headline(doubted).endswith("; noisy, do not trust") == bool(doubts)
