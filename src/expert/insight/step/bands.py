"""The tokens per second to expect of a card and a model, and how good a rate is in comparison.

The reference is a share of the card's peak, from the table of rates in planning/choose/rates.py:
measured on an H200, an estimate on other cards, which is stated. The thresholds follow a guide to
the RTX 4080 Super with the character GPT: 2000 samples a second are excellent there, 1500 good,
1000 acceptable, below 500 something is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from expert.insight.record import RunRecord
from expert.insight.step.anatomy import finite
from expert.manifest.schema.manifest import CHAR_GPT
from expert.planning.choose.rates import MEASURED_CARD, is_measured_size, share_of_peak

WRONG, ACCEPTABLE, EXCELLENT = 500 / 1500, 1000 / 1500, 2000 / 1500
MIN_PARAMETERS = 67e6
"""Half the size of the smallest model in the table: below, launches and not the peak decide."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Tokens per second: the reachable rate, and thresholds for how good a rate is."""

    reference: float
    """From here on a rate is good."""
    measured: bool
    """False: an estimate, scaled by FLOPs and peak."""
    because: str
    wrong_below: float
    acceptable_from: float
    excellent_from: float


def expected_band(run: RunRecord, card: str | None) -> Band | None:
    """The band for the model of a run's plan on a card (its slug); None if unknown."""
    keys = ("model.parameters", "length.flops_per_token", "length.peak_flops")
    parameters, flops_per_token, peak_flops = (finite(run.planned(key)) for key in keys)
    characters = run.planned("model.name") == CHAR_GPT
    if not parameters or not flops_per_token or not peak_flops:
        return None
    if parameters < MIN_PARAMETERS and not characters:
        return None
    share = share_of_peak(int(parameters), compiled=True, characters=characters)
    measured = card == MEASURED_CARD and (characters or is_measured_size(int(parameters)))
    kind = "measured" if measured else "an estimate"
    reference = share * peak_flops / flops_per_token
    return Band(
        reference=reference,
        measured=measured,
        because=f"{kind}: {share:.0%} of the card's peak, as models of this size reach on an H200",
        wrong_below=reference * WRONG,
        acceptable_from=reference * ACCEPTABLE,
        excellent_from=reference * EXCELLENT,
    )
