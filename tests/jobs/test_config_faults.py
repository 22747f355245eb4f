"""Every fault the guides name is found where it is planted, and its fix takes it away again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.faults.asked import Asked
from expert.jobs.diagnose.faults.table import FAULTS, config_findings
from expert.manifest.reader import ReadManifest, read_manifest
from expert.planning.machine.machine import describe_machine
from expert.planning.machine.target import choose_target
from expert.planning.run_plan import RunPlan
from expert.run.open import plan
from tests.jobs.runs import write_expert

CARD = "rtx-4090"
QUIET: dict[str, Any] = {"logging_steps": 10}
"""A healthy configuration: what write_expert sets, less what it sets for other tests' sake."""


def looked_at(
    manifest: Path,
    *,
    gpu: str | None = CARD,
    overrides: tuple[str, ...] = (),
    **facts: Any,
) -> list[Finding]:
    """What the rules say about a manifest for a card, or for this machine's CPU."""

    def read(more: tuple[str, ...] = ()) -> ReadManifest:
        return read_manifest(manifest, overrides=(*overrides, *more))

    def planned(more: tuple[str, ...]) -> RunPlan:
        return plan(read(more), gpu=gpu)

    target = choose_target(describe_machine(manifest.parent), gpu=gpu)
    asked = Asked(
        manifest=read().manifest,
        plan=planned(()),
        capability=target.capability,
        windows=False,
        cores=8,
        gpu_here="",
        named_card=False,
        mean_tokens=20.0,
        longest_tokens=64,
        replan=planned,
    )
    return config_findings(replace(asked, **facts))


def test_a_healthy_configuration_draws_no_warning(tmp_path):
    found = looked_at(write_expert(tmp_path, "tiny", QUIET))
    assert [each.name for each in found if each.severity in ("error", "warning")] == []


FP32 = {"bf16": False, "fp16": False}
PADDED = {"packing": False}
# Name of the rule, what is planted, and the finding with its severity.
PLANTED: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ("tokenised-late", {"tokenize": "late", **PADDED}, {}, "tokenised-late", "warning"),
    ("no-workers", {"dataloader_num_workers": 0, **PADDED}, {}, "no-workers", "warning"),
    ("no-workers", {"dataloader_num_workers": 0}, {}, "no-workers", "note"),
    (
        "too-many-workers",
        {"dataloader_num_workers": 16, **PADDED},
        {},
        "too-many-workers",
        "warning",
    ),
    ("too-many-workers", {"dataloader_num_workers": 4}, {}, "too-many-workers", "note"),
    ("few-cores", {}, {"cores": 1}, "few-cores", "warning"),
    ("pin-memory-off", {"dataloader_pin_memory": False}, {}, "pin-memory-off", "warning"),
    ("no-prefetch", {"dataloader_prefetch_factor": 1}, {}, "no-prefetch", "warning"),
    (
        "workers-restart",
        {"dataloader_persistent_workers": False, "dataloader_num_workers": 2, **PADDED},
        {},
        "workers-restart",
        "warning",
    ),
    ("batch-1", {"batch_size": 1}, {}, "batch-1", "warning"),
    ("batch-1", {"micro_batch_size": 1, **PADDED}, {}, "small-micro-batch", "warning"),
    (
        "needless-recomputing",
        {"gradient_checkpointing": True},
        {},
        "needless-recomputing",
        "warning",
    ),
    ("no-packing", PADDED, {}, "no-packing", "warning"),
    ("long-sequences", {"max_seq_length": 512}, {}, "long-sequences", "note"),
    ("fp32-on-a-bf16-card", FP32, {}, "fp32-on-a-bf16-card", "warning"),
    ("fp32-on-a-bf16-card", {"fp16": True, "bf16": False}, {}, "fp16", "warning"),
    ("tf32-off", {"use_tf32": False}, {}, "tf32-off", "note"),
    ("tf32-off", {"use_tf32": False, **FP32}, {}, "tf32-off", "warning"),
    ("eager-attention", {"attention": "eager"}, {}, "eager-attention", "warning"),
    ("eager-attention", {"flash_attention_2": True}, {}, "flash-attention-package", "note"),
    ("eager-attention", {"use_sdpa": False}, {}, "flash-attention-package", "note"),
    ("plain-optimizer", {"optim": "adamw_torch"}, {}, "plain-optimizer", "warning"),
    ("whole-logits", {"fused_loss": False}, {}, "whole-logits", "warning"),
    ("compile-off", {"torch_compile": False, "epochs": 1e8}, {}, "compile-off", "warning"),
    ("compile-off", {}, {}, "compile-off", "note"),
    ("compile-off", {"torch_compile": True}, {"windows": True}, "compile-cannot", "warning"),
    ("compile-off", {"torch_compile": True}, {"capability": (6, 1)}, "compile-cannot", "warning"),
    ("compile-off", {"torch_compile": True, **PADDED}, {}, "compile-padded", "warning"),
    ("cudnn-benchmark-off", {"cudnn_benchmark": False}, {}, "cudnn-benchmark-off", "note"),
    ("saves-only-at-the-end", {"save_strategy": "no"}, {}, "saves-only-at-the-end", "warning"),
    ("saves-only-at-the-end", {"save_steps": 500}, {}, "saves-only-at-the-end", "warning"),
    ("logging-often", {"logging_steps": 1}, {}, "logging-often", "note"),
    ("no-evaluation", {"evaluation_strategy": "no"}, {}, "no-evaluation", "note"),
    ("no-clipping", {"max_grad_norm": 0}, {}, "no-clipping", "note"),
    ("no-warm-up", {"warmup_steps": 0}, {}, "no-warm-up", "note"),
    ("long-run", {"epochs": 1e9}, {}, "long-run", "warning"),
]


@pytest.mark.parametrize(("rule", "config", "facts", "name", "severity"), PLANTED)
def test_a_planted_fault_is_found_and_its_fix_takes_it_away(
    tmp_path, rule, config, facts, name, severity
):
    manifest = write_expert(tmp_path, "tiny", {**QUIET, **config})
    found = {each.name: each for each in looked_at(manifest, **facts)}
    assert name in found
    assert found[name].severity == severity
    assert found[name].evidence
    mended = found[name].overrides
    if mended and not facts:
        left = {each.name: each.severity for each in looked_at(manifest, overrides=mended)}
        assert left.get(name) != severity


def test_what_does_not_fit_is_an_error(tmp_path):
    config = {**QUIET, "adapter_type": "full", "rank": "auto"}
    manifest = write_expert(tmp_path, "meta-llama/Llama-3.1-8B", config)
    found = {each.name: each.severity for each in looked_at(manifest)}
    assert found["does-not-fit"] == "error"


def test_an_update_that_is_taken_in_parts_is_a_note(tmp_path):
    config = {**QUIET, "batch_size": 256, "max_seq_length": 2048, "packing": False}
    manifest = write_expert(tmp_path, "meta-llama/Llama-3.1-8B", config)
    found = {each.name: each.severity for each in looked_at(manifest)}
    assert found["batch-split"] == "note"


def test_quantised_weights_that_need_not_be_are_found(tmp_path):
    model = {"quantization": "int4"}
    manifest = write_expert(tmp_path, "Qwen/Qwen3-0.6B", QUIET, model=model)
    found = {each.name: each for each in looked_at(manifest)}
    mended = found["needless-quantisation"].overrides
    assert mended
    left = [each.name for each in looked_at(manifest, overrides=mended)]
    assert "needless-quantisation" not in left


def test_a_cpu_that_was_asked_for_beside_a_gpu_is_found(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {**QUIET, "device": "cpu"})
    found = {each.name: each for each in looked_at(manifest, gpu=None, gpu_here="NVIDIA H200")}
    assert found["cpu-asked"].overrides == ("training.config.device=auto",)


def test_compiling_for_a_cpu_is_found(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {**QUIET, "torch_compile": True, "device": "cpu"})
    found = {each.name for each in looked_at(manifest, gpu=None)}
    assert "compile-on-cpu" in found


def test_every_rule_is_planted_somewhere():
    elsewhere = {"does-not-fit", "needless-quantisation", "cpu-asked"}
    assert {rule for rule, *_ in PLANTED} | elsewhere == {fault.name for fault in FAULTS}
