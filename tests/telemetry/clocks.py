"""A clock that a test turns by hand."""

from __future__ import annotations


class HandClock:
    """Shows the seconds it was turned to."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds
