"""Measurements are stored for later plans, and used where the manifest says auto."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expert.core.hashed import hash_file
from expert.planning.decisions import Decision
from expert.planning.measurements import (
    MeasuredRate,
    forget_rates,
    read_rates,
    remember_rate,
    speed_settings,
)
from tests.data.damaging import damage
from tests.each import each
from tests.planning.planning import decision, plan
from tests.planning.planning import own_blocks as manifest
from tests.planning.planning import rate as measured

WON = {
    "kernels.compile": False,
    "kernels.attention": "sdpa",
    "batch.micro_batch": 1,
    "optim.optimizer": "adamw_torch",
}


def rate(**changes: Any) -> MeasuredRate:
    """The record of a benchmark with winning settings."""
    return measured(**{"settings": WON, "gains": {"kernels.attention": 1.25}, **changes})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home" / "measurements.json"


def planned(home: Path, config: dict[str, Any] | None = None, **options: Any) -> Any:
    data = manifest({"epochs": 50, **(config or {})})
    return plan(data, environ={"EXPERT_HOME": str(home.parent)}, **options)


@each(
    "changed",
    [
        {"settings": {"batch.micro_batch": 0}},
        {"settings": {"batch.micro_batch": "many"}},
        {"settings": {"kernels.attention": "rocket"}},
        {"settings": {"kernels.compile": "perhaps"}},
        {"settings": {"optim.optimizer": None}},
        {"tokens_per_second": 0.0},
        {"tokens_per_second": float("nan")},
    ],
)
def test_a_record_that_somebody_damaged_breaks_no_plan(tmp_path, changed):
    home = tmp_path / "measurements.json"
    home.write_text(json.dumps([rate().model_dump(mode="json") | changed]), encoding="utf-8")
    assert read_rates(home) == []
    assert planned(home) == planned(tmp_path / "none" / home.name)


def test_a_flipped_bit_in_what_was_measured_is_not_planned_by_and_is_a_warning(home):
    remember_rate(home, rate())
    without = planned(home.parent / "none" / home.name)
    assert planned(home).kernels != without.kernels
    for seed in range(8):
        whole = home.read_bytes()
        damage(home, "bit", random.Random(seed))
        found = planned(home)
        assert found.model_copy(update={"remarks": without.remarks}) == without, seed
        assert any(str(home) in remark.text for remark in found.remarks), seed
        home.write_bytes(whole)
    damage(home, "bit", random.Random(1))
    remember_rate(home, rate())
    assert read_rates(home) == [rate()]
    assert len(list(home.parent.glob("measurements.json.damaged-*"))) == 1


def test_a_new_record_takes_the_place_of_an_older_one_of_the_same_shape_only(home):
    for one in (rate(), rate(max_seq_length=512), rate(card="h200")):
        remember_rate(home, one)
    remember_rate(home, rate(tokens_per_second=2000.0))
    found = read_rates(home)
    assert len(found) == 3
    assert found[-1].tokens_per_second == 2000.0
    assert {(each.card, each.max_seq_length) for each in found} == {
        ("rtx-4090", 2048),
        ("rtx-4090", 512),
        ("h200", 2048),
    }


def test_records_of_another_version_are_kept_to_the_letter_and_a_damaged_file_aside(home):
    home.parent.mkdir()
    home.write_text('[{"card": "half', encoding="utf-8")
    remember_rate(home, rate())
    assert len(read_rates(home)) == 1
    [aside] = home.parent.glob("measurements.json.damaged-*")
    assert aside.read_text(encoding="utf-8") == '[{"card": "half'
    strange = [{"from": "the future", "x": [1, 2.5]}, 7]
    hash_file(home).unlink()
    home.write_text(json.dumps(strange), encoding="utf-8")
    remember_rate(home, rate())
    kept = json.loads(home.read_text(encoding="utf-8"))
    assert (kept[:2], len(kept)) == (strange, 3)
    assert [each.card for each in read_rates(home)] == ["rtx-4090"]
    assert forget_rates(home) == 1
    assert json.loads(home.read_text(encoding="utf-8")) == strange
    of_before = ("settings", "gains", "max_seq_length", "packing", "parameters")
    old = {key: value for key, value in rate().model_dump().items() if key not in of_before}
    hash_file(home).unlink()
    home.write_text(json.dumps([old]), encoding="utf-8")
    assert read_rates(home)[0].tokens_per_second == 1000.0
    assert decision(planned(home), "kernels.attention")[2] == "machine"


def test_what_was_measured_is_forgotten_of_one_model_or_of_all(home):
    assert forget_rates(home) == 0
    for one in (rate(), rate(max_seq_length=512), rate(model="tiny")):
        remember_rate(home, one)
    assert forget_rates(home, "qwen3-0.6b") == 2
    assert [each.model for each in read_rates(home)] == ["tiny"]
    assert forget_rates(home) == 1
    assert not home.exists()


def test_many_writers_at_once_lose_nothing(home):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: remember_rate(home, rate(max_seq_length=n)), range(1, 41)))
    assert sorted(each.max_seq_length or 0 for each in read_rates(home)) == list(range(1, 41))


def test_a_later_plan_takes_what_won_and_says_so(home):
    remember_rate(home, rate())
    made = planned(home)
    words = "fastest in the benchmark of 2026-01-02"
    assert decision(made, "kernels.attention") == (
        "sdpa",
        f"{words}, 1.25x as fast as without",
        "measurement",
    )
    assert decision(made, "kernels.compile") == (False, words, "measurement")
    assert decision(made, "optim.optimizer") == ("adamw_torch", words, "measurement")
    # Winning checkpointing is used although less would fit, and losing fused blocks are not.
    remember_rate(home, rate(settings={"kernels.checkpointing": "full"}))
    assert decision(planned(home), "kernels.checkpointing") == ("full", words, "measurement")
    remember_rate(home, rate(settings={**WON, "kernels.fused_blocks": False}))
    lost = planned(home, {"fused_blocks": "auto"})
    assert decision(lost, "kernels.fused_blocks")[::2] == (False, "measurement")
    assert planned(home, {"fused_blocks": True}).kernels.fused_blocks


def test_the_micro_batch_that_won_are_taken_where_more_would_fit(home, tmp_path):
    rows = "\n".join(json.dumps({"text": "word " * 300}) for _ in range(64))
    (tmp_path / "train.jsonl").write_text(rows, encoding="utf-8")
    before = planned(home, folder=tmp_path)
    assert before.batch.micro_batch > 1
    remember_rate(home, rate())
    value, because, source = decision(planned(home, folder=tmp_path), "batch.micro_batch")
    assert (value, source) == (1, "measurement")
    assert because == "a micro-batch of 1 was fastest in the benchmark of 2026-01-02"


def test_what_the_manifest_says_is_not_overruled(home):
    remember_rate(home, rate())
    config = {
        "attention": "flash",
        "torch_compile": True,
        "optim": "adamw_torch_fused",
        "micro_batch_size": 2,
    }
    made = planned(home, config)
    for path in ("kernels.attention", "kernels.compile", "optim.optimizer", "batch.micro_batch"):
        assert decision(made, path)[2] == "manifest", path


def test_a_short_run_is_not_compiled_although_compiling_won(home, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a few words"}\n' * 40, encoding="utf-8")
    remember_rate(home, rate(settings={"kernels.compile": True}))
    value, because, source = decision(planned(home, folder=tmp_path), "kernels.compile")
    assert (value, source) == (False, "machine")
    assert " s of it compiling" in because
    long = planned(home, {"epochs": 100_000}, folder=tmp_path)
    assert decision(long, "kernels.compile")[0] is True
    assert decision(long, "kernels.compile")[2] == "measurement"


def timed(home: Path, folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A plan for short rows with the record of a benchmark."""
    (folder / "train.jsonl").write_text('{"text": "abc"}\n' * 1000, encoding="utf-8")
    changes = {"settings": {"kernels.attention": "sdpa"}, **changes}
    remember_rate(home, rate(measured_on="2026-01-01", **changes))
    return planned(home, config, folder=folder)


def test_a_measured_rate_gives_a_narrow_time_with_start_and_evaluation(home, tmp_path):
    made = timed(home, tmp_path)
    because = "1,000 tokens/s measured on 2026-01-01"
    seconds = pytest.approx(50 * made.length.tokens_per_epoch / 1000)
    assert decision(made, "length.seconds") == (seconds, because, "measurement")
    assert made.length.tokens_per_second == 1000.0
    (low, high), because, source = decision(made, "length.expected_seconds")
    assert (because, source) == (
        "1,000 tokens/s measured on 2026-01-01 in a run like this one",
        "measurement",
    )
    parts = made.length.expected_parts
    assert low == pytest.approx(sum(part[0] for part in parts.values()))
    assert parts["train"][0] < made.length.seconds < parts["train"][1]
    assert parts["evaluate"][0] > 0
    other = decision(timed(home, tmp_path, {"attention": "eager"}), "length.expected_seconds")
    assert other[1] == (
        "estimated: 1,000 tokens/s measured on 2026-01-01 for this model on rtx-4090 "
        "with other settings"
    )
    assert other[0][1] / other[0][0] > high / low


@each(
    ("config", "changes"),
    [
        ({}, {"card": "h200"}),
        ({}, {"model": "qwen3-1.7b"}),
        ({}, {"adapter": "dora"}),
        ({}, {"max_seq_length": 512}),
        ({}, {"packing": "none"}),
        ({}, {"parameters": 5}),
        ({}, {"max_seq_length": None, "packing": None, "settings": {}}),  # of older versions
        ({"packing": False}, {}),
        ({"attention": "eager"}, {}),  # another kernel than was measured
    ],
    ids=str,
)
def test_a_benchmark_of_something_else_settles_nothing_and_gives_no_time(tmp_path, config, changes):
    made = timed(tmp_path / "home" / "measurements.json", tmp_path, config, **changes)
    assert (made.length.seconds, made.length.tokens_per_second) == (None, None)
    sources = {each.source for each in made.decisions if each.path.startswith("kernels.")}
    assert "measurement" not in sources


# ---- rates of runs


ROWS = "\n".join(json.dumps({"text": "word " * 300}) for _ in range(64))


def a_run(made: Any, **changes: Any) -> MeasuredRate:
    """The record of a run by this plan, with rows as long as planned."""
    tokens = made.length.tokens_per_epoch / made.length.rows
    settings = speed_settings({each.path: each for each in made.decisions}, cores=None)
    return rate(**{"settings": settings, "gains": {}, "row_tokens": tokens, **changes})


def test_a_run_tells_its_rate_to_the_plans_of_runs_like_it_and_settles_nothing(home, tmp_path):
    (tmp_path / "train.jsonl").write_text(ROWS, encoding="utf-8")
    before = planned(home, folder=tmp_path)
    assert before.length.seconds is None
    remember_rate(home, a_run(before))
    made = planned(home, folder=tmp_path)
    told = "measured on 2026-01-02 in a run like this one"
    assert decision(made, "length.tokens_per_second") == (1000.0, told, "measurement")
    tokens = made.length.tokens_per_epoch * made.length.epochs
    assert made.length.seconds == pytest.approx(tokens / 1000, rel=0.01)  # steps are whole
    assert made.kernels == before.kernels
    changed = [each.path for each in made.decisions if each not in before.decisions]
    other = [path for path in changed if path != "kernels.compile"]  # its reason contains seconds
    times = ["expected_seconds", "expected_parts"]
    assert other == [f"length.{key}" for key in ("tokens_per_second", "seconds", *times)]


def test_a_run_that_is_set_otherwise_has_no_time(home, tmp_path):
    (tmp_path / "train.jsonl").write_text(ROWS, encoding="utf-8")
    remember_rate(home, a_run(planned(home, folder=tmp_path)))
    assert planned(home, folder=tmp_path).length.seconds is not None
    for config in (
        {"batch_size": 4},
        {"micro_batch_size": 1},
        {"gradient_checkpointing": "full"},
        {"attention": "eager"},
        {"optim": "sgd"},
        {"lora_r": 64},
        {"deterministic": True},
        {"max_seq_length": 512},
    ):
        assert planned(home, config, folder=tmp_path).length.seconds is None, config
    padded = {"packing": False, "dataloader_num_workers": 2}
    made = planned(home, padded, folder=tmp_path)
    remember_rate(home, a_run(made, packing=made.data.packing))
    assert planned(home, padded, folder=tmp_path).length.seconds is not None
    assert planned(home, {**padded, "tokenize": "late"}, folder=tmp_path).length.seconds is None


def test_the_rate_of_a_run_holds_for_rows_about_as_long(home, tmp_path):
    (tmp_path / "train.jsonl").write_text(ROWS, encoding="utf-8")
    found = a_run(planned(home, folder=tmp_path))
    for longer, known in ((1.4, False), (0.7, False), (1.2, True)):
        remember_rate(home, found.model_copy(update={"row_tokens": found.row_tokens * longer}))
        assert (planned(home, folder=tmp_path).length.seconds is not None) is known


def test_runs_and_benchmarks_take_only_the_place_of_their_like(home, tmp_path):
    (tmp_path / "train.jsonl").write_text(ROWS, encoding="utf-8")
    run = a_run(planned(home, folder=tmp_path), settings={"optim.optimizer": "sgd"}, row_tokens=100)
    remember_rate(home, rate())
    for one in (run, run.model_copy(update={"row_tokens": 200.0})):
        remember_rate(home, one)
    remember_rate(home, run.model_copy(update={"tokens_per_second": 3.0}))
    remember_rate(home, rate(tokens_per_second=2.0))
    assert [each.tokens_per_second for each in read_rates(home)] == [1000.0, 3.0, 2.0]
    assert read_rates(home)[-1].settings == WON


def test_a_rate_on_a_cpu_holds_for_as_many_cores_and_threads():
    decisions = {"batch.micro_batch": Decision(path="", value=4, because="", source="machine")}
    told = [
        speed_settings(decisions, cores=cores, environ=environ)
        for cores, environ in ((2, {}), (4, {}), (2, {"OMP_NUM_THREADS": "1"}), (None, {}))
    ]
    assert len({json.dumps(each) for each in told}) == 4
