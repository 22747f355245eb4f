"""The plan as a whole: complete, and true to the manifest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.errors import ExpertError, ManifestError
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.expectations import schema
from expert.planning.machine.cards import CARDS
from expert.planning.memory.memory import IMPORTED_BYTES, estimate, with_new_estimate
from expert.planning.memory.workload import workload_of
from expert.planning.run_plan import RunPlan
from expert.planning.survey import Survey
from tests.each import each
from tests.manifest.strategies import any_manifest
from tests.planning.planning import (
    GIB,
    asked,
    decision,
    gpu,
    machine,
    manifest,
    plan,
    read,
    remarks,
)

WILD = Path(__file__).parents[3] / "shared" / "data" / "manifests"
CARDS_OF_THE_GUIDES = ("rtx-4080-super", "rtx-4090", "rtx-5090", "h200")


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, entry in value.items():
            found |= leaves(entry, f"{path}.{key}" if path else key)
        return found
    return {path: value}


@given(any_manifest(), st.sampled_from([*(card.slug for card in CARDS), None]))
def test_any_plan_is_settled_keeps_the_rows_per_step_and_knows_whether_it_fits(data, card):
    made = plan(data, card)
    assert RunPlan.model_validate_json(made.model_dump_json()) == made
    paths = [d.path for d in made.decisions]
    assert len(paths) == len(set(paths))
    assert all(d.because for d in made.decisions)
    settled = made.model_dump(mode="json", exclude={"decisions", "remarks"})
    sections = {
        f"{key}.{leaf}" for key, part in settled.items() if isinstance(part, dict) for leaf in part
    }
    sections = {path for path in sections if not path.startswith("decoding")} | {"decoding"}
    assert sections == set(paths)
    del settled["data"]["dataset"], settled["decoding"]
    del settled["expert"], settled["model"]["name"], settled["model"]["location"]
    del settled["adapter"]["soft_prompts"], settled["model"]["revision"]
    assert "auto" not in leaves(settled).values()
    config = data["training"].get("config", {})
    batch = config.get("batch_size", "auto")
    if batch != "auto":
        rows = batch * config.get("gradient_accumulation_steps", 1)
        assert made.batch.examples_per_update == rows
    if made.batch.accumulation is not None:
        sequences = made.batch.sequences_per_update
        assert made.batch.accumulation * made.batch.micro_batch >= sequences
        assert (made.batch.accumulation - 1) * made.batch.micro_batch < sequences
    peak = made.memory.peak_bytes
    if peak is not None:
        assert made.memory.fits == (peak <= made.memory.budget_bytes)
        assert made.fits or any(text.startswith("memory.fits") for text in remarks(made, "warning"))


@pytest.mark.skipif(not WILD.is_dir(), reason="the real manifests are not beside this checkout")
@pytest.mark.parametrize("card", CARDS_OF_THE_GUIDES)
def test_every_real_manifest_fits_the_cards_of_the_guides_unmodified(card):
    files = sorted(WILD.glob("*.json"))
    assert files
    for file in files:
        made = plan(json.loads(file.read_text(encoding="utf-8")), card)
        assert made.fits, file.name


# Values of keys whose schema does not give one that can be planned.
OWN_VALUES: dict[str, list[Any]] = {
    "betas": [[0.8, 0.9]],
    "feedforward_modules": [["down_proj"]],
    "modules_to_save": [["lm_head"]],
    "lr_scheduler_kwargs": [{"num_cycles": 2}],
    "gradient_checkpointing_kwargs": [{"use_reentrant": True}],
    "save_total_limit": [None],
    "target_modules": [["q_proj"]],
    "trackers": [[]],
    "vram_limit": ["9GB"],
}
# The other keys that some of them need.
COMPANY: dict[str, dict[str, Any]] = {
    "early_stopping_threshold": {"early_stopping_patience": 2},
    "dataloader_persistent_workers": {"dataloader_num_workers": 0},
    "tokenize": {"packing": False},
    **{key: {"method": "dpo"} for key in ("loss_type", "beta", "label_smoothing", "sft_weight")},
    "simpo_gamma": {"method": "simpo"},
    "desirable_weight": {"method": "kto"},
    "undesirable_weight": {"method": "kto"},
}
# Keys with a single allowed value.
ONE_VALUE = {"torch_compile_backend"}


def values_of(key: str) -> list[Any]:
    """Some values of a key: all words, both flags, a number or a text."""
    node = schema()["$defs"]["TrainingConfig"]["properties"][key]
    usual: dict[str, list[Any]] = {"boolean": [True, False], "integer": [7], "number": [0.3]}
    found: list[Any] = []
    for choice in node.get("anyOf", [node]):
        kind = choice.get("type")
        found += choice.get("enum", [])
        found += usual.get(kind, [])
        found += ["some"] if kind == "string" and not {"enum", "const"} & choice.keys() else []
    return OWN_VALUES.get(key) or found


@each("key", TrainingConfig.model_fields.keys() - ONE_VALUE)
def test_no_key_of_the_config_does_nothing(key):
    """A value of each key changes the plan, or the reader or the plan reports what overrules it."""
    company = COMPANY.get(key, {})
    card = None if key == "device" else "rtx-4090"
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9)))
    before = plan(manifest(company), card, machine=here)

    def does_something(value: Any) -> bool:
        data = manifest({**company, key: value})
        try:
            after = plan(data, card, machine=here)
        except ManifestError:  # a word that needs another key
            return False
        told = [text for text in remarks(after, "superseded") if key in text]
        noticed = [n for n in read(data).notices if key in n.path]
        values = {d.path: d.value for d in after.decisions}
        return values != {d.path: d.value for d in before.decisions} or bool(told or noticed)

    assert any(map(does_something, values_of(key)))


def test_another_base_model_of_the_manifest_is_planned_and_one_it_lacks_is_refused():
    data = manifest(base_models=[{"name": "Qwen3-0.6B"}, {"name": "HuggingFaceTB/SmolLM2-135M"}])
    assert plan(data).model.parameters == 596_049_920
    assert plan(data, model="smollm2-135m").model.parameters == 134_515_008
    with pytest.raises(ExpertError, match=r"--model llama: the manifest has Qwen3-0\.6B"):
        plan(manifest(), model="llama")


def test_an_unknown_model_leaves_memory_unknown_and_takes_what_was_written():
    made = plan(manifest({"batch_size": 8}, base_models=[{"name": "Qwen3-1.5B"}]))
    value, because, _ = decision(made, "memory.peak_bytes")
    assert value is None
    assert because.startswith("unknown: Qwen3-1.5B is not on this machine and not among the models")
    assert made.batch.micro_batch == 8
    assert made.memory.fits is None
    assert made.fits


def test_what_does_not_fit_says_by_how_much_and_what_would():
    made = plan(
        manifest(base_models=[{"name": "Llama-3.1-8B", "quantization": "none"}]), "rtx-3060"
    )
    assert not made.fits
    [text] = [text for text in remarks(made, "warning") if text.startswith("memory.fits")]
    assert text.startswith("memory.fits: needs 18.")
    assert text.endswith("and has 11.6 GiB: --set quantization=int4 fits")
    never = plan(manifest(base_models=[{"name": "microsoft/phi-4"}]), "gtx-1650")
    [text] = [text for text in remarks(never, "warning") if text.startswith("memory.fits")]
    assert text.endswith(
        "no setting makes this model fit here: take a smaller model or a larger card"
    )
    rows = plan(manifest({"micro_batch_size": 64, "packing": False, "batch_size": 64}), "rtx-3060")
    assert (rows.batch.micro_batch, rows.fits) == (64, False)


def test_a_memory_limit_is_kept_and_what_others_hold_is_left_alone():
    made = plan(manifest({"vram_limit": "8GB"}), "h200")
    assert made.memory.peak_bytes <= made.memory.budget_bytes == 8 * GIB
    here = machine(gpu("NVIDIA GeForce RTX 4090", 24, (8, 9), held_gib=10))
    made = plan(manifest(), None, machine=here)
    assert made.memory.budget_bytes == 14 * GIB
    assert "memory.budget_bytes: other processes hold 10.0 GiB of GPU memory" in remarks(
        made, "warning"
    )


def test_a_machine_without_a_gpu_gets_a_plan_for_its_cpu():
    made = plan(manifest({"bf16": True, "optim": "adamw_bnb_8bit"}), None)
    assert (made.kernels.device, made.kernels.precision) == ("cpu", "bf16")
    assert decision(made, "optim.optimizer") == asked("adamw_bnb_8bit")
    assert not made.kernels.compile
    assert made.memory.parts["cuda_context"] == 0
    assert made.memory.parts["libraries"] == IMPORTED_BYTES
    assert made.memory.peak_bytes == sum(made.memory.parts.values())


def test_data_that_is_there_gives_steps_and_sequences(tmp_path):
    rows = [json.dumps({"instruction": "x" * 700, "response": "y" * 50})] * 1000
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    made = plan(manifest({"batch_size": 32, "epochs": 2}), folder=tmp_path)
    assert made.length.rows == 900  # a tenth is split off for validation
    assert made.length.steps_per_epoch == 29  # 900 / 32
    assert made.length.total_steps == 58
    assert made.batch.examples_per_update == 32
    # Rows of about 205 tokens, ten to a sequence of 2048: three hold 30, four would hold 40.
    assert (made.batch.sequences_per_update, made.data.sequence_length) == (4, 1672)
    assert (made.batch.micro_batch, made.batch.accumulation) == (4, 1)
    # Rows that were not counted may need the full length, so memory is planned for that.
    assert made.memory.workload["row_tokens"] == 2048


def test_a_value_is_changed_by_a_path_that_the_plan_has():
    made = plan(manifest())
    changed = made.with_values({"batch.micro_batch": 3}, "why", "fallback")
    assert changed.batch.micro_batch == 3
    assert decision(changed, "batch.micro_batch") == (3, "why", "fallback")
    for path in ("batch.rows_at_once", "batches.micro_batch", "expert", "decoding.temperature"):
        with pytest.raises(ValueError, match=path):
            made.with_values({path: 3}, "why", "fallback")


def test_a_plan_knows_its_workload_and_is_estimated_again_after_a_fallback():
    made = plan(manifest())
    work = workload_of(made)
    assert estimate(work).total == made.memory.peak_bytes
    less = made.with_values({"batch.micro_batch": 1}, "a test", "fallback")
    expected = estimate(replace(work, rows=1, accumulates=made.batch.accumulation != 1))
    assert with_new_estimate(less).memory.peak_bytes == expected.total < estimate(work).total


@each(
    ("config", "rows"),
    [
        ({"max_steps": 10}, 48),  # a tenth of the time of 160 rows, at a third of the cost
        ({"max_steps": 1}, 32),
        ({"eval_steps": 50}, 240),
        ({"eval_steps": 50, "eval_max_rows": 5}, 5),
        ({"eval_steps": 50, "eval_max_rows": None}, None),
    ],
)
def test_an_evaluation_takes_a_small_share_of_the_time(config, rows):
    made = plan(manifest(config), survey=Survey(7480, 7480 * 100, "counted"))
    assert made.watch.eval_rows == rows
