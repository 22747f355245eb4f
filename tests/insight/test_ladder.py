"""Reading, judging, printing and comparing benchmark results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.insight.ladder.comparison import compare
from expert.insight.ladder.ladder import (
    MARKS,
    Ladder,
    LadderError,
    SettingResult,
    crowded,
    doubts_of,
    read_ladder,
    verdict,
)
from expert.insight.ladder.pairs import Paired, in_turns, one_after_the_other, spread_of
from expert.insight.ladder.table import COLUMNS, as_markdown, headline, how_measured, table_rows
from tests.each import each
from tests.insight.ladders import ladder, measured, setting
from tests.insight.pages import write_run

CLIMBED = ladder(
    setting("baseline", 100.0, cumulative=1.0),
    setting("packing", 250.0, gain=2.5, cumulative=2.5, loss_difference=0.001, tolerance=0.05),
    setting("compile", None, "not here"),
    setting("attention", 90.0, "slower", gain=0.36, cumulative=0.9),
)


def paired(*ratios: float) -> Paired:
    return in_turns("packing", [(100.0, 100.0 * ratio) for ratio in ratios])


FASTER = paired(1.5, 1.5, 1.5)


@each(
    ("ratios", "cost", "status", "words"),
    [
        ((1.4, 1.5, 1.6), "", "kept", ""),
        ((1.4, 1.5, 1.6), "needs 2 GiB", "kept", ""),
        ((0.98, 0.99, 1.0), "", "no difference", "0.99x ± 0.01 of 'packing'"),
        ((0.6, 0.9, 1.3), "", "no difference", "0.90x ± 0.35 of 'packing'"),
        (
            (0.98, 1.01, 1.02),
            "needs 2 GiB",
            "no gain",
            "1.01x ± 0.02 of 'packing', and it needs 2 GiB",
        ),
        (
            (0.9, 0.9, 0.91, 0.92, 0.92),
            "",
            "slower",
            "0.91x ± 0.02 as fast as 'packing', the last kept setting",
        ),
    ],
)
def test_speed_decides_beyond_the_spread_and_what_costs_nothing_stays_within_it(
    ratios, cost, status, words
):
    found = verdict(measured(100.0), measured(150.0), 0.001, paired=paired(*ratios), cost=cost)
    assert found == (status, words)


@each(
    ("here", "status", "words"),
    [
        (measured(150.0, loss=2.0019), "kept", ""),
        (measured(150.0, loss=2.0021), "disagrees", "the loss differs by +0.10%, allowed is 0.1%"),
        (measured(150.0, loss=1.99), "disagrees", "the loss differs by -0.50%, allowed is 0.1%"),
        (
            measured(150.0, loss=float("nan")),
            "disagrees",
            "the loss on the held-out rows is not a number",
        ),
        (measured(150.0, loss=None), "kept", ""),  # without held-out rows speed alone decides
    ],
)
def test_a_setting_holds_only_when_its_loss_agrees(here, status, words):
    below = measured(100.0, loss=None if here.loss is None else 2.0)
    assert verdict(below, here, 0.001, paired=FASTER) == (status, words)


def test_a_result_is_read_back_as_it_was_written(tmp_path):
    (tmp_path / "ladder.json").write_text(CLIMBED.model_dump_json(), encoding="utf-8")
    assert read_ladder(tmp_path) == CLIMBED
    assert read_ladder(tmp_path / "ladder.json").winner == CLIMBED.rungs[1]


@each(
    ("text", "words"),
    [
        ("{", "not a result of expert benchmark"),
        ("[]", "not a result of expert benchmark: the whole"),
        ('{"format": 99}', "is of format 99, newer than 3"),
        ('{"format": 1, "kind": "song"}', "not a result of expert benchmark: kind"),
    ],
)
def test_what_is_no_result_is_refused_in_words(tmp_path, text, words):
    (tmp_path / "ladder.json").write_text(text, encoding="utf-8")
    with pytest.raises(LadderError, match=words):
        read_ladder(tmp_path / "ladder.json")


def test_every_setting_has_a_row_of_the_tables_width():
    rows = table_rows(CLIMBED)
    assert [row[0] for row in rows] == ["✓ baseline", "✓ packing", "– compile", "↓ attention"]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    by = dict(zip(COLUMNS, rows[1], strict=True))
    assert (by["tokens/s"], by["gain"], by["in all"]) == ("250", "2.50x", "2.50x")
    assert (by["loss"], by["off by"]) == ("2.0000", "+0.10% (±5.0%)")
    why = ["", "", f"{MARKS['not here'][1]}: for a reason", "slower: for a reason"]
    assert [row[-1] for row in rows] == why


def test_settings_judged_by_their_own_loss_share_a_footnote_by_the_reason():
    def other(name: str, why: str, apart: float) -> SettingResult:
        because = f"{why}: x"
        return setting(
            name, 250.0, own_difference=apart, tolerance=0.001, tolerance_because=because
        )

    shown = ladder(
        setting("baseline", 100.0),
        other("packing", "other rows share a step", -0.0009),
        other("attention", "dropout draws other numbers", 0.0001),
        other("fused loss", "dropout draws other numbers", -0.0002),
    )
    row = dict(zip(COLUMNS, table_rows(shown)[1], strict=True))
    assert row["off by"] == "itself -0.09%* (±0.1%)"
    one, two = [line for line in how_measured(shown) if line.startswith("* ")]
    assert one.startswith("* packing: other rows share a step, so the weights differ from those")
    assert one.endswith("at most 0.09%")
    assert two.startswith("* attention, fused loss: dropout draws other numbers, so")
    assert two.endswith("at most 0.02%")


def test_it_is_said_how_the_gain_over_the_baseline_was_got():
    direct = in_turns("baseline", [(100.0, 240.0), (100.0, 250.0), (100.0, 260.0)])
    words = "\n".join(how_measured(ladder(*_pair(), against_baseline=direct)))
    how = "baseline directly at the end (in turns, 3 pairs, 2.50x ± 0.10)"
    assert how in words
    assert "the gains of the faster settings, multiplied" in "\n".join(
        how_measured(ladder(*_pair()))
    )
    assert "over the baseline, measured first" in "\n".join(how_measured(CLIMBED))


def test_a_product_of_gains_that_nobody_held_against_the_baseline_is_told_as_a_range():
    """On an H200 the product of gains was 60.5 where the rates of two minutes gave 21.5."""

    def gained(below: str) -> Paired:
        return in_turns(below, [(100.0, 300.0)] * 2)

    settings = [
        setting("baseline", 100.0, cumulative=1.0),
        setting("packing", 260.0, cumulative=3.0, below="baseline", paired=gained("baseline")),
        setting("compile", 600.0, cumulative=9.0, below="packing", paired=gained("packing")),
    ]
    assert "600 tokens/s, 6.0 to 9.0 times the baseline" in headline(ladder(*settings))
    assert "260 tokens/s, 3.0 times the baseline" in headline(ladder(*settings[:2]))
    direct = in_turns("baseline", [(100.0, 700.0)] * 2)
    settings[-1] = settings[-1].model_copy(update={"cumulative": 7.0})
    told = headline(ladder(*settings, against_baseline=direct))
    assert "600 tokens/s, 7.0 times the baseline" in told


def test_what_cannot_be_told_from_the_baseline_is_not_called_so_many_times_as_fast():
    unclear = in_turns("baseline", [(100.0, 100.0), (100.0, 198.0)])
    settings = [
        setting("baseline", 100.0, cumulative=1.0),
        setting("the rest", 150.0, "no difference", gain=1.49, cumulative=1.0, paired=unclear),
    ]
    told = headline(ladder(*settings, against_baseline=unclear))
    assert "150 tokens/s, no measured difference from the baseline (1.49x ± 0.49)" in told


def test_a_loss_that_cannot_be_compared_is_not_said_to_agree():
    def own(name: str) -> SettingResult:
        return setting(name, 250.0, own_difference=0.0, loss_difference=0.2)

    settings = [setting("baseline", 100.0, cumulative=1.0), own("packing"), own("attention")]
    alone = "; all 2 settings that stayed compute their own loss right"
    assert headline(ladder(*settings)).endswith(alone)
    both = headline(ladder(*settings, setting("fused loss", 270.0, loss_difference=0.0)))
    agrees = (
        "; the loss agrees on the setting that can be compared, and 2 more compute their own right"
    )
    assert both.endswith(agrees)


def _pair() -> list[SettingResult]:
    gained = in_turns("baseline", [(100.0, 250.0)] * 3)
    return [
        setting("baseline", 100.0, cumulative=1.0),
        setting("packing", 250.0, gain=2.5, cumulative=2.5, paired=gained),
    ]


def test_a_result_of_the_format_before_is_still_read():
    [file] = Path("docs/benchmarks").glob("ladder-expert-json-cpu.json")
    old = json.loads(file.read_text(encoding="utf-8")) | {"format": 1}
    for one in old["rungs"]:
        one.pop("paired", None)
    old = {key: value for key, value in old.items() if key not in ("against_baseline", "doubts")}
    assert Ladder.model_validate(old).against_baseline is None


def test_the_headline_is_the_last_setting_that_held():
    assert headline(CLIMBED) == (
        "demo on Test CPU: 250 tokens/s, 2.5 times the baseline; the loss agrees on "
        "the setting that stayed"
    )
    nothing = ladder(setting("baseline", None, "failed"))
    assert headline(nothing) == "demo on Test CPU: nothing could be measured"


def test_a_name_cannot_break_out_of_the_markdown_table():
    hostile = ladder(name="a | b\n# <script>x</script>")
    text = as_markdown(hostile)
    assert text.startswith("# a \\| b # &lt;script>x&lt;/script>: tiny on Test CPU\n")
    assert "<script>" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 3


def test_two_runs_are_compared_by_their_settled_steps_and_the_losses_of_each_split(tmp_path):
    for name, more in (("one", 0.0), ("two", 1.0)):
        lines = [{"event": "step", "step": 1, "tokens_per_second": 1.0, "loss": 3.0}]
        rates = {"tokens_per_second": 100.0 + 50 * more, "steps_per_second": 2.0 + 2 * more}
        lines += [{**lines[0], **rates, "step": n, "loss": 2.0} for n in range(2, 8)]
        lines += [
            {"event": "eval", "step": 1, "loss": 1.0 + more, "split": "validation"},
            {"event": "eval", "step": 3, "loss": 1.5 + more, "split": "validation"},
            {"event": "eval", "step": 3, "loss": 4.0 + more, "split": "test"},
        ]
        write_run(tmp_path / name, [*lines, {"event": "finished", "seconds": 4.0}])
    found = {row[0]: row[1:] for row in compare(tmp_path / "one", tmp_path / "two")}
    assert found["tokens per second"] == (100.0, 150.0, 1.5)
    assert found["steps per second"] == (2.0, 4.0, 2.0)
    assert found["training loss"] == (2.0, 2.0, 1.0)
    assert found["validation loss"][:2] == (1.5, 2.5)
    assert found["best validation loss"][:2] == (1.0, 2.0)
    assert found["test loss"][:2] == (4.0, 5.0)
    assert found["seconds"] == (4.0, 4.0, 1.0)


@each("comparable", [True, False])
def test_a_setting_whose_steps_hold_rows_of_one_length_does_not_hold(comparable):
    """Its steps have other rows than those of the setting below, so the loss would not show it."""
    mixed, sorted_rows = (
        measured(150.0, own_loss=2.0, clumping=clumping) for clumping in (1.1, 15.3)
    )
    found = [
        verdict(measured(100.0), here, 0.001, paired=FASTER, comparable=comparable)
        for here in (mixed, sorted_rows)
    ]
    assert found[0] == ("kept", "")
    assert found[1] == (
        "disagrees",
        (
            "rows of one length share a step: their mean length varies 15.3 times as much "
            "as by chance, and such steps train less"
        ),
    )
    # Few steps differ by chance.
    few = measured(150.0, clumping=3.5, seconds_per_epoch=32.0)  # 48 rows, 6 steps
    assert verdict(measured(100.0), few, 0.001, paired=FASTER) == ("kept", "")


# --- pairs of windows -----------------------------------------------------------------------------


def test_the_spread_is_the_distance_of_the_quartiles():
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert spread_of([7.0]) == 0.0


def test_a_machine_that_slows_down_slows_both_halves_of_a_pair():
    """The rates fall to a third, the ratio stays."""
    found = in_turns("below", [(900.0, 1080.0), (600.0, 720.0), (300.0, 360.0)])
    assert found.gain == pytest.approx(1.2)
    assert found.difference == "faster"


@each(
    ("ratios", "difference"),
    [
        ((1.3, 1.2, 1.25), "faster"),
        ((0.7, 0.8, 0.75, 0.71, 0.79), "slower"),
        ((0.7, 0.8, 0.75), "none"),  # which may be chance: see looks_slower
        ((0.3, 0.31), "slower"),
        ((0.7, 1.1, 0.95), "none"),
        ((1.01, 1.01, 1.01), "none"),  # within 2 %, which counts as equal
        ((0.99, 0.99), "none"),
        ((0.9, 1.2), "none"),  # both of two must agree
        ((1.03, 1.05, 1.07), "faster"),
        ((1.02, 1.04, 1.07), "none"),  # three may be close by chance: twice their spread
        ((0.93, 0.95, 0.96, 0.97, 0.99), "slower"),
        ((0.88, 0.85, 0.77, 1.12, 0.85), "none"),  # all of five must agree
        ((0.7, 0.71, 0.72, 0.73, 0.74, 0.75, 0.76, 1.1), "slower"),  # all but one of eight
        ((1.3, 1.31, 1.32, 1.33, 1.34, 1.35, 0.9), "none"),  # all of seven
    ],
)
def test_a_difference_is_told_only_beyond_the_spread(ratios, difference):
    assert in_turns("below", [(100.0, 100.0 * each) for each in ratios]).difference == difference


def test_windows_of_different_minutes_carry_the_drift_between_them_into_the_spread():
    steady = one_after_the_other("below", [100.0, 101.0], [110.0, 111.0])
    assert (steady.how, steady.difference) == ("one after the other", "faster")
    drifted = one_after_the_other("below", [100.0, 101.0, 130.0, 131.0], [110.0, 111.0])
    assert len(drifted.ratios) == 8
    assert drifted.difference == "none"


def test_what_looks_slower_in_few_pairs_wants_more_of_them():
    def of(*ratios: float) -> bool:
        return in_turns("below", [(100.0, 100.0 * each) for each in ratios]).looks_slower

    assert of(0.68, 0.68)
    assert not of(0.68, 0.68, 0.68, 0.68, 0.68)  # not only looks: it is slower
    assert not of(0.9, 1.1)
    assert not of(1.2, 1.3)


# --- other processes on the machine ---------------------------------------------------------------


def on(cores: int, others: float, **more: Any) -> Any:
    return measured(100.0, cores=cores, others=others, **more)


@each(
    ("seen", "words"),
    [
        (on(2, 0.2, threads=2), ""),
        (on(2, 0.4, threads=2), "other processes used 0.4 of 2 cores meanwhile"),
        (on(2, 1.2, threads=1), ""),
        (on(2, 1.4, threads=1), "other processes used 1.4 of 2 cores meanwhile"),
        (on(16, 12.0), ""),  # a GPU run needs two cores
        (on(16, 14.5), "other processes used 14.5 of 16 cores meanwhile"),
        (measured(100.0), ""),  # unknown in older results
        (
            on(2, 0.0, threads=1, lowered=True),
            "other processes use so much of the 2 cores that only 1 thread could run",
        ),
    ],
)
def test_a_setting_is_crowded_if_more_cores_are_needed(seen, words):
    assert crowded(seen) == words


def climbed(*others: float, spread: float = 0.0, gain: float = 2.0) -> Ladder:
    settings = [
        setting(f"setting {n}", 100.0, measured=on(2, each, threads=2, spread=spread))
        for n, each in enumerate(others)
    ]
    direct = in_turns("baseline", [(100.0, 100.0 * gain), (100.0, 102.0 * gain)])
    return ladder(*settings, against_baseline=direct)


@each(
    ("found", "doubts"),
    [
        (climbed(0.0, 0.1, 0.2), []),
        (climbed(0.0, 0.1, 1.2), []),  # one setting of three: paired timing corrects for it
        (climbed(0.0, 0.9, 1.1), ["other processes used 0.9 of 2 cores meanwhile"]),
        (climbed(0.0, 0.0, spread=26.0), ["windows of 'setting 1' are 26% apart"]),
        (
            climbed(0.0, 0.0, gain=1.0),
            ["no difference from the baseline was measured: 1.01x ± 0.01"],
        ),
    ],
)
def test_doubts_about_the_best_setting(found, doubts):
    assert doubts_of(found) == doubts


def test_a_ladder_without_measurements_has_no_doubts():
    assert doubts_of(ladder(setting("baseline", None, "failed"))) == []
