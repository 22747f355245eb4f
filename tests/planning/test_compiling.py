"""Blocks are compiled if the whole run ends sooner, compile time included."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from expert.core.hashed import write_hashed
from expert.planning.choose.rates import COLD_COMPILE, pass_seconds
from expert.planning.compilations import (
    Compilation,
    compilations_file,
    expected_compile,
    remember_compilation,
)
from expert.planning.machine.cards import find_card
from expert.planning.measurements import measurements_file, read_records, remember_rate
from expert.planning.memory.calibration import workload_of
from expert.planning.memory.workload import Workload
from tests.each import each
from tests.planning.planning import decision, gpu, long_run, machine, rate, shape_of

H200 = machine(gpu("NVIDIA H200", 139.8, (9, 0)))


def made(steps: int, model: str = "Qwen3-0.6B", card: str | None = "h200", **options):
    return long_run(card, model, options=options, max_steps=steps)


@each(
    ("model", "tokens", "eager", "compiled"),
    [
        ("Qwen3-0.6B", 32_000, 57_576, 124_377),
        ("Llama-3.2-1B", 32_000, 65_388, 86_840),
        ("Llama-3.1-8B", 16_000, 13_885, 17_142),
    ],
)
def test_the_table_has_the_rates_that_were_measured_side_by_side(model, tokens, eager, compiled):
    """Within 7 %: the fixed time of a block, measured elsewhere, is added on top."""
    peak = 1e12 * find_card("h200").bf16_tflops
    for reached, path in ((eager, False), (compiled, True)):
        work = Workload(shape=shape_of(model), rows=16, row_tokens=2048, compiled=path)
        found = pass_seconds(work, tokens=tokens, mean_tokens=480, peak=peak)
        assert tokens / found.seconds == pytest.approx(reached, rel=0.07)


def test_runs_are_compiled_from_where_it_saves_more_than_it_takes():
    """Each step saves 0.3 s: 30 s of compiling are recovered after about a hundred."""
    short, long = made(60), made(400)
    assert (short.kernels.compile, long.kernels.compile) == (False, True)
    assert (
        decision(long, "kernels.compile")[1]
        == "about 136 s compiled, 30 s of it compiling, and 226 s uncompiled"
    )
    turns = [steps for steps in range(60, 200, 10) if made(steps).kernels.compile]
    assert 90 <= turns[0] <= 130
    large = [made(steps, "Llama-3.1-8B").kernels.compile for steps in (60, 400)]
    assert large == [False, True]


def remembered(tmp_path, work: Workload, *, warm: bool, seconds: float, cache: str) -> None:
    file = compilations_file({"EXPERT_HOME": str(tmp_path)})
    remember_compilation(file, work, "h200", seconds=seconds, warm=warm)
    records = json.loads(file.read_text(encoding="utf-8"))
    records[-1]["cache"] = cache
    write_hashed(file, json.dumps(records))


def here(tmp_path, steps: int):
    return made(steps, card=None, machine=H200, environ={"EXPERT_HOME": str(tmp_path)})


def test_the_compile_cache_of_torch_makes_compiling_pay_in_shorter_runs(tmp_path):
    before = here(tmp_path, 60)
    assert not before.kernels.compile
    work = workload_of(here(tmp_path, 400))
    remembered(tmp_path, work, warm=False, seconds=29.0, cache=str(tmp_path))
    after = here(tmp_path, 60)
    assert after.kernels.compile
    assert " s of it compiling from torch's cache" in decision(after, "kernels.compile")[1]
    parts, cold = after.length.expected_parts, here(tmp_path / "new", 400).length.expected_parts
    assert parts["compile"][1] < cold["compile"][1]


def test_without_cache_or_on_a_slow_host_short_runs_are_not_compiled(tmp_path):
    work = workload_of(here(tmp_path, 400))
    remembered(tmp_path, work, warm=False, seconds=29.0, cache=str(tmp_path / "gone"))
    assert not here(tmp_path, 60).kernels.compile
    remembered(tmp_path, work, warm=False, seconds=200.0, cache=str(tmp_path / "gone"))
    assert not here(tmp_path, 400).kernels.compile
    assert made(400).kernels.compile  # a card that is elsewhere has another host


def test_records_are_of_one_card_model_step_and_version(tmp_path):
    work = workload_of(made(400))
    file = compilations_file({"EXPERT_HOME": str(tmp_path)})
    remembered(tmp_path, work, warm=False, seconds=25.0, cache=str(tmp_path))
    remembered(tmp_path, work, warm=True, seconds=3.0, cache=str(tmp_path))
    remembered(tmp_path, work, warm=True, seconds=2.5, cache=str(tmp_path))
    known = read_records(file, Compilation)
    assert [each.seconds for each in known] == [25.0, 2.5]

    def expected(of: Workload, card: str = "h200", records=known) -> float:
        return expected_compile(records, of, card).seconds

    assert expected(work) == 2.5
    assert expected(replace(work, rows=work.rows + 1)) == 25.0
    assert expected(work, "h100") == expected(replace(work, rank=8)) == COLD_COMPILE
    other = [each.model_copy(update={"versions": {"torch": "1.0"}}) for each in known]
    assert expected(work, records=other) == COLD_COMPILE
    file.write_text("damaged", encoding="utf-8")
    assert read_records(file, Compilation) == []


@pytest.mark.parametrize(("reached", "compiles"), [(20_000, True), (1_000_000, False)])
def test_the_rate_of_an_earlier_run_goes_before_the_table(tmp_path, reached, compiles):
    """The rate of the unmeasured path is scaled by the table."""
    file = measurements_file({"EXPERT_HOME": str(tmp_path)})
    found = rate(
        card="h200",
        tokens_per_second=reached,
        settings={"kernels.compile": False, "batch.examples_per_update": 67},
        row_tokens=480.0,
    )
    remember_rate(file, found)
    steps = 60 if compiles else 400
    assert made(steps).kernels.compile is not compiles
    assert made(steps, environ={"EXPERT_HOME": str(tmp_path)}).kernels.compile is compiles
