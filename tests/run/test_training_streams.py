"""Runs that read their rows while they train, and runs that wait for their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.core.errors import ManifestError
from expert.data.records import DataError
from expert.training.pressure import DataWait
from tests.jobs.runs import (
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

SETTINGS = {
    "epochs": 2,
    "save_steps": 1,
    "save_total_limit": None,
    "dropout": 0.2,
    "micro_batch_size": 2,
    "dataloader_num_workers": 0,
}
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
    losses = [float.fromhex(loss) for loss in losses_of(folder).values()]
    assert losses[-1] < losses[0]
    last = len(losses)
    assert saved_steps(folder) == list(range(1, last + 1))
    # Nobody knew beforehand where an epoch ends.
    assert [(e["epoch"], e["step"]) for e in events_of(folder, "epoch")] == [
        (1, last // 2),
        (2, last),
    ]
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


def waiting(monkeypatch, shares) -> None:
    """The device seems to wait for these shares of its windows, each of four steps."""
    add = DataWait.add
    told = iter([share for share in shares for _ in range(4)])

    def added(self, wall, waited):
        if self._settling:
            return add(self, wall, waited)
        return add(self, 15.0, 15.0 * next(told, 0.0))

    monkeypatch.setattr(DataWait, "add", added)


def test_a_device_that_waits_for_data_gets_more_workers_then_fewer(base, tmp_path, monkeypatch):
    """A share that grew with more workers means that they are in each other's way."""
    waiting(monkeypatch, [0.1, 0.5, 0.7, 0.9])
    settings = {"packing": False, "epochs": 5, "save_steps": 100, "dataloader_num_workers": 1}
    settings |= {"micro_batch_size": 8}
    manifest = write_expert(tmp_path, base, SETTINGS | settings)
    plain = write_expert(tmp_path / "plain", base, SETTINGS | settings)
    done = run(manifest)
    told = [
        (event["failure"], event["step"], event["changes"][0]["value"])
        for event in events_of(done.folder, "fell_back")
    ]
    # Three steps settle, then windows of four: quiet, too much, and after three more worse.
    assert told == [("DataBound", 11, 2), ("DataBound", 18, 1)]
    assert "50% of the time" in events_of(done.folder, "fell_back")[0]["reason"]
    assert plan_of(done.folder)["loader"]["workers"] == 1
    monkeypatch.undo()
    assert losses_of(done.folder) == losses_of(run(plain).folder)  # only the feed was made again


def test_a_thread_that_feeds_too_slowly_is_reported_once(base, tmp_path, monkeypatch):
    waiting(monkeypatch, [0.5, 0.6])
    done = run(
        write_expert(
            tmp_path, base, SETTINGS | {"epochs": 4, "save_steps": 24, "micro_batch_size": 4}
        )
    )
    assert events_of(done.folder, "fell_back") == []
    told = [event["text"] for event in events_of(done.folder, "warning")]
    assert (
        told.count("50% of the time is spent waiting for data; no loader setting would help") == 1
    )
    assert list(losses_of(done.folder)) == list(range(1, 25))


def test_a_stream_whose_workers_change_reads_the_same_rows(streamed, base, tmp_path, monkeypatch):
    waiting(monkeypatch, [0.5])
    manifest = write_stream(tmp_path, base, {})
    done = run(manifest)
    assert [e["changes"][0]["value"] for e in events_of(done.folder, "fell_back")] == [1]
    assert losses_of(done.folder) == losses_of(streamed[1])


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
