"""Benchmark settings: their keys, when they change a plan, and how far losses may differ."""

from __future__ import annotations

from typing import Any

from expert.manifest.schema.config import TrainingConfig
from expert.planning.benchmark_settings import (
    SETTINGS,
    Setting,
    baseline,
    changes,
    tolerance,
    why_unchanged,
)
from expert.planning.run_plan import RunPlan
from tests.planning.planning import gpu, machine, manifest, plan

EXACT = {"bf16": False, "fp16": False, "use_tf32": False}
CARD = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)))


def planned(values: dict[str, Any], *, on_gpu: bool = True) -> RunPlan:
    config = {"batch_size": 32, "epochs": 50, **values}
    here = CARD if on_gpu else machine()
    return plan(manifest(config), None, machine=here)


def climbed(*, on_gpu: bool) -> list[tuple[Setting, RunPlan, RunPlan]]:
    """Every setting with the plan before and after it."""
    values = dict(baseline(on_gpu=on_gpu, micro_batch=4).values)
    below, found = planned(values, on_gpu=on_gpu), []
    for setting in SETTINGS:
        values |= setting.values
        if setting.name == "packing":
            values["micro_batch_size"] = 1
        here = planned(values, on_gpu=on_gpu)
        found.append((setting, below, here))
        below = here
    return found


def test_the_baseline_that_people_begin_with():
    first = baseline(on_gpu=True, micro_batch=4).values
    set_above = {key for setting in SETTINGS for key in setting.values}
    assert set_above <= first.keys() <= TrainingConfig.model_fields.keys()
    made = planned(dict(first))
    assert (made.data.tokenize, made.data.packing, made.loader.workers) == ("late", "none", 0)
    assert (made.kernels.precision, made.kernels.loss_scaling) == ("fp16", True)
    assert (made.kernels.attention, made.optim.optimizer) == ("eager", "adamw_torch")
    assert (made.kernels.tf32, made.kernels.compile, made.kernels.fused_loss) == (False,) * 3
    assert (made.kernels.checkpointing, made.loader.pin_memory) == ("full", False)
    assert (made.batch.micro_batch, made.batch.examples_per_update) == (4, 32)


def test_every_setting_changes_what_it_is_about_and_all_together_give_the_default_plan():
    for setting, below, here in climbed(on_gpu=True):
        assert here.batch.examples_per_update == 32
        reason = why_unchanged(setting, below, here)
        if setting.name == "CUDA graphs":  # these steps are large
            assert reason.startswith("kernels.cuda_graphs is false already: the host keeps up")
            continue
        assert reason == "", setting.name
        assert set(setting.about) & changes(below, here).keys(), setting.name
    assert changes(planned({}), here) == {}


def test_what_a_cpu_cannot_do_is_passed_over_with_the_plans_own_reason():
    reasons = {one.name: why_unchanged(one, *plans) for one, *plans in climbed(on_gpu=False)}
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "bf16 + TF32": 'kernels.precision is "fp32" already: fastest on most CPUs',
        "fused AdamW": 'optim.optimizer is "adamw_torch" already: no GPU',
        "CUDA graphs": "kernels.cuda_graphs is false already: CUDA graphs need a GPU",
    }


def test_how_far_losses_may_differ_depends_on_what_differs():
    half = {"bf16": False, "fp16": False}
    for before, after, allowed in (
        ({"fp16": True, "bf16": False}, {"bf16": True}, 0.01),
        (EXACT | {"attention": "eager"}, EXACT, 0.001),
        (EXACT, half, 0.01),
    ):
        assert tolerance(planned(before), planned(after)) == allowed
    for before, after in (  # other rows share a step; dropout draws other numbers
        ({}, {"packing": False}),
        ({"dropout": 0.1}, {"dropout": 0.1}),
    ):
        assert tolerance(planned(before), planned(after)) is None
