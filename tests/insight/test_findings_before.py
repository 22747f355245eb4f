"""Findings before a run: planted in its manifest, found in its plan, and gone after the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from expert.insight.findings.evidence import Before, evidence_before
from expert.insight.findings.finding import Finding
from expert.insight.findings.table import find
from expert.manifest.reader import read_manifest
from expert.planning.machine.machine import describe_machine
from expert.planning.machine.target import choose_target
from expert.run.open import plan
from tests.each import each
from tests.jobs.runs import write_expert

CARD = "rtx-4090"
QUIET: dict[str, Any] = {"logging_steps": 10}
"""A healthy configuration: that of write_expert, without what it sets for other tests."""


def finding_from(
    manifest: Path,
    *,
    gpu: str | None = CARD,
    overrides: tuple[str, ...] = (),
    gpu_here: str = "",
) -> list[Finding]:
    """The findings of a manifest for a card, or for this machine's CPU."""
    read = read_manifest(manifest, overrides=overrides)
    target = choose_target(describe_machine(manifest.parent), gpu=gpu)
    before = Before(capability=target.capability, cores=8, gpu_here=gpu_here)
    return find(evidence_before(read.manifest, plan(read, gpu=gpu), before))


def test_a_healthy_configuration_draws_no_warning(tmp_path):
    found = finding_from(write_expert(tmp_path, "tiny", QUIET))
    assert [one.name for one in found if one.severity in ("error", "warning")] == []


FP32 = {"bf16": False, "fp16": False}
PADDED = {"packing": False}


# The planted setting, and the finding with its severity.
@each(
    ("config", "name", "severity"),
    [
        ({"tokenize": "late", **PADDED}, "tokenised-late", "warning"),
        ({"dataloader_num_workers": 0, **PADDED}, "no-workers", "warning"),
        ({"dataloader_num_workers": 16, **PADDED}, "too-many-workers", "warning"),
        ({"dataloader_pin_memory": False}, "pin-memory-off", "warning"),
        ({"dataloader_prefetch_factor": 1}, "no-prefetch", "warning"),
        (PADDED, "no-packing", "warning"),
        ({"batch_size": 1}, "batch-1", "warning"),
        ({"micro_batch_size": 1, **PADDED}, "small-micro-batch", "warning"),
        (FP32, "fp32-on-a-bf16-card", "warning"),
        ({"use_tf32": False}, "tf32-off", "note"),
        ({"use_tf32": False, **FP32}, "tf32-off", "warning"),
        ({"attention": "eager"}, "eager-attention", "warning"),
        ({"optim": "adamw_torch"}, "plain-optimizer", "warning"),
        ({"save_strategy": "no"}, "saves-only-at-the-end", "warning"),
        ({"save_steps": 500}, "saves-only-at-the-end", "warning"),
    ],
)
def test_planted_problems_are_found_and_their_fixes_work(tmp_path, config, name, severity):
    manifest = write_expert(tmp_path, "tiny", {**QUIET, **config})
    found = {one.name: one for one in finding_from(manifest)}
    assert found[name].severity == severity
    assert found[name].evidence
    mended = found[name].overrides
    if mended:
        left = {one.name: one.severity for one in finding_from(manifest, overrides=mended)}
        assert left.get(name) != severity


def test_settings_that_feed_a_card_draw_no_warning_on_a_cpu(tmp_path):
    config = {"dataloader_num_workers": 0, "dataloader_prefetch_factor": 1, **PADDED}
    manifest = write_expert(tmp_path, "tiny", {**QUIET, "device": "cpu", **config})
    assert [one.name for one in finding_from(manifest, gpu=None)] == ["no-packing"]


def test_a_stream_without_workers_is_found(tmp_path):
    config = {"dataloader_num_workers": 0, "max_steps": 9}
    manifest = write_expert(tmp_path, "tiny", {**QUIET, **config}, dataset={"streaming": True})
    found = {one.name: one for one in finding_from(manifest)}
    assert found["no-workers"].evidence == "you set dataloader_num_workers: 0"
    assert "no-packing" not in found


@each("base", ["tiny", "char-gpt"])
def test_rows_and_blocks_that_fill_their_places_need_no_packing(tmp_path, base):
    config = {**QUIET, **PADDED, "max_seq_length": 24}
    if base == "char-gpt":
        config = {**QUIET, "adapter_type": "full", "rank": "auto"}
    found = {one.name for one in finding_from(write_expert(tmp_path, base, config))}
    assert found.isdisjoint({"no-packing", "no-workers"})


def test_what_does_not_fit_is_an_error(tmp_path):
    config = {**QUIET, "adapter_type": "full", "rank": "auto", "distributed": "replicated"}
    manifest = write_expert(tmp_path, "meta-llama/Llama-3.1-8B", config)
    found = {one.name: one for one in finding_from(manifest)}
    assert found["does-not-fit"].severity == "error"
    assert " fits" in found["does-not-fit"].evidence  # what would, as the plan says it


def test_a_cpu_that_was_asked_for_beside_a_gpu_is_found(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {**QUIET, "device": "cpu"})
    found = {one.name: one for one in finding_from(manifest, gpu=None, gpu_here="NVIDIA H200")}
    assert found["cpu-asked"].overrides == ("training.config.device=auto",)
