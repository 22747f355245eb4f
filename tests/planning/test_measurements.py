"""Benchmarks are stored for later plans, and used where the manifest says auto."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from expert.planning.measurements import MeasuredRate, forget_rates, read_rates, remember_rate
from tests.each import each
from tests.planning.planning import decision, plan
from tests.planning.planning import own_blocks as manifest

WON = {
    "kernels.compile": False,
    "kernels.attention": "sdpa",
    "batch.micro_batch": 1,
    "optim.optimizer": "adamw_torch",
}
WORDS = "fastest in the benchmark of 2026-01-02"


def rate(**changes: Any) -> MeasuredRate:
    """The record of a benchmark with winning settings."""
    facts: dict[str, Any] = {
        "card": "rtx-4090",
        "model": "qwen3-0.6b",
        "adapter": "lora",
        "quantization": "none",
        "tokens_per_second": 1000.0,
        "measured_on": "2026-01-02",
        "command": "expert benchmark",
        "max_seq_length": 2048,
        "packing": "best-fit",
        "parameters": 596_049_920,
        "settings": WON,
        "gains": {"kernels.attention": 1.25},
    }
    return MeasuredRate(**{**facts, **changes})


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
        {"settings": {"kernels.attention": "rocket"}},
        {"settings": {"kernels.compile": "perhaps"}},
        {"tokens_per_second": float("nan")},
    ],
)
def test_a_record_that_somebody_damaged_breaks_no_plan(tmp_path, changed):
    home = tmp_path / "measurements.json"
    home.write_text(json.dumps([rate().model_dump(mode="json") | changed]), encoding="utf-8")
    assert read_rates(home) == []
    assert planned(home) == planned(tmp_path / "none" / home.name)
    home.write_text('[{"card": "half', encoding="utf-8")
    remember_rate(home, rate())
    assert len(read_rates(home)) == 1


def test_a_new_record_takes_the_place_of_an_older_one_of_the_same_shape_only(home):
    for one in (rate(), rate(max_seq_length=512), rate(card="h200")):
        remember_rate(home, one)
    remember_rate(home, rate(tokens_per_second=2000.0, settings={"kernels.compile": True}))
    found = read_rates(home)
    assert [(each.card, each.max_seq_length) for each in found] == [
        ("rtx-4090", 512),
        ("h200", 2048),
        ("rtx-4090", 2048),
    ]
    assert found[-1].tokens_per_second == 2000.0
    assert found[-1].settings == {**WON, "kernels.compile": True}  # what was not tried is kept


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
    assert sorted(each.max_seq_length for each in read_rates(home)) == list(range(1, 41))


def test_a_later_plan_takes_what_won_and_says_so(home):
    remember_rate(home, rate())
    made = planned(home)
    because = f"{WORDS}, 1.25x as fast as without"
    assert decision(made, "kernels.attention") == ("sdpa", because, "measurement")
    assert decision(made, "kernels.compile") == (False, WORDS, "measurement")
    assert decision(made, "optim.optimizer") == ("adamw_torch", WORDS, "measurement")
    # Winning checkpointing is used although less would fit, and losing fused blocks are not.
    remember_rate(home, rate(settings={"kernels.checkpointing": "full"}))
    assert decision(planned(home), "kernels.checkpointing") == ("full", WORDS, "measurement")
    remember_rate(home, rate(settings={**WON, "kernels.fused_blocks": False}))
    lost = planned(home, {"fused_blocks": "auto"})
    assert decision(lost, "kernels.fused_blocks")[::2] == (False, "measurement")
    assert planned(home, {"fused_blocks": True}).kernels.fused_blocks


def test_the_micro_batch_that_won_is_taken_where_more_would_fit(home, tmp_path):
    rows = "\n".join(json.dumps({"text": "word " * 300}) for _ in range(64))
    (tmp_path / "train.jsonl").write_text(rows, encoding="utf-8")
    assert planned(home, folder=tmp_path).batch.micro_batch > 1
    remember_rate(home, rate())
    value, because, source = decision(planned(home, folder=tmp_path), "batch.micro_batch")
    assert (value, source) == (1, "measurement")
    assert WORDS in because


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
    assert decision(planned(home, folder=tmp_path), "kernels.compile")[::2] == (False, "machine")
    long = planned(home, {"epochs": 100_000}, folder=tmp_path)
    assert decision(long, "kernels.compile")[::2] == (True, "measurement")


@each(
    ("config", "changes"),
    [
        ({}, {"card": "h200"}),
        ({}, {"model": "qwen3-1.7b"}),
        ({}, {"adapter": "dora"}),
        ({}, {"max_seq_length": 512}),
        ({}, {"parameters": 5}),
        ({"packing": False}, {}),
    ],
    ids=str,
)
def test_a_benchmark_of_something_else_settles_nothing(home, config, changes):
    remember_rate(home, rate(**changes))
    sources = {each.source for each in planned(home, config).decisions}
    assert "measurement" not in sources
