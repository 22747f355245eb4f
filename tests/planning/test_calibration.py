"""Memory measured by runs, and its use in plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from expert.planning.machine.host import package_version
from expert.planning.measurements import read_records
from expert.planning.memory.calibration import (
    Calibrations,
    MemoryProbe,
    calibration_kind,
    calibrations_of,
    remember,
    shape_key,
    with_new_estimate,
    workload_of,
)
from expert.planning.memory.memory import H200, autocast_bytes, estimate, resting_bytes
from expert.planning.memory.workload import Workload
from tests.each import each
from tests.planning.planning import decision, manifest, plan, shape_of

LLAMA = shape_of("Llama-3.2-1B")
WORK = Workload(shape=LLAMA, rows=4, row_tokens=2048)


def probe_of(work: Workload, **changes) -> MemoryProbe:
    """A run whose weights took 2 % more than counted and whose activations took half."""
    counted = resting_bytes(work)
    moving = estimate(work).allocated - counted
    values = {
        "card": "NVIDIA Test",
        "torch": "2.13.0",
        "shape": shape_key(work.shape),
        "kind": calibration_kind(work),
        "tokens": work.tokens,
        "resting_counted": counted,
        "resting_measured": int(1.02 * counted),
        "moving_counted": moving,
        "moving_measured": moving // 2,
        "reserved": int(1.06 * (1.02 * counted + moving // 2)),
        "context_bytes": 500 * 2**20,
        "measured_on": "2026-11-15",
    }
    return MemoryProbe(**{**values, **changes})


def test_a_plan_of_the_kind_that_was_probed_counts_as_it_was_measured():
    probe = probe_of(WORK)
    calibration, because = Calibrations(probes=(probe,)).of(WORK)
    guess = estimate(WORK, calibration)
    assert guess.allocated == pytest.approx(
        probe.resting_measured + probe.moving_measured, rel=1e-6
    )
    assert guess.total == pytest.approx(probe.reserved + probe.context_bytes, rel=1e-6)
    assert because == "calibrated by a run of 2026-11-15"
    # Other batch sizes scale with the tokens, and the weights stay.
    twice = estimate(replace(WORK, rows=8), calibration)
    assert twice["base_weights"] == guess["base_weights"]
    assert twice["activations"] == pytest.approx(2 * guess["activations"], rel=1e-6)
    # The probe with the most tokens counts; one that saw little slack leaves room for more.
    large = probe_of(replace(WORK, rows=16), moving_measured=1)
    assert Calibrations(probes=(large, probe)).of(WORK)[0] == large.calibration()
    assert probe_of(WORK, reserved=resting_bytes(WORK)).calibration().slack == 0.05
    assert Calibrations().of(WORK) == (H200, "counted")


@each(
    "other",
    [
        {"adapter": "dora"},
        {"quantization": "int4"},
        {"compiled": False},
        {"recomputed_blocks": 16},
        {"attention": "sdpa"},
        {"shape": shape_of("Qwen3-0.6B")},
    ],
    ids=str,
)
def test_another_kind_takes_only_the_context_from_a_probe(other):
    calibration, because = Calibrations(probes=(probe_of(WORK),)).of(replace(WORK, **other))
    assert calibration == replace(H200, context_bytes=500 * 2**20)
    assert because == "counted; the context as measured here"


def test_probes_are_kept_by_card_and_torch_and_the_newest_of_a_kind_stays(tmp_path):
    file = tmp_path / "deep" / "probes.json"
    for card, context in (("A", 1), ("B", 2), ("A", 3)):
        remember(probe_of(WORK, card=card, context_bytes=context), file)
    remember(probe_of(WORK, card="A", torch="2.14.0", context_bytes=4), file)
    assert [one.context_bytes for one in calibrations_of("A", "2.13.0", file).probes] == [3]
    assert [one.context_bytes for one in calibrations_of("B", "2.13.0", file).probes] == [2]
    assert len(read_records(file, MemoryProbe)) == 3


ZERO = probe_of(WORK).model_dump() | {"resting_measured": 0, "moving_measured": 0}


@each("text", ["", "[", "{}", '[{"card": 1}]', "null", json.dumps([ZERO])])
def test_a_damaged_file_has_no_probes_and_is_written_anew(tmp_path, text):
    file = tmp_path / "probes.json"
    file.write_text(text)
    assert read_records(file, MemoryProbe) == []
    remember(probe_of(WORK), file)
    assert len(read_records(file, MemoryProbe)) == 1


def test_autocast_copies_come_and_go_with_an_update():
    full = replace(WORK, adapter="full")
    assert autocast_bytes(full) > 0
    assert autocast_bytes(WORK) == autocast_bytes(replace(full, precision="fp32")) == 0
    assert resting_bytes(full) == resting_bytes(replace(full, precision="fp32"))


def test_a_plan_knows_the_workload_that_it_was_made_for():
    made = plan(manifest())
    work = workload_of(made)
    assert estimate(work).total == made.memory.peak_bytes
    assert json.loads(made.model_dump_json())["memory"]["workload"]["rows"] == work.rows
    less = made.with_values({"batch.micro_batch": 1}, "a test", "fallback")
    again = with_new_estimate(less, Calibrations())
    expected = estimate(replace(work, rows=1, accumulates=made.batch.accumulation != 1))
    assert again.memory.peak_bytes == expected.total < estimate(work).total


def test_a_plan_for_a_card_that_was_probed_says_so(tmp_path):
    config = {"gradient_checkpointing": False}
    before = plan(manifest(config))
    found = package_version("torch").value
    work = workload_of(before)
    probe = probe_of(work, card=before.target, torch=found)
    remember(probe, tmp_path / "memory-probes.json")
    after = plan(manifest(config), environ={"EXPERT_HOME": str(tmp_path)})
    assert after.batch.micro_batch > before.batch.micro_batch  # activations took half
    _, because, source = decision(after, "memory.peak_bytes")
    assert because.endswith("(calibrated by a run of 2026-11-15)")
    assert source == "measurement"
