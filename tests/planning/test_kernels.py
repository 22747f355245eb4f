"""Precision, TF32, attention, compilation and optimizer, by card."""

from __future__ import annotations

from expert.planning.machine.host import Fact
from expert.planning.memory.workload import workload_of
from expert.planning.survey import Survey
from tests.each import each
from tests.planning.planning import (
    decision,
    manifest,
    own_blocks,
    plan,
    read,
    remarks,
)


def test_blocks_are_not_compiled_where_it_cannot_pay_and_as_asked_with_a_warning():
    padded, p100 = plan(own_blocks({"packing": False})), plan(manifest(), "p100")
    for made, because in (
        (padded, "padded rows vary in width: each width would be compiled again"),
        (p100, "P100 PCIe (6.0) is older than Triton supports (7.0)"),
        (plan(manifest(), None), "compiling is not worth it on a CPU"),
    ):
        assert decision(made, "kernels.compile") == (False, because, "machine")
    assert plan(own_blocks()).kernels.compile
    characters = manifest({"adapter_type": "full"}, base_models=[{"name": "char-gpt"}])
    characters["training"]["dataset"] = {"path": "corpus.txt"}
    assert plan(characters).kernels.compile  # blocks are equally long
    asked = plan(manifest({"packing": False, "torch_compile": True}))
    old = plan(manifest({"torch_compile": True}), "p100")
    assert asked.kernels.compile is old.kernels.compile is True
    told = (
        "kernels.compile: padded rows vary in width, and each width is compiled again: use packing"
    )
    assert told in remarks(asked, "warning")
    assert told not in remarks(plan(manifest({"torch_compile": True})), "warning")
    assert any("compilation may fall back" in text for text in remarks(old, "warning"))


PRECISION, TF32 = "kernels.precision", "kernels.tf32"
ATTENTION, OPTIMIZER = "kernels.attention", "optim.optimizer"
FP32 = {"bf16": False, "fp16": False}


@each(
    ("path", "config", "card", "value", "source"),
    [
        (PRECISION, {}, "rtx-3090", "bf16", "machine"),
        (PRECISION, {}, "t4", "fp16", "machine"),
        (PRECISION, {}, "gtx-1660", "fp16", "machine"),
        (PRECISION, {"bf16": True}, "rtx-3090", "bf16", "manifest"),
        (PRECISION, {"bf16": True}, "t4", "fp16", "fallback"),
        (PRECISION, {"fp16": True}, "rtx-3090", "fp16", "manifest"),
        (PRECISION, FP32, "rtx-3090", "fp32", "manifest"),
        (PRECISION, {"bf16": False}, "rtx-3090", "fp16", "machine"),
        (PRECISION, {"fp16": False}, "rtx-3090", "bf16", "machine"),
        (PRECISION, {"fp16": False}, "t4", "fp32", "machine"),
        (PRECISION, {}, None, "fp32", "machine"),
        (PRECISION, {"fp16": True}, None, "fp32", "fallback"),
        (TF32, {}, "rtx-3090", True, "machine"),
        (TF32, {}, "t4", False, "machine"),
        (TF32, {"use_tf32": True}, "t4", False, "fallback"),
        (TF32, {"use_tf32": False}, "rtx-3090", False, "manifest"),
        (ATTENTION, {}, "rtx-4090", "flash", "machine"),
        (ATTENTION, {"packing": False}, "rtx-4090", "sdpa", "machine"),
        (ATTENTION, {"packing": False, "use_sdpa": True}, "rtx-4090", "sdpa", "manifest"),
        (ATTENTION, {"use_sdpa": True}, "rtx-4090", "flash", "machine"),
        (ATTENTION, {"flash_attention_2": True, "packing": False}, "rtx-4090", "flash", "manifest"),
        (ATTENTION, {"attention": "flex"}, "rtx-4090", "flex", "manifest"),
        (ATTENTION, {"attention": "eager"}, "rtx-4090", "eager", "manifest"),
        (ATTENTION, {"attention": "flash"}, "t4", "sdpa", "fallback"),
        (ATTENTION, FP32, "rtx-4090", "sdpa", "machine"),
        (ATTENTION, {"attention": "flash", **FP32}, "rtx-4090", "sdpa", "fallback"),
        (ATTENTION, {"attention": "flex", **FP32}, "rtx-4090", "flex", "manifest"),
        (ATTENTION, {}, "t4", "sdpa", "machine"),
        (ATTENTION, {}, None, "sdpa", "machine"),
        (OPTIMIZER, {}, "rtx-4090", "adamw_torch_fused", "machine"),
        (OPTIMIZER, {}, None, "adamw_torch", "machine"),
        (OPTIMIZER, {"optim": "paged_adamw_8bit"}, "rtx-4090", "paged_adamw_8bit", "manifest"),
        (OPTIMIZER, {"optim": "paged_adamw_8bit"}, None, "paged_adamw_8bit", "manifest"),
        (OPTIMIZER, {"optim": "sgd"}, None, "sgd", "manifest"),
    ],
)
def test_kernels_follow_the_card_and_what_was_asked(path, config, card, value, source):
    made = plan(manifest(config), card)
    assert decision(made, path)[::2] == (value, source)
    assert made.kernels.loss_scaling == (made.kernels.precision == "fp16")


@each(
    ("config", "card", "value", "source"),
    [
        ({}, "h200", "flash", "machine"),
        ({}, "rtx-4090", "flash", "machine"),
        ({"packing": False}, "h200", "sdpa", "machine"),
        ({"torch_compile": True}, "h200", "flex", "measurement"),
        ({"attention": "flash4"}, "h200", "flash4", "manifest"),
        ({"attention": "flash4"}, "rtx-4090", "flash", "fallback"),
        ({"attention": "flash4", "torch_compile": True}, "h200", "flash", "fallback"),
        ({"attention": "flash4", "bf16": False, "fp16": False}, "h200", "sdpa", "fallback"),
        ({"attention": "flash"}, "h200", "flash", "manifest"),
    ],
)
def test_flash_attention_4_is_used_on_hopper_where_it_is_asked_for(
    config, card, value, source, monkeypatch
):
    there = "expert.planning.choose.kernels.package_version"
    monkeypatch.setattr(there, lambda name: Fact("4.0", "importlib.metadata"))
    assert decision(plan(manifest(config), card), ATTENTION)[::2] == (value, source)


def test_flash_attention_4_is_for_long_documents_and_heads_it_is_right_for(monkeypatch):
    there = "expert.planning.choose.kernels.package_version"
    monkeypatch.setattr(there, lambda name: Fact("4.0", "importlib.metadata"))
    surveys = [Survey(100_000, 100_000 * tokens, "counted") for tokens in (400, 1800)]
    plans = [plan(manifest(), "h200", survey=survey) for survey in surveys]
    assert [each.kernels.attention for each in plans] == ["flash", "flash4"]
    cut = plan(manifest({"max_seq_length": 512}), "h200", survey=surveys[1])
    assert cut.kernels.attention == "flash"
    tiny = [{"name": "tiny"}]  # its heads have another size
    assert plan(manifest({}, base_models=tiny), "h200").kernels.attention != "flash4"
    asked = plan(manifest({"attention": "flash4"}, base_models=tiny), "h200")
    assert decision(asked, ATTENTION)[::2] == ("flash", "fallback")
    assert "32" in str(remarks(asked, "warning"))


@each(
    ("card", "config", "instead"),
    [
        ("rtx-4090", {}, "flash"),
        ("h200", {"torch_compile": True}, "flex"),
        ("t4", {}, None),
        (None, {}, None),
        ("rtx-4090", {"bf16": False, "fp16": False}, None),
        ("rtx-4090", {"packing": False}, None),
    ],
)
def test_use_sdpa_is_reported_as_superseded_only_where_another_kernel_runs(card, config, instead):
    made = plan(manifest({"use_sdpa": True, **config}), card)
    told = [text for text in remarks(made, "superseded") if "use_sdpa" in text]
    assert made.kernels.attention == (instead or "sdpa")
    assert len(told) == (instead is not None)
    assert all(f"{instead} attention keeps packed rows apart" in text for text in told)
    assert not [n for n in read(manifest({"use_sdpa": True})).notices if "use_sdpa" in n.path]


def test_an_fp8_base_stays_one_where_the_card_multiplies_fp8():
    for name in ("Qwen3-0.6B", "nobody/knows-this-model"):
        asked = manifest(base_models=[{"name": name, "quantization": "fp8"}])
        assert decision(plan(asked, "rtx-4090"), "model.quantization")[::2] == ("fp8", "manifest")
        made = plan(asked, "rtx-3090")
        because = "the card has no fp8 arithmetic; int8 takes the same memory"
        assert decision(made, "model.quantization") == ("int8", because, "fallback")
        told = f"model.quantization: quantization fp8: {because}"
        assert told in remarks(made, "superseded")
    kinds = ("fp8", "int8", "none")
    models = [[{"name": "Llama-3.1-8B", "quantization": kind}] for kind in kinds]
    fp8, int8, whole = (plan(manifest(base_models=each), "h200") for each in models)
    [shape] = {workload_of(each).shape for each in (fp8, int8)}
    last = fp8.memory.parts["base_weights"] - int8.memory.parts["base_weights"]
    assert last == shape.block_linear_parameters  # two bytes each instead of one
    assert (fp8.memory.peak_bytes or 0) < (whole.memory.peak_bytes or 0)
