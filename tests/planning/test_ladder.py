"""Benchmark settings: their keys, when they change a plan, and how far losses may differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expert.manifest.schema.config import TrainingConfig
from expert.planning.benchmark_settings import (
    BASELINE,
    SETTINGS,
    SettingContext,
    as_overrides,
    changes,
    cost_of,
    find_setting,
    tolerance,
    why_unchanged,
)
from expert.planning.run_plan import RunPlan
from tests.each import each
from tests.planning.planning import gpu, machine, manifest, plan

GROUND = SettingContext(
    on_gpu=True,
    characters=False,
    rows_at_once=4,
    rows_per_sequence=8.0,
    sequences_per_update=4,
    packed=True,
)
CPU = replace(GROUND, on_gpu=False)
EXACT = {"bf16": False, "fp16": False, "use_tf32": False}
CARD = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)))


def planned(values: dict[str, Any], *, on_gpu: bool = True) -> RunPlan:
    config = {"batch_size": 32, "epochs": 50, **values}
    here = CARD if on_gpu else machine()
    return plan(manifest(config), None, machine=here)


def climbed(ground: SettingContext) -> list[tuple[str, dict[str, Any], str]]:
    """Every setting with its changes to the plan, or why it has none."""
    values = BASELINE.values(ground)
    below = planned(values, on_gpu=ground.on_gpu)
    found: list[tuple[str, dict[str, Any], str]] = []
    for setting in SETTINGS:
        reason = setting.needs(ground)
        if reason:
            found.append((setting.name, {}, reason))
            continue
        values = {**values, **setting.values(ground)}
        here = planned(values, on_gpu=ground.on_gpu)
        found.append(
            (setting.name, dict(changes(below, here)), why_unchanged(setting, below, here))
        )
        below = here
    return found


def test_the_baseline_that_people_begin_with():
    set_above = {key for setting in SETTINGS for key in setting.settings}
    assert set_above <= BASELINE.settings.keys() <= TrainingConfig.model_fields.keys()
    made = planned(BASELINE.values(GROUND))
    assert (made.data.tokenize, made.data.packing, made.loader.workers) == ("late", "none", 0)
    assert (made.kernels.precision, made.kernels.loss_scaling) == ("fp16", True)
    assert (made.kernels.attention, made.optim.optimizer) == ("eager", "adamw_torch")
    assert (made.kernels.tf32, made.kernels.compile, made.kernels.fused_loss) == (False,) * 3
    assert (made.kernels.checkpointing, made.loader.pin_memory) == ("full", False)
    assert (made.batch.micro_batch, made.batch.examples_per_update) == (4, 32)


def test_every_setting_changes_what_it_is_about_on_a_card():
    for setting, (name, changed, reason) in zip(SETTINGS, climbed(GROUND), strict=True):
        if name == "CUDA graphs":  # these steps are large
            assert reason.startswith("kernels.cuda_graphs is false already: the host keeps up")
            continue
        assert reason == "", name
        assert set(setting.about) & changed.keys(), name


def test_all_settings_together_give_the_default_plan():
    values = BASELINE.values(GROUND)
    for setting in SETTINGS:
        values |= setting.values(GROUND)
        assert planned(values).batch.examples_per_update == 32, setting.name
    assert changes(planned({}), planned(values)) == {}


def test_what_a_cpu_cannot_do_is_passed_over_with_the_plans_own_reason():
    reasons = {name: reason for name, _, reason in climbed(CPU) if reason}
    assert reasons == {
        "bf16 + TF32": 'kernels.precision is "fp32" already: ' + "fastest on most CPUs",
        "fused AdamW": 'optim.optimizer is "adamw_torch" already: no GPU',
        "compile": "compiling is not worth it on a CPU",
        "fused blocks": "kernels.fused_blocks is false already: no GPU",
        "CUDA graphs": "kernels.cuda_graphs is false already: CUDA graphs need a GPU",
    }


@each(
    ("name", "ground", "words"),
    [
        ("pre-tokenised", replace(GROUND, not_late="rows are split"), "rows are split"),
        ("packing", replace(GROUND, characters=True), "a corpus of characters is cut into blocks"),
        ("compile", replace(GROUND, packed=False), "padded rows vary"),
    ],
)
def test_a_setting_that_cannot_be_tried_says_why(name, ground, words):
    setting = find_setting(name)
    assert words in setting.needs(ground)


def test_a_setting_is_found_however_it_is_written():
    assert find_setting("BF16+tf32") is SETTINGS[3]
    assert find_setting("Fused-AdamW") is SETTINGS[5]
    assert find_setting("rocket") is None
    packing = find_setting("packing")  # as many rows per micro-batch as before
    for rows, sequences in ((24, 3), (2, 1), (900, 4)):
        values = packing.values(replace(GROUND, rows_at_once=rows))
        assert values["micro_batch_size"] == sequences
    assert as_overrides({"packing": False, "attention": "auto", "micro_batch_size": 4}) == (
        "training.config.packing=false",
        'training.config.attention="auto"',
        "training.config.micro_batch_size=4",
    )


def test_how_far_losses_may_differ_depends_on_what_differs():
    half = {"bf16": False, "fp16": False}
    for before, after, allowed in (
        ({"fp16": True, "bf16": False}, {"bf16": True}, (0.01, "the same rows in 16 bits")),
        (EXACT | {"attention": "eager"}, EXACT, (0.001, "the same rows in float32")),
        (EXACT, half, (0.01, "the same rows in 16 bits")),
    ):
        assert tolerance(planned(before), planned(after)) == allowed
    for before, after, because in (  # weights trained on other rows are not compared
        ({}, {"packing": False}, "other rows share a step"),
        ({"dropout": 0.1}, {"dropout": 0.1}, "dropout draws other numbers"),
    ):
        assert tolerance(planned(before), planned(after)) == (None, because)


def with_memory(made: RunPlan, peak: int | None, budget: int = 100) -> RunPlan:
    memory = made.memory.model_copy(update={"peak_bytes": peak, "budget_bytes": budget})
    return made.model_copy(update={"memory": memory})


def with_kernels(made: RunPlan, **values: Any) -> RunPlan:
    return made.model_copy(update={"kernels": made.kernels.model_copy(update=values)})


@each(
    ("before", "after", "costs"),
    [
        (40, 60, True),
        (40, 43, False),  # within the error of the estimate
        (10, 45, False),  # half of the budget is still free
        (None, 60, False),
        (60, 40, False),
    ],
)
def test_a_setting_costs_memory_that_is_short_and_precision(before, after, costs):
    made = planned({})
    found = cost_of(with_memory(made, before), with_memory(made, after))
    assert (found != "") == costs
    for less, more, words in (
        ({"precision": "fp32"}, {"precision": "bf16"}, "computes in bf16 instead of fp32"),
        ({"precision": "fp16"}, {"precision": "bf16", "tf32": True}, ""),  # the same number of bits
        (
            {"precision": "fp32", "tf32": False},
            {"precision": "fp32", "tf32": True},
            "computes in TF32 instead of fp32",
        ),
        ({"precision": "bf16"}, {"precision": "fp32"}, ""),
    ):
        assert cost_of(with_kernels(made, **less), with_kernels(made, **more)) == words
