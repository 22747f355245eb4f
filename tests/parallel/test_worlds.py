"""Many processes train what one would: the same rows, the same losses, one run folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.jobs.runs import base_model, events_of, losses_of, run, write_expert
from tests.parallel.ranks import ranks, trained


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


def as_numbers(losses: dict[int, str]) -> list[float]:
    return [float.fromhex(losses[step]) for step in sorted(losses)]


KINDS = {
    "lora packed": {},
    "lora padded": {"packing": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(kind, base, tmp_path):
    config = {"epochs": 1, "micro_batch_size": 2, **KINDS[kind]}
    alone = run(write_expert(tmp_path / "one", base, config)).folder
    ended = ranks(2, trained, write_expert(tmp_path / "two", base, config), {})
    assert [each.raised for each in ended] == ["", ""]
    together = ended[0].made
    assert as_numbers(losses_of(together)) == pytest.approx(as_numbers(losses_of(alone)), rel=1e-5)
