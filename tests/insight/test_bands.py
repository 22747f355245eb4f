"""What rate to expect: measured where it was measured, an estimate elsewhere, nothing unknown."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from expert.insight.step.bands import Band, MeasuredCase, expected_band, measured_cases
from tests.each import each
from tests.wording import wording

ROOT = Path(__file__).parents[2]
PEAK = 1e15


def case(parameters: int, share: float, **more: object) -> MeasuredCase:
    facts: dict[str, object] = {
        "card": "h200",
        "model": f"m{parameters}",
        "case": "compiled",
        "tokens_per_second": 1,
        "measured_on": "2026-01-01",
        "file": "docs/benchmarks/x.json",
    }
    return MeasuredCase(parameters=parameters, share_of_peak=share, **{**facts, **more})  # type: ignore[arg-type]


CASES = (case(10**8, 0.2), case(10**8, 0.3), case(10**10, 0.5))


def band(parameters: int, card: str | None = "h200", flops: float = 1e9) -> Band:
    found = expected_band(
        card=card, parameters=parameters, flops_per_token=flops, peak_flops=PEAK, cases=CASES
    )
    assert found is not None
    return found


def test_the_packaged_table_is_what_the_script_makes_of_the_measurements():
    made = runpy.run_path(str(ROOT / "benchmarks" / "measured_rates.py"))["rates"]()
    stored = json.loads((ROOT / "src/expert/insight/rates.json").read_text(encoding="utf-8"))
    assert made
    assert stored == made


def test_the_measured_card_and_size_give_the_best_measured_share():
    found = band(10**8)
    assert found.measured
    assert found.reference == pytest.approx(0.3 * PEAK / 1e9)


def test_another_card_is_an_estimate_that_says_so():
    found = band(10**8, card="rtx-4090")
    assert not found.measured
    assert found.because.startswith("an estimate")


def test_sizes_between_measured_ones_lie_between_them():
    # 10^9 is half-way from 10^8 to 10^10 on a logarithmic scale: half-way from 0.3 to 0.5.
    assert band(10**9).reference == pytest.approx(0.4 * PEAK / 1e9)
    assert not band(10**9).measured


def test_sizes_above_all_measured_ones_take_the_largest():
    assert band(10**12).reference == pytest.approx(0.5 * PEAK / 1e9)


@pytest.mark.parametrize(
    "unknown", [{"parameters": None}, {"flops_per_token": None}, {"peak_flops": None}]
)
def test_what_is_unknown_gives_no_band(unknown):
    known = {"parameters": 10**8, "flops_per_token": 1e9, "peak_flops": PEAK}
    assert expected_band(card="h200", **{**known, **unknown}, cases=CASES) is None


def test_models_much_smaller_than_any_measured_one_have_no_band():
    found = expected_band(
        card="h200", parameters=10**6, flops_per_token=1e6, peak_flops=PEAK, cases=CASES
    )
    assert found is None


@each(
    ("rate", "word"),
    [
        (499, wording("something-is-wrong")),
        (501, "slow"),
        (1001, "acceptable"),
        (1500, "good"),
        (2001, "excellent"),
    ],
)
def test_the_words_are_those_of_the_guide_to_the_4080_super(rate, word):
    assert Band(reference=1500, measured=True, because="").word(rate) == word


def test_every_packaged_case_names_its_file():
    for case in measured_cases():
        assert (ROOT / case.file).is_file()
