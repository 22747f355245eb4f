"""When a benchmark reflects other processes on the machine rather than the card."""

from __future__ import annotations

from typing import Any

from expert.insight.ladder.ladder import Ladder, crowded, doubts_of
from expert.insight.ladder.pairs import in_turns
from tests.each import each
from tests.insight.ladders import ladder, measured, setting
from tests.wording import wording


def on(cores: int, others: float, **more: Any) -> Any:
    return measured(100.0, cores=cores, others=others, **more)


@each(
    ("seen", "words"),
    [
        (on(2, 0.2, threads=2), ""),
        (on(2, 0.4, threads=2), wording("other-processes-used")),
        (on(2, 1.2, threads=1), ""),
        (on(2, 1.4, threads=1), wording("other-processes-used-1")),
        (on(16, 12.0), ""),  # a GPU run needs two cores
        (on(16, 14.5), wording("other-processes-used-14")),
        (measured(100.0), ""),  # unknown in older results
        (on(2, 0.0, threads=1, lowered=True), wording("other-processes-use-much")),
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
        (climbed(0.0, 0.9, 1.1), [wording("other-processes-used-0")]),
        (climbed(0.0, 0.0, spread=26.0), ["windows of 'setting 1' are 26% apart"]),
        (
            climbed(0.0, 0.0, gain=1.0),
            [wording("what-won-cannot-told")],
        ),
    ],
)
def test_doubts_about_the_best_setting(found, doubts):
    assert doubts_of(found) == doubts


def test_a_ladder_without_measurements_has_no_doubts():
    assert doubts_of(ladder(setting("baseline", None, "failed"))) == []
