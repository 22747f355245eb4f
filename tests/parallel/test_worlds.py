"""Many processes train what one would: the same rows, the same losses, one run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.jobs.runs import base_model, losses_of, run, write_expert
from tests.parallel.ranks import fine, ranks, trained

# Sums of float32 in another order; the largest difference seen was 2e-6.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


def numbers_of(folder: Path) -> list[float]:
    losses = losses_of(folder)
    return [float.fromhex(losses[step]) for step in sorted(losses)]


def final_weights(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in (folder / "final").rglob("*.safetensors"):
        found |= load_file(file)
    assert found
    return found


KINDS: dict[str, dict[str, Any]] = {
    "lora, packed": {},
    "lora, padded": {"packing": False},
    "lora, sharded": {"distributed": "sharded"},
    "dora, sharded": {"distributed": "sharded", "adapter_type": "dora"},
    "int8, sharded": {"distributed": "sharded", "quantization": "int8"},
    "int4, sharded": {"distributed": "sharded", "quantization": "int4"},
    "full, sharded": {"distributed": "sharded", "adapter_type": "full", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_does(kind, base, tmp_path):
    config = {"epochs": 1, "micro_batch_size": 2, **KINDS[kind]}
    alone = run(write_expert(tmp_path / "one", base, config)).folder
    manifest = write_expert(tmp_path / "two", base, config)
    together = fine(ranks(2, trained, manifest, {}))[0]
    assert numbers_of(together) == pytest.approx(numbers_of(alone), rel=CLOSE)
    expected, weights = final_weights(alone), final_weights(together)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.sub(expected[name]).abs().max() < 1e-4, name
