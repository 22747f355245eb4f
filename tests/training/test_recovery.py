"""The plan after a failure: what changes, what never does, and when nothing is left to try."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.planning.run_plan import RunPlan
from expert.training.recovery import (
    Failure,
    KernelUnavailable,
    OutOfMemory,
    PrecisionUnsupported,
    changes,
    plan_after,
)
from tests.each import each
from tests.planning.planning import decision, manifest, plan

NO_ROOM = OutOfMemory(where="training", message="CUDA out of memory.\nTried to allocate 2 GiB")


def changed(made: RunPlan, **slices) -> RunPlan:
    """The plan with some values replaced, as if they had been settled so."""
    tree = made.model_dump()
    for name, values in slices.items():
        tree[name].update(values)
    return RunPlan.model_validate(tree)


def with_batch(made: RunPlan, sequences: int | None, micro: int) -> RunPlan:
    batch = {"sequences_per_update": sequences, "micro_batch": micro}
    accumulation = None if sequences is None else -(-sequences // micro)
    return changed(made, batch={**batch, "accumulation": accumulation})


def after(made: RunPlan, failure: Failure) -> RunPlan:
    found = plan_after(made, failure)
    assert found is not None
    return found


def changed_values(before: RunPlan, later: RunPlan) -> dict[str, object]:
    return {d.path: d.value for d in changes(before, later)}


@pytest.fixture(scope="module")
def usual() -> RunPlan:
    """LoRA on a card; sixteen rows a step, all at once."""
    return with_batch(plan(manifest({"packing": False})), 16, 16)


# --- out of memory -------------------------------------------------------------------------------


def test_out_of_memory_disables_cuda_graphs_first(usual):
    recorded = changed(usual, kernels={"cuda_graphs": True})
    found = after(recorded, NO_ROOM)
    assert changed_values(recorded, found) == {"kernels.cuda_graphs": False}
    assert after(found, NO_ROOM).batch.micro_batch == 8


@each(
    ("before", "blocks", "following"),
    [
        (("none", None), 28, [("selective", 14), ("full", 28)]),
        (("none", None), None, [("selective", None), ("full", None)]),
        (("selective", 3), 28, [("selective", 14)]),
        (("selective", 13), 28, [("selective", 14)]),
        (("selective", 14), 28, [("full", 28)]),
        (("selective", 20), 28, [("full", 28)]),
        (("none", None), 1, [("full", 1)]),
    ],
)
def test_with_micro_batch_size_one_half_and_then_all_blocks_are_checkpointed(
    usual, before, blocks, following
):
    kernels = dict(zip(("checkpointing", "recomputed_blocks"), before, strict=True))
    here = changed(with_batch(usual, 16, 1), kernels=kernels)
    for expected in following:
        here = after(here, OutOfMemory(where="training", message="no room", blocks=blocks))
        assert (here.kernels.checkpointing, here.kernels.recomputed_blocks) == expected


def everything_given_up(config=None, quantization="auto", card="rtx-4090", **options) -> RunPlan:
    base = {"name": "Qwen3-0.6B", "quantization": quantization}
    made = plan(manifest(config, base_models=[base]), card, **options)
    kernels = {"checkpointing": "full", "recomputed_blocks": 28}
    return changed(with_batch(made, 16, 1), kernels=kernels)


def test_at_last_the_base_is_quantised_where_that_was_left_open():
    before = everything_given_up()
    found = after(before, NO_ROOM)
    assert changed_values(before, found) == {"model.quantization": "int4"}
    assert decision(found, "model.quantization")[2] == "fallback"
    assert plan_after(found, NO_ROOM) is None


@pytest.mark.parametrize(
    "before",
    [
        everything_given_up(quantization="none"),
        everything_given_up({"adapter_type": "full"}),
        everything_given_up(card=None, device="cpu"),
    ],
    ids=["the manifest says none", "every weight learns", "no card"],
)
def test_a_base_that_may_not_be_quantised_is_the_end(before):
    assert plan_after(before, NO_ROOM) is None


@given(
    sequences=st.none() | st.integers(1, 5000),
    micro=st.integers(1, 5000),
    blocks=st.none() | st.integers(1, 200),
    count=st.integers(0, 200),
    wheres=st.lists(st.sampled_from(["training", "evaluation", "probe"]), max_size=8),
    quantization=st.sampled_from(["auto", "none", "int4"]),
)
def test_running_out_of_memory_ends_and_never_changes_a_step(
    sequences, micro, blocks, count, wheres, quantization
):
    made = PLANS[quantization]
    kernels = {"checkpointing": "selective" if count else "none", "recomputed_blocks": count}
    here: RunPlan | None = changed(with_batch(made, sequences, micro), kernels=kernels)
    tried = []
    while here is not None:
        tried.append(here)
        assert len(tried) < 40, "micro_batch 5000 halves 12 times, eval_batch 6, and 3 more steps"
        assert here.batch.examples_per_update == made.batch.examples_per_update
        assert here.batch.sequences_per_update == sequences
        if sequences is not None:
            assert here.batch.accumulation is not None
            assert here.batch.micro_batch * here.batch.accumulation >= sequences
            assert here.batch.micro_batch * (here.batch.accumulation - 1) < sequences
        assert RunPlan.model_validate_json(here.model_dump_json()) == here
        where: Any = wheres[len(tried)] if len(tried) < len(wheres) else "training"
        here = plan_after(here, OutOfMemory(where=where, message="no room", blocks=blocks))
    assert len({made.model_dump_json() for made in tried}) == len(tried)


PLANS = {
    asked: plan(manifest(base_models=[{"name": "Qwen3-0.6B", "quantization": asked}]))
    for asked in ("auto", "none", "int4")
}


# --- kernels, precision --------------------------------------------------------------------------


def test_attention_falls_from_flex_to_flash_to_sdpa_to_eager(usual):
    here = changed(usual, kernels={"attention": "flex"})
    for named, following in [("flex", "flash"), ("attention", "sdpa"), ("sdpa", "eager")]:
        here = after(here, KernelUnavailable(kernel=named, reason="no kernel image"))
        assert here.kernels.attention == following
    assert "sdpa cannot run here: no kernel image" in decision(here, "kernels.attention")
    assert plan_after(here, KernelUnavailable(kernel="attention", reason="?")) is None
    flat = changed(usual, kernels={"attention": "flash4"}, data={"flat": True})
    for following, stays in [("flash", True), ("sdpa", False)]:  # masks are for rows
        flat = plan_after(flat, KernelUnavailable(kernel="attention", reason="?"))
        assert (flat.kernels.attention, flat.data.flat) == (following, stays)


@each("optimizer", ["adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit"])
@each("by_role", [True, False])
def test_an_optimizer_without_its_kernel_becomes_the_plain_one(usual, optimizer, by_role):
    before = changed(usual, optim={"optimizer": optimizer})
    kernel = "fused_optimizer" if by_role else optimizer
    found = after(before, KernelUnavailable(kernel=kernel, reason="missing"))
    assert changed_values(before, found) == {"optim.optimizer": "adamw_torch"}
    assert decision(found, "optim.optimizer")[1] == f"{optimizer} cannot run here: missing"
    assert plan_after(found, KernelUnavailable(kernel="adamw_torch", reason="?")) is None


@each(
    ("device", "refused", "following"),
    [
        ("cuda", "bf16", ("fp16", True)),
        ("cuda", "fp16", ("fp32", False)),
        ("cuda", "fp32", None),
        ("cpu", "bf16", ("fp32", False)),
    ],
)
def test_an_unsupported_precision_falls_back_to_the_next(usual, device, refused, following):
    kernels = {"device": device, "precision": refused, "loss_scaling": refused == "fp16"}
    before = changed(usual, kernels=kernels)
    found = plan_after(before, PrecisionUnsupported(precision=refused, reason="no kernel"))
    assert following == (found and (found.kernels.precision, found.kernels.loss_scaling))
    other = PrecisionUnsupported(precision="fp32" if refused == "fp16" else "fp16", reason="?")
    assert plan_after(before, other) is None  # it is not the plan's


# --- records -------------------------------------------------------------------------------------


def test_a_fallback_replaces_the_decision_where_it_stood(usual):
    found = after(usual, NO_ROOM)
    assert [d.path for d in found.decisions] == [d.path for d in usual.decisions]
    assert changes(usual, usual) == []
    assert {d.source for d in changes(usual, found)} == {"fallback"}
