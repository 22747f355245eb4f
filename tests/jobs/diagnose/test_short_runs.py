"""Short runs that leave nothing behind: profiles of them, and fixes tried in them."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from expert.insight.findings.finding import Finding
from expert.jobs.diagnose.first_fix import (
    MeasuredRun,
    NothingToTry,
    TriedFix,
    first_fix,
    measured,
    read_run_manifest,
    try_fix,
)
from expert.jobs.diagnose.profile import Span, busy_time, profile, purpose_of, summed
from expert.manifest.reader import read_manifest
from expert.run.open import open_run
from expert.run.session.short_run import SETTLING, ShortRun, short_run
from tests.each import each
from tests.jobs.runs import losses_of, run, write_expert


def test_a_short_run_trains_like_the_run_and_leaves_only_tokens(tmp_path, base):
    config = {"lr_scheduler": "constant", "warmup_steps": 0, "eval_steps": 1, "save_steps": 1}
    manifest = write_expert(tmp_path, base, config | {"max_steps": 2})
    done = short_run(open_run(manifest), updates=3)  # one more than the run
    assert done.updates == 3
    assert {"eval", "saved"} & {event["event"] for event in done.events} == set()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"manifest.json", "train.jsonl", "datasets_optimized"}
    seen = {e["step"]: float(e["loss"]).hex() for e in done.events if e["event"] == "step"}
    real = losses_of(run(manifest).folder)
    assert {step: seen[step] for step in (1, 2)} == real


@pytest.fixture
def heeded():
    """A shell starts what runs in the background with SIGINT ignored; a run leaves that so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_more_than_the_first_of_two_short_runs(tmp_path, base, sent, code, heeded):
    manifest = write_expert(tmp_path, base, {})

    def stopping(updates: Any) -> Any:
        for update in updates:
            os.kill(os.getpid(), sent)
            yield update

    with pytest.raises(SystemExit) as left:
        short_run(open_run(manifest), updates=5, through=stopping)
    assert left.value.code == code


# --- profiles ------------------------------------------------------------------------------------


def test_a_profile_is_written_whole_and_summed_up_by_purpose(tmp_path, base, capfd):
    manifest = write_expert(tmp_path, base, {})
    found = profile(read_manifest(manifest), updates=2)
    assert "USDT" not in capfd.readouterr().err  # printed by torch's profiler
    trace = Path(found.trace)
    assert trace.parent == tmp_path / "profile"
    assert [path.name for path in trace.parent.iterdir()] == [trace.name]
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert found.updates == 2
    assert 0 < found.busy <= 1
    assert {"matmul", "attention", "norm and elementwise"} <= set(found.purposes)
    assert sum(found.purposes.values()) == pytest.approx(sum(k.seconds for k in found.kernels))


@each(
    ("name", "purpose"),
    [
        ("aten::mm", "matmul"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>", "matmul"),
        ("pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("_row_kernel", "loss"),
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("ncclDevKernel_AllReduce_Sum_bf16", "communication"),
        ("triton_poi_fused_mul_silu_3", "norm and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norm and elementwise"),
        ("something else", "other"),
    ],
)
def test_kernels_have_a_purpose_by_their_names(name, purpose):
    assert purpose_of(name) == purpose


def span(start: float, end: float, name: str = "aten::mm") -> Span:
    return Span(name=name, start=start, end=end, own=end - start)


def test_time_in_which_something_ran_counts_once():
    whole, busy, gaps = busy_time([span(0, 100), span(50, 120), span(200, 300), span(310, 320)])
    assert (whole, busy) == (320, 230)
    assert gaps == [80]  # 10 µs between two kernels is not a gap
    assert busy_time([]) == (0.0, 0.0, [])


def test_a_profile_of_kernels_adds_calls_of_one_name():
    found = summed(
        [span(0, 1e6), span(1e6, 2e6), span(2e6, 3e6, "Memcpy DtoD")],
        trace="x",
        device="y",
        on_gpu=True,
        updates=1,
    )
    assert [(k.name, k.calls, k.seconds) for k in found.kernels] == [
        ("aten::mm", 2, pytest.approx(2.0)),
        ("Memcpy DtoD", 1, pytest.approx(1.0)),
    ]
    assert found.purposes == {"matmul": pytest.approx(2.0), "copy": pytest.approx(1.0)}
    assert (found.busy, found.gaps) == (1.0, 0)


# --- trying a fix --------------------------------------------------------------------------------


def finding(name: str, severity: Any, overrides: tuple[str, ...], gain: float | None = None):
    return Finding(
        name=name, severity=severity, title=name, evidence="e", overrides=overrides, gain=gain
    )


def test_the_first_fix_is_the_worst_finding_fixed_by_a_manifest_key():
    found = [
        finding("note", "note", ("a=1",)),
        finding("small", "warning", ("b=1",), 1.1),
        finding("large", "warning", ("c=1",), 3.0),
        finding("by hand", "error", ()),
        finding("saves-only-at-the-end", "warning", ("d=1",), 9.0),
    ]
    assert first_fix(found).name == "large"
    with pytest.raises(NothingToTry, match="no finding is fixed by a key"):
        first_fix([finding("note", "note", ("a=1",)), finding("by hand", "error", ())])


def test_a_fix_is_measured_before_and_after_on_the_same_rows(tmp_path, base):
    manifest = write_expert(tmp_path, base, {"gradient_checkpointing": True, "dropout": 0.0})
    keys = ("training.config.gradient_checkpointing=none",)
    found = try_fix(
        lambda more: read_manifest(manifest, overrides=more),
        name="needless-recomputing",
        title="recomputed",
        overrides=keys,
        updates=2,
    )
    assert (found.before.updates, found.after.updates) == (2, 2)
    assert found.before.examples == found.after.examples
    # The same arithmetic: recomputing changes no bit of a float32 loss.
    assert found.before.loss == found.after.loss
    assert found.gain > 0
    assert found.as_dict()["overrides"] == keys


def test_the_manifest_of_a_run_is_read_again_with_its_own_data(tmp_path, base):
    done = run(write_expert(tmp_path / "expert", base, {"max_steps": 1}))
    again = read_run_manifest(done.folder, ("training.config.batch_size=4",))
    assert again.folder == tmp_path / "expert"
    assert again.manifest.training.config.batch_size == 4
    assert short_run(open_run(again), updates=1).updates == 1
    with pytest.raises(NothingToTry, match=r"has no manifest\.json"):
        read_run_manifest(tmp_path)


def test_warm_up_steps_are_not_measured():
    def step(number: int, seconds: float) -> dict[str, Any]:
        return {
            "event": "step",
            "step": number,
            "seconds": seconds,
            "tokens": 100,
            "targets": 50,
            "examples": 4,
            "loss": 2.0,
            "updates": 1,
        }

    slow = [step(number + 1, 10.0) for number in range(SETTLING)]
    fast = [step(SETTLING + 1 + number, 0.5) for number in range(4)]
    done = ShortRun(plan=None, events=(*slow, *fast), updates=SETTLING + 4)
    found = measured(done)
    assert (found.updates, found.tokens_per_second, found.spread) == (4, 200.0, 0.0)
    assert found.loss == 2.0


def test_steps_without_a_wait_or_on_an_idle_card_count_as_zero():
    facts = {"event": "step", "seconds": 1.0, "tokens": 1, "targets": 1, "examples": 1, "loss": 1.0}
    values = [{"time_data_wait": 0.0, "gpu_utilization": use} for use in (0, 50, 100, 50)]
    steps = tuple({**facts, **value, "step": SETTLING + 1} for value in values)
    found = measured(ShortRun(plan=None, events=steps, updates=4))
    assert (found.data_wait, found.gpu_utilization) == (0.0, 50.0)


def test_a_gain_within_the_spread_is_not_certain():
    facts: dict[str, Any] = {
        "updates": 4,
        "seconds": 1.0,
        "tokens": 1,
        "examples": 1,
        "seconds_an_update": 0.25,
        "loss": 1.0,
        "data_wait": None,
        "gpu_utilization": None,
        "peak_reserved_bytes": None,
        "fallbacks": (),
    }
    before = MeasuredRun(**facts, tokens_per_second=100.0, spread=0.3)
    names = {"name": "n", "title": "t", "overrides": ("a=1",), "device": "d", "before": before}
    near = TriedFix(**names, after=MeasuredRun(**facts, tokens_per_second=120.0, spread=0.1))
    far = TriedFix(**names, after=MeasuredRun(**facts, tokens_per_second=150.0, spread=0.1))
    assert (near.certain, far.certain) == (False, True)
