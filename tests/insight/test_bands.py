"""The expected rate: measured on the card of the table, estimated on others, or unknown."""

from __future__ import annotations

import pytest

from expert.insight.record import RunRecord
from expert.insight.step.bands import expected_band
from expert.manifest.schema.manifest import CHAR_GPT
from tests.each import each

KNOWN = {"card": "h200", "parameters": 8 * 10**9, "flops_per_token": 1e9, "peak_flops": 1e15}


@each(
    ("changes", "share", "measured"),
    [
        ({}, 0.532, True),
        ({"parameters": 10**10}, 0.532, True),  # within a quarter of a measured size
        ({"parameters": 10**12}, 0.532, False),
        ({"card": "rtx-4090"}, 0.532, False),
        ({"parameters": 3 * 10**9}, 0.4889, False),  # between 1.24B and 8B, logarithmically
        ({"parameters": 10**7, "name": CHAR_GPT}, 0.285, True),
        # Without these numbers there is no band.
        ({"parameters": None}, None, None),
        ({"parameters": 10**6}, None, None),
        ({"flops_per_token": None}, None, None),
        ({"peak_flops": None}, None, None),
    ],
)
def test_the_rate_is_the_share_of_the_peak_that_such_models_reach(changes, share, measured):
    known = {**KNOWN, **changes}
    length = {key: known[key] for key in ("flops_per_token", "peak_flops")}
    model = {"parameters": known["parameters"], "name": known.get("name", "x")}
    found = expected_band(RunRecord(plan={"model": model, "length": length}), known["card"])
    assert (found is None) == (share is None)
    if found is None:
        return
    assert found.reference == pytest.approx(share * 1e6, rel=1e-3)
    assert found.measured is measured
    assert found.because.startswith("measured" if measured else "an estimate")
    thresholds = (found.wrong_below, found.acceptable_from, found.reference, found.excellent_from)
    assert [round(1500 * each / found.reference) for each in thresholds] == [500, 1000, 1500, 2000]
