"""Rows that say which of two answers is better, or whether an answer is good.

Only supervised fine-tuning is built: the preferred half of such rows can be trained on, on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expert.data.records import DataError, UnfitRow

PREFERRED, ALL = "preferred", "all"
"""Values of training.dataset.preference_rows."""
_PAIRS = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
)
_LABELS = ("label", "kto_tag")
ASK_FOR_IT = "training.dataset.preference_rows: preferred"


def chosen_and_rejected(known: Mapping[str, str]) -> tuple[str, str] | None:
    """The columns with the better and with the worse answer; None where there are none."""
    for chosen, rejected in _PAIRS:
        if chosen in known and rejected in known:
            return known[chosen], known[rejected]
    return None


def label_of(known: Mapping[str, str]) -> str:
    """The column that may say whether an answer is good; "" where there is none."""
    return next((known[name] for name in _LABELS if name in known), "")


def refused_pairs(chosen: str, rejected: str) -> DataError:
    return DataError(
        f"preference rows ({chosen!r} and {rejected!r}) need DPO; only supervised fine-tuning is "
        f"built  (to train on the answers in {chosen!r} alone: {ASK_FOR_IT}, or expert new "
        "--preferred)"
    )


def refused_label(label: str) -> DataError:
    return DataError(
        f"the column {label!r} says of each answer whether it is good, and all of them would be "
        f"trained on as good; only supervised fine-tuning is built  (to train on those where it is "
        f"true: {ASK_FOR_IT}, or expert new --preferred; where it means something else: "
        f"training.dataset.preference_rows: {ALL})"
    )


def is_preferred(value: Any, column: str) -> bool:
    """Whether a label says that the answer is good."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise UnfitRow(f"column {column!r}: {value!r} is neither true nor false")
