"""Passes are captured as CUDA graphs where the GPU would wait for its host."""

from __future__ import annotations

import json

import pytest

from tests.each import each
from tests.planning.planning import manifest, plan
from tests.wording import wording


def rows(folder, count=400):
    made = [json.dumps({"instruction": "x" * 300, "response": "y" * 40})] * count
    (folder / "train.jsonl").write_text("\n".join(made) + "\n", encoding="utf-8")
    return folder


def decided(folder, gpu="h200", **config):
    made = plan(manifest({"batch_size": 16, **config}), gpu, folder=rows(folder))
    found = next(d for d in made.decisions if d.path == "kernels.cuda_graphs")
    assert found.value is made.kernels.cuda_graphs
    return found, made


def test_small_steps_on_a_large_card_are_captured(tmp_path):
    found, _ = decided(tmp_path)
    assert (found.value, found.source) == (True, "machine")
    assert wording("card-would-wait-for") in found.because


def test_large_updates_are_not(tmp_path):
    found, _ = decided(tmp_path, batch_size=2048)
    assert found.value is False
    assert wording("the-host-keeps-up") in found.because


def test_recomputed_blocks_that_draw_nothing_are_captured(tmp_path):
    found, made = decided(tmp_path, gradient_checkpointing=True, dropout=0.0)
    assert made.kernels.checkpointing == "full"
    assert found.value is True


def test_where_memory_is_short_nothing_is_captured(tmp_path):
    _, roomy = decided(tmp_path)
    needed = roomy.memory.peak_bytes / 2**30
    found, made = decided(tmp_path, vram_limit=f"{1.1 * needed:.2f}GB")
    assert made.fits
    assert (found.value, found.because[:17]) == (False, wording("memory-short-for-i"))


@pytest.mark.parametrize("asked", [True, False])
def test_the_manifest_decides_where_it_says_something(tmp_path, asked):
    found, _ = decided(tmp_path, use_cuda_graphs=asked, batch_size=2048 if asked else 16)
    assert (found.value, found.source) == (asked, "manifest")


@each(
    ("config", "because"),
    [
        ({"packing": False}, wording("widths-of-padded-rows")),
        ({"adapter_type": "adalora"}, "AdaLoRA's penalty"),
        (
            {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
            wording("graphs-of-its-own"),
        ),
        ({"gpu": None}, wording("only-cuda-has-graphs")),
        ({"gradient_checkpointing": True, "dropout": 0.1}, wording("which-no-graph-can")),
    ],
)
def test_what_cannot_be_captured_is_not_and_says_why(tmp_path, config, because):
    found, _ = decided(tmp_path, **config)
    assert found.value is False
    assert because in found.because
    found, made = decided(tmp_path, use_cuda_graphs=True, **config)
    assert (found.value, found.source) == (False, "fallback")
    assert any(because in remark.text for remark in made.remarks if remark.kind == "warning")
