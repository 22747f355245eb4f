"""Two ranks on one card, which gloo allows and NCCL does not: slow, and right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.runs import base_model, run, write_expert
from tests.parallel.ranks import fine, ranks, trained
from tests.parallel.test_worlds import numbers_of

pytestmark = pytest.mark.gpu
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, sharded": {"distributed": "sharded"},
    "int8, sharded": {"distributed": "sharded", "quantization": "int8"},
    "int4, sharded": {"distributed": "sharded", "quantization": "int4"},
    "dora on int8, sharded": {
        "distributed": "sharded",
        "adapter_type": "dora",
        "quantization": "int8",
    },
    "full, sharded": {"distributed": "sharded", "adapter_type": "full", "learning_rate": 1e-3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_on_one_card_train_as_one_does(kind, tmp_path):
    # bfloat16 has steps of 0.4 %; where weights are spread, norms compute in it too.
    config = {"epochs": 1, "micro_batch_size": 2, "torch_compile": False, **KINDS[kind]}
    base, options = base_model(layers=2), {"device": "cuda"}
    alone = run(write_expert(tmp_path / "one", base, config)).folder
    manifest = write_expert(tmp_path / "two", base, config)
    together = fine(ranks(2, trained, manifest, options, spawn=True))[0]
    assert numbers_of(together) == pytest.approx(numbers_of(alone), rel=1e-2)
