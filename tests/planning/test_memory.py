"""The memory model compared with measured peaks and with common sense."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.planning.memory.memory import (
    estimate,
    loss_bytes,
    loss_chunk_rows,
    workspace_bytes,
)
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.models.known_models import KNOWN_MODELS
from expert.planning.models.shapes import ModelShape
from tests.each import each
from tests.planning.planning import shape_of

MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "memory-h200.json"
SHAPES = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "llama-1b": "Llama-3.2-1B",
    "llama-8b": "Llama-3.1-8B",
    "smollm2-135m": "SmolLM2-135M",
}
ATTENTION = {"varlen": "flash", "sdpa": "sdpa", "sdpa-flash": "flash", "eager": "eager"}
ADAPTERS = {"lora": "lora", "lora-qv": "lora", "ia3": "ia3", "full-amp": "full"}
BASES = {"bf16": "none", "nf4": "int4", "int8": "int8"}
RECOMPUTED: dict[str, Callable[[int], int]] = {
    "none": lambda layers: 0,
    "half": lambda layers: (layers + 1) // 2,
    "full": lambda layers: layers,
}
TARGETS = {
    "lora-qv": frozenset({"q_proj", "v_proj"}),
    "ia3": frozenset({"k_proj", "v_proj", "down_proj"}),
}
RUNS = MEASURED.with_name("memory-runs-h200.json")
# The worst of the modelled cases is off by 3.8 % (a 135M model, fully trained).
TOLERANCE = 0.05
# The worst of the runs is off by 5.1 % (0.6B fully trained with checkpointing, 16 rows).
RUN_TOLERANCE = 0.055


def modelled_records() -> list[dict[str, Any]]:
    """Measured cases that Expert can run: 16-bit adapters or float32 masters, whole blocks
    checkpointed. Float32 adapters, bf16 masters and selective saving were measured to compare."""
    records = json.loads(MEASURED.read_text(encoding="utf-8"))["records"]
    return [r for r in records if r["adapter"] in ADAPTERS and r["checkpoint"] != "selective"]


def workload_of(record: dict[str, Any]) -> Workload:
    shape = shape_of(SHAPES[record["shape"]])
    return Workload(
        shape=shape,
        rows=record["tokens"] // 2048,
        row_tokens=2048,
        adapter=ADAPTERS[record["adapter"]],
        targets=TARGETS.get(record["adapter"], frozenset()),
        quantization=BASES[record["base"]],
        compiled=record["blocks"] == "compiled",
        attention=ATTENTION[record["attention"]],
        fused_loss=record["loss"] == "fused",
        recomputed_blocks=RECOMPUTED[record["checkpoint"]](shape.layers),
        accumulates=False,
    )


def guess_of(record: dict[str, Any]) -> float:
    """The estimate, with the loss of the benchmark: Liger's, whose chunks of logits are as large as
    the hidden states, where ours are 1 GiB."""
    work = workload_of(record)
    guess = float(estimate(work).allocated)
    if work.fused_loss:
        shape = work.shape
        share = math.ceil(work.tokens / math.ceil(shape.vocab / shape.hidden))
        theirs = min(work.tokens, 1 << max(0, share - 1).bit_length())
        ours = min(work.tokens, loss_chunk_rows(shape.vocab))
        loss, walking = loss_bytes(work), workspace_bytes(work)
        less = loss - 2 * shape.vocab * (ours - theirs)
        guess += max(less, walking) - max(loss, walking)
    return guess


@each("record", modelled_records(), ids=lambda record: f"{record['name']}-{record['tokens']}")
def test_the_estimate_is_near_the_measured_peak(record: dict[str, Any]):
    assert guess_of(record) == pytest.approx(record["peak"], rel=TOLERANCE)


def measured_runs() -> list[dict[str, Any]]:
    results = json.loads(RUNS.read_text(encoding="utf-8"))["results"]
    return [result for result in results if "allocated_bytes" in result]


def workload_of_run(result: dict[str, Any]) -> Workload:
    stored = result["workload"]
    shape, targets = ModelShape(**stored["shape"]), frozenset(stored["targets"])
    return Workload(**{**stored, "shape": shape, "targets": targets})


@each("result", measured_runs(), ids=lambda run: f"{run['case']}-{run['rows']}-{run['segments']}")
def test_the_estimate_is_near_the_peak_of_a_real_run(result: dict[str, Any]):
    guess = estimate(workload_of_run(result)).allocated
    assert guess == pytest.approx(result["allocated_bytes"], rel=RUN_TOLERANCE)


def test_the_total_covers_what_the_card_reported_as_used_in_the_middle_of_the_cases():
    """Context and slack are medians: about half of the runs may have used a little more."""
    ratios = sorted(
        estimate(workload_of(record)).total / record["device"]["used"]
        for record in modelled_records()
    )
    assert ratios[len(ratios) // 2] >= 1.0
    assert ratios[0] > 0.85


# Published for LoRA r=16 on all linear layers, mean document 1024 tokens, causal attention.
@each(
    ("model", "lora", "recomputed", "full"),
    [
        ("Qwen3-0.6B", 2.86, 3.85, 3.99),
        ("Llama-3.2-1B", 5.25, 7.26, 7.65),
        ("Llama-3.2-3B", 13.61, 19.43, 19.89),
        ("Llama-3.1-8B", 31.21, 45.44, 45.97),
    ],
)
def test_flops_per_token_match_the_worked_out_floor(model, lora, recomputed, full):
    shape = shape_of(model)
    work = Workload(shape=shape, rows=1, row_tokens=1024)
    everything = replace(work, recomputed_blocks=shape.layers)
    for case, gigaflops in (
        (work, lora),
        (everything, recomputed),
        (replace(work, adapter="full"), full),
    ):
        assert flops_per_token(case, 1024) / 1e9 == pytest.approx(gigaflops, abs=0.006)


workloads = st.builds(
    Workload,
    shape=st.sampled_from([known.shape for known in KNOWN_MODELS]),
    rows=st.integers(1, 64),
    row_tokens=st.sampled_from([128, 512, 2048, 8192]),
    adapter=st.sampled_from(["lora", "dora", "ia3", "lokr", "adalora", "full", "none"]),
    rank=st.integers(1, 256),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    optimizer=st.sampled_from(["adamw_torch", "adamw_bnb_8bit", "paged_adamw_8bit", "sgd"]),
    compiled=st.booleans(),
    fused_loss=st.booleans(),
    attention=st.sampled_from(["eager", "sdpa", "flash", "flex"]),
    soft_tokens=st.sampled_from([0, 48]),
)


@given(workloads)
def test_less_never_takes_more_and_the_parts_make_up_the_total(work: Workload):
    parts, total = estimate(work), estimate(work).total
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == total
    assert estimate(replace(work, rows=work.rows + 1)).total > total
    assert estimate(replace(work, recomputed_blocks=work.shape.layers)).total <= total
    # max_seq_length counts soft prompts, packed or not, so that a batch of them is no larger.
    with_prompts, without = replace(work, soft_tokens=48), replace(work, soft_tokens=0)
    assert with_prompts.tokens == without.tokens == work.rows * work.row_tokens
    assert estimate(with_prompts)["activations"] == estimate(without)["activations"]
    if work.adapter != "full":
        bases = [estimate(replace(work, quantization=q)) for q in ("int4", "int8", "none")]
        weights = [base["base_weights"] + base["quantisation_tables"] for base in bases]
        assert weights == sorted(weights)


def test_trainable_parameters_are_those_of_the_adapter():
    lora = Workload(shape=shape_of("Qwen3-0.6B"), rows=1, row_tokens=1)
    outputs = sum(columns for _, columns in lora.shape.linear_sizes.values())
    count = 10_092_544  # as PEFT counts r=16 on all seven projections of Qwen3-0.6B
    magnitudes = lora.shape.layers * outputs
    counts = {"lora": count, "dora": count + magnitudes, "full": 596_049_920, "none": 0}
    for adapter, parameters in counts.items():
        assert replace(lora, adapter=adapter).trainable_parameters == parameters


def test_embedding_and_head_trained_beside_an_adapter_are_counted_once_if_they_are_one():
    shape = shape_of("Llama-3.1-8B")  # with a head of its own
    lora = Workload(shape=shape, rows=1, row_tokens=512)
    both = replace(lora, whole=frozenset({"embed_tokens", "lm_head"}))
    table = shape.vocab * shape.hidden
    assert both.trainable_parameters - lora.trainable_parameters == 2 * table
    tied = replace(both, shape=replace(shape, tied_head=True))
    assert tied.trainable_parameters - lora.trainable_parameters == table
    grown = estimate(both).total - estimate(lora).total
    # bf16 weights beside float32 masters, their gradients and Adam's two moments.
    assert grown > 2 * table * (2 + 4 + 4 + 8)
