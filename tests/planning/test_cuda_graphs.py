"""Passes are captured as CUDA graphs if the GPU would wait for its host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from expert.planning.memory.memory import estimate
from expert.planning.memory.workload import workload_of
from expert.planning.survey import PackedRows, Survey
from tests.each import each
from tests.planning.planning import GIB, long_run, plan
from tests.planning.planning import own_blocks as manifest


def rows(folder, count=400):
    made = [json.dumps({"instruction": "x" * 300, "response": "y" * 40})] * count
    (folder / "train.jsonl").write_text("\n".join(made) + "\n", encoding="utf-8")
    return folder


def decided(folder, gpu="h200", count=400, **config):
    made = plan(manifest({"batch_size": 16, **config}), gpu, folder=rows(folder, count))
    found = next(d for d in made.decisions if d.path == "kernels.cuda_graphs")
    assert found.value is made.kernels.cuda_graphs
    return found, made


def test_small_steps_on_a_large_card_are_captured_unless_the_manifest_says_no(tmp_path):
    found, _ = decided(tmp_path)
    assert (found.value, found.source) == (True, "machine")
    assert "of the time: about" in found.because
    large = {"batch_size": 2048, "count": 8000}
    found, _ = decided(tmp_path, **large)
    assert found.value is False
    assert "the host keeps up" in found.because
    found, made = decided(tmp_path, gradient_checkpointing=True, dropout=0.0)
    assert (made.kernels.checkpointing, found.value) == ("full", True)
    for asked, config in ((True, large), (False, {})):
        found, _ = decided(tmp_path, use_cuda_graphs=asked, **config)
        assert (found.value, found.source) == (asked, "manifest")


def test_where_memory_is_short_nothing_is_captured_and_that_is_said(tmp_path):
    config = {"gradient_checkpointing": False}
    _, plain = decided(tmp_path, use_cuda_graphs=False, **config)
    config["vram_limit"] = f"{1.01 * plain.memory.peak_bytes / GIB / 0.95:.2f}GB"
    found, made = decided(tmp_path, **config)
    assert made.fits
    assert (found.value, found.because[:17]) == (False, "too little memory")
    found, made = decided(tmp_path, use_cuda_graphs=True, **config)
    assert (found.value, found.source) == (False, "fallback")
    told = [remark.text for remark in made.remarks if remark.kind == "warning"]
    assert any("too little memory" in text for text in told)


@each(
    ("config", "because"),
    [
        ({"packing": False}, "padded rows vary"),
        ({"adapter_type": "adalora"}, "AdaLoRA's penalty"),
        (
            {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
            "graphs of its own",
        ),
        ({"gpu": None}, "CUDA graphs need a GPU"),
        ({"gradient_checkpointing": True, "dropout": 0.1}, "which a graph cannot"),
    ],
)
def test_what_cannot_be_captured_is_not_and_says_why(tmp_path, config, because):
    found, _ = decided(tmp_path, **config)
    assert found.value is False
    assert because in found.because
    found, made = decided(tmp_path, use_cuda_graphs=True, **config)
    assert (found.value, found.source) == (False, "fallback")
    assert any(because in remark.text for remark in made.remarks if remark.kind == "warning")
    unknown = manifest(
        {"use_cuda_graphs": True, "packing": False}, base_models=[{"name": "who/knows"}]
    )
    assert not plan(unknown).kernels.cuda_graphs


@each(
    ("config", "captured"),
    [
        # 32k tokens per pass: 57,576 tokens/s with graphs and 58,289 without, on an H200.
        ({"torch_compile": False}, False),
        ({"torch_compile": True}, False),
        # One sequence per pass, all that fits 8 GB: the GPU was 45 % busy.
        ({"torch_compile": False, "micro_batch_size": 1}, True),
        ({"torch_compile": True, "micro_batch_size": 1}, True),
        ({"torch_compile": False, "batch_size": 2}, True),
    ],
)
def test_passes_are_captured_where_the_time_of_computing_them_is_shorter(config, captured):
    assert long_run(**config).kernels.cuda_graphs is captured


def test_the_character_model_is_captured_in_small_batches_only():
    """At 64 blocks 1.8 times as fast as compiled alone (ladder-char-gpt-h200.json)."""
    data = manifest({"adapter_type": "full"}, base_models=[{"name": "char-gpt"}])
    corpus = Survey(None, 1_100_000, "counted")

    def captured(batch):
        data["training"]["config"] |= {"batch_size": batch, "epochs": 100, "torch_compile": True}
        return plan(data, "h200", survey=corpus).kernels.cuda_graphs

    assert [captured(batch) for batch in (64, 128, 192, 512)] == [True, True, True, False]


def test_what_captured_passes_keep_and_what_runs_beside_them_is_in_the_peak():
    """0.6B with 32k tokens per pass reserved 55.2 GiB and its context 0.8: the plan without graphs
    is 4 % above. Beside it an evaluation has room; the last batch of an epoch is captured too, and
    takes nothing more (it once took all of it again, 108.9 GiB)."""
    config = {"torch_compile": False, "eval_batch_size": 68}  # 16 sequences
    plain, captured = (long_run(use_cuda_graphs=on, **config) for on in (False, True))
    assert plain.memory.peak_bytes == pytest.approx(1.04 * (55.2 + 0.82) * GIB, rel=0.02)
    parts = captured.memory.parts
    assert {"evaluation", "captured_gradients"} == parts.keys() - plain.memory.parts.keys()
    more = captured.memory.peak_bytes - plain.memory.peak_bytes
    beside = parts["evaluation"] + parts["captured_gradients"]
    assert more == pytest.approx(1.05 * beside, rel=0.01)  # with the allocator's overhead
    assert 2 * GIB < more < 8 * GIB
    work = workload_of(captured)  # as a run estimates again after a fallback
    assert estimate(work).total == pytest.approx(captured.memory.peak_bytes, rel=1e-6)


def test_a_run_without_rows_to_evaluate_needs_no_memory_for_it():
    """DPO of 0.6B without validation rows reserved 10.0 GiB where 19.9 were planned, 8.7 of it for
    an evaluation (preference-h200.json)."""
    data = manifest({"use_cuda_graphs": True, "batch_size": 16})
    survey = Survey(4000, 400_000, "counted")
    evaluated = plan(data, "h200", survey=survey)
    data["training"]["dataset"]["validation_split"] = 0
    alone = plan(data, "h200", survey=survey)
    saved = evaluated.memory.peak_bytes - alone.memory.peak_bytes
    assert saved == pytest.approx(1.05 * evaluated.memory.parts["evaluation"], rel=0.01)
    assert "evaluation" not in alone.memory.parts
    assert workload_of(alone).evaluated_tokens == 0  # as a run estimates again after a fallback
    # As many sequences as the held-out rows fill; of a file, whose rows are not counted, a batch.
    work = workload_of(evaluated)
    assert 0 <= work.evaluated_tokens - 0.1 * 400_000 / 0.99 < 2 * work.evaluated_row_tokens
    packed = PackedRows(3600, 176, 2048, 0.99, tokens=360_000, held_out=7)
    counted = replace(survey, packed=packed)
    del data["training"]["dataset"]["validation_split"]
    assert workload_of(plan(data, "h200", survey=counted)).evaluated_rows == 7
    data["training"]["config"] |= {"evaluation_strategy": "steps", "eval_steps": 2}
    few = workload_of(plan(data, "h200", survey=counted))  # 32 rows of 100 tokens
    assert few.evaluated_rows == 3
    data["training"]["config"]["eval_max_rows"] = None  # all
    data["training"]["dataset"]["test_path"] = "test.jsonl"
    work = workload_of(plan(data, "h200", survey=survey))
    assert work.evaluated_tokens == 64 * work.evaluated_row_tokens
