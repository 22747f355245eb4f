"""What a plan says about itself: advice, warnings, ways out, and the reason of every branch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.planning.machine.machine import Fact
from tests.each import each
from tests.planning.planning import asked, decision, machine, manifest, plan, remarks
from tests.wording import wording


def test_advice_fits_together():
    """Taking everything that is advised at once must still fit."""
    base = {"name": "Llama-3.1-8B", "quantization": "int4"}
    config = {"gradient_checkpointing": True, "batch_size": 32, "packing": False}
    made = plan(manifest(config, base_models=[base]))
    advised = " ".join(remarks(made, "advice"))
    assert advised
    if "quantization: none" in advised:
        base = {**base, "quantization": "none"}
    if "gradient_checkpointing: false" in advised:
        config = {**config, "gradient_checkpointing": False}
    assert plan(manifest(config, base_models=[base])).fits


WAYS_OUT = [
    ({"fused_loss": False, "packing": False, "micro_batch_size": 16}, {}, "rtx-3060"),
    ({"gradient_checkpointing": False, "micro_batch_size": 9}, {"name": "Llama-3.1-8B"}, "a100"),
    ({"micro_batch_size": 8, "gradient_checkpointing": False}, {"name": "Llama-3.1-8B"}, "l40s"),
    ({"adapter_type": "full", "distributed": "replicated"}, {"name": "Qwen3-8B"}, "rtx-4090"),
    ({"attention": "eager", "max_seq_length": 8192}, {"name": "Llama-3.2-1B"}, "rtx-3060"),
]


@each(("config", "base", "card"), WAYS_OUT)
def test_what_is_said_to_fit_does_fit(config, base, card):
    """The way out names every change it makes: making them gives a plan that fits."""
    model = {"name": "Qwen3-0.6B", "quantization": "none", **base}
    made = plan(manifest(config, base_models=[model]), card)
    assert not made.fits
    [text] = [text for text in remarks(made, "warning") if text.startswith("memory.fits")]
    assert text.endswith(" would fit"), text
    words = text.removesuffix(" would fit").partition(": ")[2].partition(": ")[2]
    for change in words.split(" with "):
        key, _, value = change.partition(": ")
        if key == "quantization":
            model = {**model, "quantization": value}
        else:
            config = {**config, key: json.loads(value) if value[0] in "0123456789tf" else value}
    assert plan(manifest(config, base_models=[model]), card).fits


def test_a_character_model_is_never_advised_to_take_an_adapter():
    data = {
        "name": "bard",
        "base_models": [{"name": "char-gpt"}],
        "training": {"dataset": {"path": "shakespeare"}, "config": {"micro_batch_size": 192}},
    }
    [text] = [t for t in remarks(plan(data, None, vram="1GB"), "warning") if "memory.fits" in t]
    assert "lora" not in text
    assert "int4" not in text


def test_choices_leave_a_margin_where_they_can():
    made = plan(manifest(base_models=[{"name": "Qwen3-8B"}]), "rtx-3060")
    assert made.memory.peak_bytes <= 0.95 * made.memory.budget_bytes


MISSPELT = {"target_modules": ["q_porj", "v_proj"]}
LATE = {"max_steps": 5, "warmup_steps": 100}
MORE_THAN_A_STEP = {"batch_size": 3, "packing": False, "micro_batch_size": 5}


@each(
    ("config", "card", "text"),
    [
        ({"use_tf32": True}, "t4", wording("asked-for-but")),
        ({"torch_compile": True}, None, wording("compiling-not-worth")),
        ({"device": "cpu"}, "h200", wording("device-cpu-plan-asked")),
        (MISSPELT, "rtx-4090", wording("no-layer-such-name")),
        (LATE, "rtx-4090", wording("updates-more-whole-run")),
        ({"dataloader_num_workers": 8}, "h200", wording("prepared-tokens-memory-mapped-fed")),
        (MORE_THAN_A_STEP, "rtx-4090", wording("step-has-only-sequences")),
        ({"eval_batch_size": 4096}, "rtx-3060", wording("at-once-will-not")),
    ],
)
def test_what_is_not_done_as_written_is_reported(config, card, text):
    kind = "superseded" if {"device", "dataloader_num_workers"} & config.keys() else "warning"
    told = [line.partition(": ")[2] for line in remarks(plan(manifest(config), card), kind)]
    assert text in told


def with_data(**dataset: Any) -> dict[str, Any]:
    data = manifest({"max_steps": 5})
    data["training"]["dataset"] |= dataset
    return data


def test_an_evaluation_without_rows_is_reported():
    data = with_data(validation_split=0)
    data["training"]["config"] |= {"evaluation_strategy": "epoch", "load_best_model_at_end": True}
    told = remarks(plan(data), "warning")
    assert wording("no-validation-rows-to") in told
    assert wording("no-evaluation-to-choose") in told


def test_too_many_workers_for_the_cores_are_reported():
    data = with_data(streaming=True)
    data["training"]["config"] |= {"dataloader_num_workers": 64}
    told = remarks(plan(data, None, machine=machine(cores=2)), "warning")
    assert wording("workers-on-cores-get") in told


def test_no_rows_at_all_are_reported(tmp_path):
    (tmp_path / "train.jsonl").write_text("", encoding="utf-8")
    made = plan(manifest(), folder=tmp_path)
    told = wording("no-rows-to-train")
    assert told in remarks(made, "warning")
    assert decision(made, "length.seconds")[1] == wording("unknown-because-no-rows")


def test_the_character_model_s_own_sizes_win_over_lengths_and_packing():
    data = {
        "name": "bard",
        "base_models": [{"name": "char-gpt"}],
        "training": {
            "dataset": {"path": "shakespeare"},
            "config": {"max_seq_length": 99, "packing": True},
        },
    }
    told = remarks(plan(data), "superseded")
    assert "data.max_seq_length: max_seq_length: block_size 256 decides" in told
    assert wording("packing-corpus-cut-into") in told


def test_a_disk_that_is_too_small_is_reported(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 1000, encoding="utf-8")
    here = replace(machine(), disk_free_bytes=Fact(1000, "test"))
    made = plan(manifest(), None, machine=here, folder=tmp_path)
    assert any(line.startswith("disk.total_bytes: needs ") for line in remarks(made, "warning"))


def test_tasks_without_validation_files_are_split_too(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 100, encoding="utf-8")
    data = manifest()
    data["training"]["dataset"] = {"tasks": {"a": {"train": "a.jsonl"}}}
    assert plan(data, folder=tmp_path).length.rows == 90


@pytest.mark.parametrize(
    ("overlong", "tokens", "sequences"), [("cut", 92_160, 16), ("split", 1_894_736, 16)]
)
def test_long_rows_count_by_what_becomes_of_them(tmp_path, overlong, tokens, sequences):
    (tmp_path / "train.jsonl").write_text(("x" * 39_999 + "\n") * 200, encoding="utf-8")
    made = plan(manifest({"overlong": overlong, "max_seq_length": 512}), folder=tmp_path)
    assert made.length.tokens_per_epoch == tokens
    assert made.batch.sequences_per_update == sequences
    # Parts of 512 tokens are rows of their own, as they are when they have been packed.
    parts = 21 if overlong == "split" else 1
    assert made.length.rows == 180 * parts


@each("name", ["../../etc", "a/b", "..", "", "a b"])
def test_the_cache_folder_is_one_plain_folder_whatever_the_name(name):
    cache = Path(plan(manifest(name=name or "x")).data.cache or "")
    assert cache.parent == Path("nowhere/datasets_optimized")
    assert ".." not in cache.parts


def test_absurd_sizes_are_planned_at_once():
    """Each of these took a minute when counts were searched one by one."""
    tiny = {"layers": 1, "heads": 1, "width": 8, "block_size": 1}
    data = {
        "name": "bard",
        "base_models": [{"name": "char-gpt", "architecture": tiny}],
        "training": {"dataset": {"path": "shakespeare"}, "config": {"batch_size": 999_999_999_989}},
    }
    assert plan(data, "h200").batch.examples_per_update == 999_999_999_989


PHI4, PLAIN_8B = {"name": "microsoft/phi-4"}, {"name": "Llama-3.1-8B", "quantization": "none"}
BASE, CHECKPOINTING = "model.quantization", "kernels.checkpointing"
HALF, FULL = {"gradient_checkpointing": "selective"}, {"adapter_type": "full"}
FOUR = {"batch_size": 4, "packing": False}
THIRTEEN = {"batch_size": 13, "packing": False, "micro_batch_size": 5}


@each(
    ("config", "base", "card", "path", "because"),
    [
        ({}, PHI4, "gtx-1650", CHECKPOINTING, wording("even-recomputing-everything-does")),
        ({}, PHI4, "gtx-1650", BASE, wording("smallest-may-chosen-still")),
        ({}, PHI4, "gtx-1650", "batch.micro_batch", wording("not-even-fits-gib")),
        (HALF, {}, "rtx-4090", CHECKPOINTING, wording("selective-half-blocks-more")),
        ({}, PLAIN_8B, "rtx-4090", CHECKPOINTING, wording("few-blocks-let-at")),
        (FULL, {}, "h200", BASE, wording("every-weight-trained-needs")),
        (THIRTEEN, {}, "h200", "batch.accumulation", wording("at-most-make-up")),
        (FOUR, {}, "h200", "batch.micro_batch", wording("whole-update-fits-gib")),
    ],
)
def test_reasons_are_those_of_the_branch_that_was_taken(config, base, card, path, because):
    made = plan(manifest(config, base_models=[{"name": "Qwen3-0.6B", **base}]), card)
    assert decision(made, path)[1] == because


def test_a_base_can_be_quantised_on_a_cpu_too():
    for name in ("Qwen3-0.6B", "Qwen3-1.5B"):
        made = plan(manifest(base_models=[{"name": name, "quantization": "int4"}]), None)
        assert decision(made, "model.quantization") == asked("int4")


def test_padded_rows_are_made_by_the_workers_that_were_asked_for():
    made = plan(manifest({"packing": False, "dataloader_num_workers": 3}))
    assert decision(made, "loader.workers") == asked(3)
    assert remarks(made, "superseded") == []


def test_padded_rows_get_workers_where_cores_are_free():
    assert plan(manifest({"packing": False})).loader.workers == 2


def test_fractional_epochs_are_counted_exactly(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 50, encoding="utf-8")
    data = manifest({"batch_size": 1, "epochs": 1.1})
    data["training"]["dataset"]["validation_split"] = 0
    assert plan(data, folder=tmp_path).length.total_steps == 55


@each("kind", ["lora", "dora", "ia3", "lokr", "adalora"])
def test_targets_that_no_layer_has_are_planned_with_nothing_to_train(kind):
    made = plan(manifest({"adapter_type": kind, "target_modules": ["nonsense"]}))
    assert made.adapter.trainable_parameters == 0


def test_a_batch_size_that_memory_splits_is_honoured_and_calls_for_no_remark():
    made = plan(manifest({"batch_size": 64, "packing": False}), "rtx-3060")
    assert made.batch.micro_batch < made.batch.examples_per_update == 64
    assert not remarks(made, "superseded")


def test_a_share_for_validation_that_nobody_wrote_is_a_preset():
    def source(**dataset):
        made = plan(with_data(**dataset), "rtx-4090")
        return next(d.source for d in made.decisions if d.path == "data.validation")

    assert source() == "preset"
    assert source(validation_split=0.2) == "manifest"
    assert source(validation_path="held.jsonl") == "manifest"
