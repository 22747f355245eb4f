"""Blocks use fused kernels wherever possible; others are compiled if the run ends sooner."""

from __future__ import annotations

from expert.planning.draft import ResumedChoices
from tests.each import each
from tests.planning.planning import decision, long_run, manifest, plan

PATH = "kernels.fused_blocks"


@each("model", ["Qwen3-0.6B", "Llama-3.2-1B", "Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M"])
def test_blocks_of_known_families_are_fused_and_not_compiled(model):
    made = plan(manifest(base_models=[{"name": model}]))
    assert (made.kernels.fused_blocks, made.kernels.compile) == (True, False)
    config = {"batch_size": 64, "micro_batch_size": 8}
    compiled = {**config, "torch_compile": True}
    peaks = [plan(manifest(c), "h200").memory.peak_bytes for c in (config, compiled)]
    assert peaks[0] < 0.9 * peaks[1]


@each(
    ("config", "model", "card", "words"),
    [
        ({"adapter_type": "ia3"}, "Qwen3-0.6B", "rtx-4090", "made for lora"),
        ({"bf16": False, "fp16": True}, "Qwen3-0.6B", "rtx-4090", "bf16"),
        ({}, "microsoft/phi-2", "rtx-4090", "llama, mistral"),
        ({}, "Qwen3-0.6B", "rtx-2080-ti", "bf16"),
        ({"torch_compile": True}, "Qwen3-0.6B", "rtx-4090", "torch_compile"),
    ],
    ids=str,
)
def test_the_reason_for_not_fusing_is_given(config, model, card, words):
    value, because, _ = decision(plan(manifest(config, base_models=[{"name": model}]), card), PATH)
    assert value is False
    assert words in because
    made = plan(manifest({**config, "fused_blocks": True}, base_models=[{"name": model}]), card)
    assert decision(made, PATH)[2] == "fallback"
    assert any(remark.path == PATH for remark in made.remarks)


@each(("card", "attention"), [("rtx-4090", "flex"), (None, "eager")])
def test_a_model_that_caps_its_scores_gets_attention_that_does(card, attention):
    made = plan(manifest(base_models=[{"name": "google/gemma-2-2b"}]), card)
    assert made.kernels.attention == attention
    assert made.kernels.fused_blocks is (card is not None)


@each(("kept", "fused"), [(None, True), (True, True), (False, False)])
def test_a_run_that_is_resumed_keeps_the_blocks_it_began_with(kept, fused):
    choices = ResumedChoices(fused_blocks=kept)
    assert plan(manifest(), kept=choices).kernels.fused_blocks is fused
    assert plan(manifest({"fused_blocks": True}), kept=choices).kernels.fused_blocks


def test_runs_are_compiled_from_where_it_saves_more_than_it_takes():
    """Each step saves 0.3 s: 30 s of compiling are recovered after about a hundred."""
    assert "30 s of it compiling" in decision(long_run(), "kernels.compile")[1]
    turns = [steps for steps in range(60, 200, 10) if long_run(max_steps=steps).kernels.compile]
    assert 90 <= turns[0] <= 130
    large = [long_run(model="Llama-3.1-8B", max_steps=n).kernels.compile for n in (60, 400)]
    assert large == [False, True]
