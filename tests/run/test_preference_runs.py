"""Runs on preferred and rejected answers: reference, resuming, several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from expert.model.errors import ModelError
from expert.run.open import open_run
from expert.training.checkpoint import CheckpointError
from tests.jobs.runs import (
    WORDS,
    copied,
    events_of,
    losses_of,
    plan_of,
    run,
    weights_of,
    write_expert,
)

PAIRS = [
    {"prompt": f"say {word} {n}", "chosen": f"{word} {'and ' * (n % 3)}{n}", "rejected": f"{n} no"}
    for n in range(6)
    for word in WORDS
]
SETTINGS = {
    "method": "dpo",
    "epochs": 2,
    "save_steps": 2,
    "save_total_limit": None,
    "eval_steps": 3,
    "learning_rate": 3e-3,
}


def expert(folder: Path, base: Path, **config: object) -> Path:
    return write_expert(folder, base, {**SETTINGS, **config}, rows=PAIRS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base):
    manifest = expert(tmp_path_factory.mktemp("pairs"), base)
    return manifest, run(manifest).folder


def test_a_run_starts_at_ln_2_and_learns_what_is_preferred(whole):
    _, folder = whole
    first, *_, last = events_of(folder, "step")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)  # float32
    assert (first["rewards/margins"], first["rewards/accuracies"]) == (0.0, 0.0)
    assert last["loss"] < 0.5
    assert last["rewards/accuracies"] > 0.9
    assert last["rewards/chosen"] > last["rewards/rejected"]
    evaluated = events_of(folder, "eval")[-1]
    assert evaluated["rewards/margins"] > 0
    assert {"perplexity", "token_accuracy"}.isdisjoint(evaluated)
    assert [event["how"] for event in events_of(folder, "reference")] == ["measured"]


def test_the_next_run_reads_the_reference_and_is_the_same(whole):
    manifest, folder = whole
    again = run(manifest).folder
    assert [event["how"] for event in events_of(again, "reference")] == ["read"]
    assert losses_of(again) == losses_of(folder)
    assert weights_of(again) == weights_of(folder)


@pytest.mark.parametrize("stored", [True, False])
def test_a_resumed_run_is_the_same_with_and_without_the_stored_reference(whole, tmp_path, stored):
    manifest, folder = whole
    copy = copied(folder, tmp_path / "copy")
    files = list((manifest.parent / "datasets_optimized").rglob("reference-*.npy"))
    assert len(files) == 2  # training and validation rows
    if not stored:
        for file in files:
            file.unlink()
    checkpoint = str(copy / "checkpoints" / "step-000004")
    with pytest.raises(CheckpointError, match=r"objective\.beta: was 0\.1, is 0\.5"):
        run(manifest, resume=checkpoint, overrides=("training.config.beta=0.5",))
    run(manifest, resume=checkpoint)
    how = "read" if stored else "measured"
    assert [event["how"] for event in events_of(copy, "reference")] == [how]
    later = {step: loss for step, loss in losses_of(folder).items() if step > 4}
    assert losses_of(copy) == later
    assert weights_of(copy) == weights_of(folder)


@pytest.mark.parametrize("method", ["ipo", "apo_zero", "simpo", "orpo", "cpo"])
def test_every_method_trains(method, tmp_path, base):
    folder = run(expert(tmp_path, base, method=method, max_steps=4)).folder
    first, *_, last = events_of(folder, "step")
    assert last["loss"] < first["loss"]
    needs = plan_of(folder)["objective"]["loss"] in ("ipo", "apo_zero")
    assert bool(events_of(folder, "reference")) == needs


def test_kto_trains_on_single_answers_and_resumes_as_it_was(tmp_path, base):
    rows = [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for number, pair in enumerate(PAIRS)
        for kind in (["chosen"] if number % 3 else ["rejected"])
    ]
    config = {**SETTINGS, "method": "kto", "eval_steps": 2}
    manifest = write_expert(tmp_path / "one", base, config, rows=rows)
    folder = run(manifest).folder
    first, *_, last = events_of(folder, "step")
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)  # nothing is gained yet
    assert last["loss"] < 0.45
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert last["kl"] >= 0
    assert not [name for name in last if name.endswith(" of")]
    copy = copied(folder, tmp_path / "copy")
    run(manifest, resume=str(copy / "checkpoints" / "step-000004"))
    assert weights_of(copy) == weights_of(folder)


def test_the_size_of_a_micro_batch_does_not_change_the_divergence_of_kto(tmp_path, base):
    runs = [
        run(expert(tmp_path / str(size), base, method="kto", max_steps=4, micro_batch_size=size))
        for size in (1, 4)
    ]
    for ours, theirs in zip(*(events_of(each.folder, "step") for each in runs), strict=True):
        assert ours["kl"] == pytest.approx(theirs["kl"], abs=1e-4)  # float32
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_pairs_without_room_are_dropped_and_counted(tmp_path, base):
    long = {"prompt": "say it", "chosen": "yes " * 60, "rejected": "no"}
    manifest = write_expert(tmp_path, base, {**SETTINGS, "max_steps": 1}, rows=[*PAIRS, long])
    opened = open_run(manifest)
    assert opened.data.train.index.overlong.dropped == 1
    assert any("1 of 44 pairs" in text and "longer than" in text for text in opened.warnings)


def from_run(folder: Path) -> dict[str, tuple[str, ...]]:
    """Paths outside the folder of a manifest come from the command line alone."""
    return {"overrides": (f"training.config.start_from={folder}",)}


def test_a_trained_adapter_is_where_preferences_start_and_what_they_are_compared_with(
    whole, tmp_path, base
):
    _, folder = whole
    started = run(expert(tmp_path, base, max_steps=3), **from_run(folder)).folder
    first = events_of(started, "step")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert (first["rewards/margins"], first["rewards/accuracies"]) == (0.0, 0.0)
    # The same rows: what the finished run had learnt is there from the start.
    assert first["logps/rejected"] < events_of(folder, "step")[0]["logps/rejected"] - 5


def test_an_adapter_of_another_shape_is_refused(whole, tmp_path, base):
    _, folder = whole
    with pytest.raises(ModelError, match=r"start_from.*are not those of this adapter.*rank"):
        run(expert(tmp_path, base, rank=2), **from_run(folder))
