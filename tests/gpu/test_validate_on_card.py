"""Processes that validate on a card: the verdict is that of one process."""

from __future__ import annotations

import functools

import pytest

from expert.jobs.validate import validate as validating
from expert.jobs.validate.models import models_on_cards
from tests.gpu.real_model import needs_card
from tests.jobs.test_validated_on_cards import verdict
from tests.jobs.validated_runs import as_it_was, learnt

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too
pytestmark = [pytest.mark.gpu, needs_card]


def test_processes_that_share_a_card_write_the_verdict_of_one(monkeypatch):
    asked = {"device": "cuda", "baseline": "base", "checkpoints": "all"}
    alone = verdict(learnt(), **asked)
    assert verdict(learnt(), gpus="all", **asked) == alone
    three = functools.partial(models_on_cards, [{}, {}, {}], "cuda")
    monkeypatch.setattr(validating, "_open_model", lambda gpus, device: three())
    assert verdict(learnt(), gpus="3", **asked) == alone
    assert alone["settings"]["device"] == "cuda:0"
