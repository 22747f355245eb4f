"""The expected time of a run: its arithmetic, and its error against recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from expert.core.text import duration_range
from expert.manifest.schema.manifest import CharGptShape
from expert.planning.choose.expected_time import expected_parts, scaled, total_range
from expert.planning.choose.rates import RunShape, cpu_rate, gpu_rate, measured_range
from expert.planning.machine.cards import find_card
from expert.planning.memory.workload import Workload, flops_per_token
from expert.planning.models.resolve import char_gpt_shape
from tests.each import each
from tests.planning.planning import shape_of

RECORDS = Path(__file__).parents[2] / "docs" / "benchmarks"


SHAPES = {"qwen3-0.6b": shape_of("Qwen3-0.6B"), "llama-8b": shape_of("Llama-3.1-8B")}
SMALL = shape_of("SmolLM2-135M")


def peak():
    return (find_card("h200").bf16_tflops * 1e12,) * 2


def a_run(
    work: Workload,
    tokens_of_a_step: float,
    *,
    compiled: bool = False,
    captured: bool = False,
    **changes: Any,
) -> RunShape:
    known = {
        "tokens": 100 * tokens_of_a_step,
        "steps": 100,
        "micro_batches": 1,
        "mean_tokens": 430,
        "packed": True,
    }
    work = replace(work, compiled=compiled, captured=captured)
    return RunShape(work=work, **{**known, **changes})


def results(name: str, key: str = "results") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RECORDS / f"{name}.json").read_text())[key]
    return found


def measured() -> Iterator[tuple[str, RunShape, float]]:
    """Every recorded rate of a run on the H200, with its shape."""
    for sitting in results("training-speed-h200", "runs"):
        for x in sitting["results"]:
            kinds = {"nf4": "int4", "int8": "int8"}
            work = Workload(
                shape=SHAPES[x["shape"]],
                rows=1,
                row_tokens=2048,
                adapter=x["settings"]["adapter_type"],
                quantization=next((to for of, to in kinds.items() if of in x["case"]), "none"),
                recomputed_blocks=x.get("recomputed_blocks") or 0,
            )
            times = (x.get("batch") or {}).get("accumulation") or 1
            run = a_run(work, x["tokens_per_update"], micro_batches=times, compiled=True)
            yield x["case"], run, x["tokens_per_second"]
    for x in results("small-updates-h200"):
        if x["case"].startswith("135m"):
            tokens = x["tokens_per_second"] * x["milliseconds"] / 1000
            ways = {"compiled": "compiled" in x["way"], "captured": "recorded" in x["way"]}
            run = a_run(Workload(shape=SMALL, rows=1, row_tokens=2048), tokens, **ways)
            yield f"{x['case']} {x['way']}", run, x["tokens_per_second"]
    for x in results("experts-h200"):
        it = x["optimised"]
        tokens = it["tokens_per_second"] * it["seconds_per_update"]
        work = Workload(shape=SMALL, rows=1, row_tokens=1024)
        yield x["pair"], a_run(work, tokens, captured=True, mean_tokens=60), it["tokens_per_second"]
    for x in results("char-gpt-h200", "speed"):
        work = Workload(
            shape=char_gpt_shape(CharGptShape()), rows=1, row_tokens=256, adapter="full"
        )
        compiled = x.get("torch_compile", True)
        run = a_run(
            work, 256 * x["batch"], compiled=compiled, captured=True, packed=False,
            characters=True, mean_tokens=256,
        )  # fmt: skip
        yield f"characters, {x['batch']}, {compiled}", run, 256 * x["samples_per_second"]
    yield from _of_the_ladder()


def _of_the_ladder() -> Iterator[tuple[str, RunShape, float]]:
    settings: dict[str, Any] = {}
    work = Workload(shape=SHAPES["qwen3-0.6b"], rows=1, row_tokens=2048)
    for setting in results("ladder-expert-h200", "rungs"):
        settings |= setting["settings"]
        it = setting["measured"]
        if settings["fp16"] is True or not settings["packing"]:
            continue  # a plan never chooses float16 with eager kernels
        tokens = it["tokens_per_second"] * it["seconds_per_update"]
        run = a_run(
            replace(
                work,
                recomputed_blocks=28 if settings["gradient_checkpointing"] == "full" else 0,
                fused_loss=settings["fused_loss"] is not False,
                attention="eager" if settings["attention"] == "eager" else "flash",
            ),
            tokens,
            micro_batches=it["accumulation"],
            compiled=settings["torch_compile"] is True,
            captured=settings["use_cuda_graphs"] is not False,
        )
        yield f"ladder, {setting['name']}", run, it["tokens_per_second"]


def test_every_recorded_rate_of_the_measured_card_lies_in_its_range_and_near_its_middle():
    found, outside, off = list(measured()), [], []
    assert len(found) > 30
    for name, run, rate in found:
        low, high = gpu_rate(run, peak=peak(), measured_card=True)
        if not low <= rate <= high:
            outside.append(f"{name}: {rate:,.0f} is not in {low:,.0f} to {high:,.0f}")
        # Runs that a plan would choose: with graphs, or compiled with full batches.
        if run.work.captured or (run.work.compiled and run.tokens / run.steps > 10_000):
            off.append(math.sqrt(low * high) / rate - 1)
    assert outside == []
    assert min(off) > -0.22
    assert max(off) < 0.65
    assert median(map(abs, off)) < 0.11


def test_less_work_is_faster_and_what_was_not_measured_has_a_wider_range():
    work = Workload(shape=SHAPES["llama-8b"], rows=1, row_tokens=2048)
    plain = a_run(work, 16_000, compiled=True)
    known = gpu_rate(plain, peak=peak(), measured_card=True)
    for change in (
        {"quantization": "int4"},
        {"adapter": "dora"},
        {"fused_loss": False},
        {"attention": "eager"},
        {"recomputed_blocks": 32},
    ):
        other = replace(plain, work=replace(plain.work, **change))
        assert gpu_rate(other, peak=peak(), measured_card=True)[0] < known[0], change
    padded = gpu_rate(replace(plain, packed=False), peak=peak(), measured_card=True)
    assert padded[0] < known[0]
    there = gpu_rate(plain, peak=peak(), measured_card=False)
    assert there[0] < known[0] < known[1] < there[1]
    run, ladder, other = (measured_range(1000.0, kind) for kind in ("run", "ladder", "other"))
    assert other[0] < ladder[0] < run[0] < 1000 < run[1] < other[1]
    assert ladder[1] > 1000
    # No launches count in a large step: the share of the peak alone.
    small = Workload(shape=SMALL, rows=1, row_tokens=1024)
    large_steps = a_run(small, 1e9, mean_tokens=100, compiled=True)
    ends = gpu_rate(large_steps, peak=(1e15, 1e15), measured_card=True)
    share = 0.16 * 1e15 / flops_per_token(small, 100)
    assert ends == pytest.approx((0.65 * share, 1.20 * share), rel=0.01)


def test_recorded_rates_of_a_cpu_lie_in_its_range():
    from expert.manifest.schema.manifest import BaseModelSpec
    from expert.planning.models.resolve import resolve_model

    tiny = resolve_model(BaseModelSpec(name="tiny"), Path()).shape
    run = a_run(Workload(shape=tiny, rows=1, row_tokens=256, rank=32), 900, mean_tokens=60)
    low, high = cpu_rate(run, 2)
    last = results("ladder-expert-json-cpu", "rungs")[-2]["measured"]["tokens_per_second"]
    at_once = results("cpu-at-once", "at_once")["4"]["tokens_per_second"]
    for rate in (last, *at_once):
        assert low < rate < high
    assert cpu_rate(run, 8)[0] < 4 * low  # more cores help less


def test_a_time_is_the_sum_of_its_parts():
    work = Workload(shape=SMALL, rows=1, row_tokens=1024)
    run = a_run(work, 1000, compiled=True, evaluated_tokens=20_000, unprepared_tokens=3e5)
    parts = expected_parts(run, (500.0, 1000.0), device="cuda")
    assert parts["train"] == (100.0, 200.0)
    assert parts["prepare"] == pytest.approx((0.15, 2.0))
    assert parts["evaluate"] == pytest.approx((6.0, 20.0))
    assert total_range(parts) == pytest.approx(
        [sum(part[n] for part in parts.values()) for n in (0, 1)]
    )
    assert expected_parts(run, (500.0, 1000.0), device="cpu")["compile"] == (0.0, 0.0)
    twice = scaled(parts, 2.0)
    assert twice["train"] == [200.0, 400.0]
    assert twice["start"] == list(parts["start"])


def test_recorded_runs_ended_within_the_expected_time():
    """Whole runs with their start and compile time; later runs of a record used the cache."""
    for sitting in results("training-speed-h200", "runs"):
        first = sitting["results"][0]
        steps = int(sitting["environment"]["command"].split("--steps ")[1].split()[0])
        work = Workload(shape=SHAPES[first["shape"]], rows=1, row_tokens=2048)
        tokens = first["tokens_per_update"]
        run = a_run(work, tokens, tokens=steps * tokens, steps=steps, compiled=True)
        rate = gpu_rate(run, peak=peak(), measured_card=True)
        low, high = total_range(expected_parts(run, rate, device="cuda"))
        assert low < first["seconds"] < high, first["case"]


@each(
    ("low", "high", "words"),
    [
        (720, 1200, "12 to 20 min"),
        (20.4, 44.9, "20 to 45 s"),
        (40, 130, "40 s to 2 min"),
        (3500, 9000, "58 min to 2 h 30 min"),
        (7200 * 2, 7200 * 4, "4 h to 8 h"),
        (100, 100.4, "about 2 min"),
        (0.2, 0.4, "below 1 s"),
        (90_000, 300_000, "25 h to 83 h 20 min"),
    ],
)
def test_a_range_of_time_in_words(low, high, words):
    assert duration_range(low, high) == words
