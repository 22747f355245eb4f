"""Memory of one of several cards: what is sharded, replicated or gathered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.planning.memory.memory import NF4_BYTES_PER_WEIGHT, estimate
from expert.planning.memory.shards import (
    GATHERED_BLOCKS,
    host_bytes,
)
from expert.planning.memory.workload import Workload
from tests.each import each
from tests.planning.planning import shape_of

LLAMA = shape_of("Llama-3.1-8B")
LORA = Workload(shape=LLAMA, rows=1, row_tokens=2048)
FULL = replace(LORA, adapter="full")


def parts(work: Workload, **changes: Any) -> dict[str, int]:
    return estimate(replace(work, **changes))


RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks" / "shards-memory-h200.json"
CASES = json.loads(RECORDS.read_text(encoding="utf-8"))["cases"]
SHAPES = {
    "llama-8b": LLAMA,
    "qwen2.5-32b": replace(
        LLAMA, layers=64, hidden=5120, ffn=27648, heads=40, vocab=152064, qkv_bias=True
    ),
    "llama-70b": replace(LLAMA, layers=80, hidden=8192, ffn=28672, heads=64),
}


@each("case", CASES, ids=lambda c: f"{c['shape']}-{c['adapter']}-{c['ranks']}")
def test_a_rank_takes_what_was_measured_on_an_h200(case):
    """Within 10 %, the promised accuracy for several cards; most are within 4 %."""
    shape = SHAPES[case["shape"]]
    work = Workload(
        shape=shape,
        rows=1,
        row_tokens=case["tokens"],
        adapter=case["adapter"],
        recomputed_blocks=shape.layers,
        compiled=False,
        engine="sharded",
        shards=case["ranks"],
    )
    planned = estimate(work)
    assert planned.allocated == pytest.approx(case["peak_bytes"], rel=0.1)
    reserved = planned.allocated + planned["allocator_slack"]
    assert reserved == pytest.approx(case["reserved_bytes"], rel=0.1)


def test_a_quantised_base_is_divided_with_its_scales_and_gathered_as_it_is_stored():
    alone = parts(LORA, quantization="int4")
    found = parts(LORA, quantization="int4", engine="sharded", shards=4)
    assert found["base_weights"] == pytest.approx(alone["base_weights"] / 4, abs=1)
    assert found["quantisation_tables"] == alone["quantisation_tables"]
    matrices = NF4_BYTES_PER_WEIGHT * LLAMA.block_linear_parameters
    norms = 2 * (LLAMA.block_parameters - LLAMA.block_linear_parameters)
    block = (found["gathered_weights"] - 2 * LLAMA.rest_parameters) / GATHERED_BLOCKS
    assert block == pytest.approx(matrices + norms, rel=1e-6)
    int8 = parts(LORA, quantization="int8", engine="sharded", shards=4)
    assert int8["base_weights"] == pytest.approx(
        parts(LORA, quantization="int8")["base_weights"] / 4, abs=1
    )


def test_what_is_offloaded_is_in_the_memory_of_the_machine_and_not_on_the_card():
    found = parts(FULL, engine="sharded", offload=True)
    assert [found[key] for key in ("base_weights", "gradients", "optimizer")] == [0, 0, 0]
    offloaded = replace(FULL, engine="sharded", offload=True, shards=4)
    assert host_bytes(offloaded, 0) == 16 * LLAMA.parameters // 4
    assert host_bytes(replace(offloaded, adapter="lora"), 100) == 25
    assert host_bytes(FULL, 100) == 0
