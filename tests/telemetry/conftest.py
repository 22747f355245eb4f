"""A clock that tests advance by hand."""

from __future__ import annotations

import pytest


class HandClock:
    """Returns the time it was set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()
