"""The diagnosis before a run: machine, data and configuration together, on this machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.check import Check, built_for, check, check_gpus, check_torch
from expert.manifest.reader import read_manifest
from expert.planning.machine.host import unknown
from expert.planning.machine.machine import Fact, describe_machine
from expert.run.open import prepare
from tests.each import each
from tests.jobs.runs import ROWS, write_expert
from tests.planning.fake_nvml import GIB, NO_SUCH_PID, FakeNvml


def checked(manifest: Path, **more: Any) -> dict[str, Finding]:
    return {each.name: each for each in whole(manifest, **more).findings}


def whole(manifest: Path, **more: Any) -> Check:
    return check(read_manifest(manifest), **{"timed": False, **more})


def test_the_time_of_a_run_is_estimated_by_timing_a_few_steps(tmp_path, base, monkeypatch):
    manifest = write_expert(tmp_path, base, {})
    found = checked(manifest, timed=True)
    assert "timed on this machine" in found["length"].evidence
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"manifest.json", "train.jsonl", "datasets_optimized"}

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: no kernel image\nmore")

    monkeypatch.setattr("expert.jobs.diagnose.check.time_steps", breaks)
    failed = checked(manifest, timed=True)
    assert failed["steps-failed"].evidence == "CUDA error: no kernel image"
    assert "timed on this machine" not in failed["length"].evidence


def test_rows_that_are_not_prepared_are_tried_and_then_counted(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {})
    before = checked(manifest)
    assert "first use of this data" in before["cache-to-come"].evidence
    assert not (tmp_path / "datasets_optimized").exists()
    prepare(manifest)
    after = checked(manifest)
    assert after["cache"].severity == "good"
    assert after["cache"].evidence.startswith(f"{len(ROWS)} rows, ")
    other = write_expert(tmp_path, "tiny", {}, rows=ROWS[:-1])
    assert "the data changed" in checked(other)["cache-to-come"].evidence
    (tmp_path / "train.jsonl").unlink()
    missing = whole(other)
    assert missing.exit_code == 2
    assert {each.name for each in missing.findings if each.severity == "error"} == {"data-missing"}
    assert json.loads(json.dumps(missing.as_dict()))["exit_code"] == 2


@pytest.mark.parametrize("ready", [False, True])
def test_rows_that_will_be_cut_are_counted(tmp_path, ready):
    long = [{"instruction": "say", "response": "one two " * 60} for _ in range(4)]
    manifest = write_expert(tmp_path, "tiny", {}, rows=[*ROWS[:36], *long])
    if ready:
        prepare(manifest)
    cut = checked(manifest)["plan-training.config.max_seq_length" if ready else "rows-cut"]
    assert cut.severity == "warning"
    # Of the prepared rows those for validation are drawn apart, so some of the four may be there.
    assert re.search(r"\b[1-4] of " if ready else r"\b4 of ", cut.evidence)


def test_rows_that_the_checks_leave_out_are_counted(tmp_path):
    dataset = {"validation": {"min_length": 7}}
    found = checked(write_expert(tmp_path, "tiny", {}, dataset=dataset))["rows-left-out"]
    short = sum(len(row["response"]) < 7 for row in ROWS)
    assert found.evidence.startswith(f"{short} of {len(ROWS)} rows are unreadable or fail")


def test_a_warning_of_the_plan_is_shown_unless_a_finding_that_was_made_repeats_it(tmp_path):
    reported = checked(
        write_expert(tmp_path / "old", "tiny", {"attention": "flash4"}), gpu="rtx-4090"
    )
    assert "plan-kernels.attention" in reported
    reported = checked(write_expert(tmp_path / "eager", "tiny", {"attention": "eager"}))
    assert "eager-attention" in reported
    assert "plan-kernels.attention" not in reported


def test_a_bad_row_is_an_error_unless_it_is_tolerated(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {})
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("\nnot json\n")
    assert checked(manifest)["too-many-bad-rows"].severity == "error"
    tolerant = write_expert(tmp_path / "b", "tiny", {}, dataset={"max_bad_rows": 1})
    (tmp_path / "b" / "train.jsonl").write_text(
        (tmp_path / "train.jsonl").read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert "too-many-bad-rows" not in checked(tolerant)


def test_a_disk_that_is_too_small_is_an_error_and_one_that_nobody_knows_is_not_judged(tmp_path):
    here, manifest = describe_machine(tmp_path), write_expert(tmp_path, "tiny", {})
    small = replace(here, disk_free_bytes=Fact(10, "a test"))
    assert checked(manifest, machine=small)["disk-full"].severity == "error"
    dark = replace(here, disk_free_bytes=unknown("a test"))
    assert not {"disk", "disk-full"} & set(checked(manifest, machine=dark))


def test_cuda_that_was_asked_for_and_is_not_there_is_an_error(tmp_path):
    found = whole(write_expert(tmp_path, "tiny", {"device": "cuda"}), machine=describe_machine())
    if found.plan is not None and found.plan.kernels.device == "cuda":
        pytest.skip("this machine has a GPU")
    assert "cuda-asked" in {each.name for each in found.findings if each.severity == "error"}


def test_a_named_card_is_checked_and_gets_a_band(tmp_path):
    manifest = write_expert(tmp_path, "Qwen/Qwen3-0.6B", {"rank": 16})
    found = whole(manifest, gpu="rtx-4090")
    names = {each.name: each for each in found.findings}
    assert "no-gpu" not in names
    assert not found.band.measured
    assert f"{found.band.reference:,.0f} tokens/s" in names["band"].title
    assert "step" in names["length"].evidence
    known = whole(manifest, gpu="h200").band  # a card that was measured
    assert known.measured


def test_a_character_corpus_is_looked_at(tmp_path):
    (tmp_path / "corpus.txt").write_text("to be or not to be\n" * 100, encoding="utf-8")
    (tmp_path / "manifest.yaml").write_text(
        "name: letters\nbase_model: {name: char-gpt, architecture: {layers: 1, heads: 2, width: 32,"
        " block_size: 16}}\ntraining:\n  dataset: {path: corpus.txt}\n"
        "  config: {adapter_type: full, epochs: 2, batch_size: 4}\n",
        encoding="utf-8",
    )
    found = whole(tmp_path / "manifest.yaml")
    assert found.exit_code == 0
    assert "rows-cut" not in {each.name for each in found.findings}


# --- the machine, through a stand-in for NVML ----------------------------------------------------


FACTS: dict[str, Any] = {
    "version": "2.11.0",
    "cuda": "12.8",
    "available": True,
    "architectures": ["sm_80", "sm_90"],
    "capability": [9, 0],
}


def found_on(nvml: FakeNvml) -> dict[str, Any]:
    machine = describe_machine(nvml=nvml, environ={})
    return {each.name: each for each in check_gpus(machine)}


def quiet(free: float = 79.6, busy: int = 0) -> FakeNvml:
    """An unused card, or one with less memory free or more to do."""
    nvml = FakeNvml()
    nvml.answers["nvmlDeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(
        total=80 * GIB, free=free * GIB
    )
    nvml.answers["nvmlDeviceGetUtilizationRates"] = lambda handle: SimpleNamespace(gpu=busy)
    return nvml


def test_a_card_is_looked_at_with_who_uses_it_or_why_there_is_none():
    nvml = quiet()
    found = found_on(nvml)
    assert [(name, each.severity) for name, each in found.items()] == [("gpu", "good")]
    assert "79.6 of 80.0 GiB free" in found["gpu"].evidence
    nvml.compute = [SimpleNamespace(pid=NO_SUCH_PID, usedGpuMemory=5 * GIB)]
    shared = found_on(nvml)["other-process"]
    assert shared.severity == "warning"
    assert f"pid {NO_SUCH_PID}, 5.0 GiB" in shared.evidence
    assert found_on(FakeNvml(cards=2))["several-gpus"].severity == "note"
    none = found_on(FakeNvml(broken={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}))["no-gpu"]
    assert none.severity == "warning"
    assert "driver is not installed" in none.evidence


@pytest.mark.parametrize(("free", "busy"), [(40, 0), (79.6, 90)])
def test_a_process_in_another_container_is_noticed_by_memory_or_utilization(free, busy):
    assert "unseen-process" in found_on(quiet(free, busy))


def test_memory_used_by_no_listed_process_is_counted_where_all_amounts_are_known():
    nvml = quiet()
    for used, unlisted in ((int(0.1 * GIB), int(0.3 * GIB)), (None, None)):
        nvml.compute = [SimpleNamespace(pid=NO_SUCH_PID, usedGpuMemory=used)]
        [gpu] = describe_machine(nvml=nvml, environ={}).gpus
        assert gpu.unlisted_bytes == (None if unlisted is None else pytest.approx(unlisted, abs=2))


# --- torch and the driver ------------------------------------------------------------------------


@each(
    ("facts", "name", "severity"),
    [
        ({}, "torch", "good"),
        ({"cuda": None, "version": "2.11.0+cpu", "available": False}, "torch-unfit", "error"),
        ({"cuda": "13.0"}, "torch-unfit", "error"),  # the driver runs up to 12.8
        ({"cuda": "12.9"}, "torch", "good"),
        ({"available": False}, "torch-unfit", "error"),
        ({"architectures": ["sm_70", "sm_80"]}, "torch-unfit", "error"),
        ({"architectures": ["sm_80", "compute_80"]}, "torch", "good"),
    ],
)
def test_torch_is_held_to_the_driver_and_the_card(facts, name, severity):
    machine = describe_machine(nvml=quiet(), environ={})
    [found] = check_torch(machine, needed=True, facts={**FACTS, **facts})
    assert (found.name, found.severity) == (name, severity)


def test_a_machine_without_torch_says_so():
    machine = describe_machine(nvml=quiet(), environ={})
    bare = replace(machine, versions={**machine.versions, "torch": Fact(None, "not installed")})
    for needed, severity in ((True, "error"), (False, "warning")):
        [found] = check_torch(bare, needed=needed)
        assert (found.name, found.severity) == ("no-torch", severity)


@each(
    ("capability", "architectures", "fits"),
    [
        ((8, 9), ["sm_86"], True),
        ((8, 6), ["sm_89"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 5), ["compute_80"], False),
    ],
)
def test_machine_code_is_for_its_major_version_and_ptx_for_all_later_ones(
    capability, architectures, fits
):
    assert built_for(capability, architectures) is fits
