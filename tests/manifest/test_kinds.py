"""Every name a manifest may use for an optimizer, schedule or adapter has its row, and plans."""

from __future__ import annotations

from typing import get_args

import pytest

from expert.manifest.schema.config import AdapterType, Optimizer, Scheduler
from expert.manifest.schema.kinds import ADAPTERS, OPTIMIZERS, SCHEDULES


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (get_args(Optimizer), OPTIMIZERS),
        (get_args(Scheduler), SCHEDULES),
        (set(get_args(AdapterType)) - {"full", "none"}, ADAPTERS),
    ],
    ids=["optimizers", "schedules", "adapters"],
)
def test_every_name_has_a_row_and_every_row_a_name(names, table):
    assert set(names) == set(table)
