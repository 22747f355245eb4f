"""A stand-in for CUDA graphs of decoding steps."""

from __future__ import annotations

from typing import Any

import pytest

from expert.answer import steps
from tests.parallel.fake_capture import FakeCapture


class Undone(FakeCapture):
    """As on a card, a captured step is not executed: what it changed is undone."""

    steps: Any

    def __call__(self, run):
        changed = [self.steps._lengths]
        before = [tensor.clone() for tensor in changed]
        found = super().__call__(run)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return found


@pytest.fixture
def recorder(monkeypatch) -> Undone:
    found, record = Undone(), steps.FixedSteps._capture_step

    def told(self, *args):
        found.steps = self
        record(self, *args)

    monkeypatch.setattr(steps.FixedSteps, "_capture_step", told)
    monkeypatch.setattr(steps, "step_capture", lambda device: found)
    monkeypatch.setattr("expert.answer.prompt_reader.MOST_TOKENS", 0)  # only steps are captured
    return found
