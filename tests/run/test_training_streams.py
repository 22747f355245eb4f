"""Runs that read their rows while they train, and runs that wait for their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.core.errors import ManifestError
from expert.data.records import DataError
from tests.jobs.runs import (
    EVERY_STEP,
    ROWS,
    copied,
    events_of,
    losses_of,
    plan_of,
    run,
    saved_steps,
    weights_of,
    write_expert,
)
from tests.parallel.test_worlds import numbers_of

SETTINGS = EVERY_STEP | {"epochs": 2, "dropout": 0.2, "micro_batch_size": 2}
SETTINGS |= {"dataloader_num_workers": 0}
STREAM = {"streaming": True, "validation_path": "valid.jsonl"}


def write_stream(folder: Path, base: Path, settings) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "valid.jsonl").write_text("\n".join(map(json.dumps, ROWS[:9])), encoding="utf-8")
    return write_expert(folder, base, SETTINGS | settings, dataset=STREAM)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, base) -> tuple[Path, Path]:
    manifest = write_stream(tmp_path_factory.mktemp("streamed"), base, {})
    return manifest, run(manifest).folder


def test_a_stream_trains_to_the_end_of_its_rows(streamed):
    _, folder = streamed
    losses = numbers_of(folder)
    assert losses[-1] < losses[0]
    last = len(losses)
    assert saved_steps(folder) == list(range(1, last + 1))
    # Nobody knew beforehand where an epoch ends.
    ends = [(event["epoch"], event["step"]) for event in events_of(folder, "epoch")]
    assert ends == [(1, last // 2), (2, last)]
    assert [event["step"] for event in events_of(folder, "eval")] == [last // 2, last]
    assert [event["event"] for event in events_of(folder)][-1] == "finished"
    # Without an end the rate stays, and the plan says so.
    rates = {event["rate"] for event in events_of(folder, "step")}
    assert rates == {SETTINGS.get("learning_rate", 1e-2)}
    decisions = {each["path"]: each for each in plan_of(folder)["decisions"]}
    assert decisions["optim.scheduler"]["value"] == "constant"
    assert "max_steps" in decisions["optim.scheduler"]["because"]


def test_a_schedule_of_a_stream_needs_max_steps(base, tmp_path):
    with pytest.raises(ManifestError, match=r"lr_scheduler: needs .*\(set .*max_steps\)"):
        run(write_stream(tmp_path / "none", base, {"lr_scheduler": "cosine"}))
    settings = {"lr_scheduler": "cosine", "max_steps": 3, "warmup_steps": 0}
    done = run(write_stream(tmp_path / "three", base, settings))
    assert done.steps == 3
    rates = [event["rate"] for event in events_of(done.folder, "step")]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-2


@pytest.mark.parametrize("epochs", [0.5, 1.5])
def test_a_part_of_an_epoch_of_a_stream_is_refused_before_anything_is_read(base, tmp_path, epochs):
    words = f"epochs: {epochs}, but the length of an epoch of a stream is .*\\(use a whole number"
    with pytest.raises(ManifestError, match=words):
        run(write_stream(tmp_path, base, {"epochs": epochs}))
    assert not (tmp_path / "runs").exists()


def test_a_stream_is_resumed_where_it_stopped(streamed, tmp_path):
    manifest, folder = streamed
    last = max(losses_of(folder))
    for step in (last // 2, last // 2 + 1):
        copy = copied(folder, tmp_path / str(step))
        done = run(manifest, resume=str(copy / "checkpoints" / f"step-{step:06d}"))
        assert losses_of(copy) == {n: loss for n, loss in losses_of(folder).items() if n > step}
        assert weights_of(done.folder) == weights_of(folder)


def test_a_column_that_comes_after_the_first_window_of_a_stream_makes_bad_rows(
    base, tmp_path, monkeypatch
):
    """Streams are looked at through their first window; nothing that comes later is left out in
    silence."""
    monkeypatch.setattr("expert.data.pipeline.STREAM_WINDOW_ROWS", len(ROWS) - 3)
    manifest = write_stream(tmp_path, base, {})
    late = [{**row, "context": "what it is about"} for row in ROWS[-2:]]
    write = "".join(json.dumps(row) + "\n" for row in [*ROWS[:-2], *late])
    (tmp_path / "train.jsonl").write_text(write, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        run(manifest)
    assert "column 'context' first appears here" in str(caught.value)
