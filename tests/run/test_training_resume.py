"""Resuming: damaged checkpoints and those of another run are refused, a full disk is reported."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from expert.core.resources import DiskFull
from expert.model import load
from expert.training import checkpoint
from expert.training.checkpoint import CheckpointError
from tests.core.test_publish import flip
from tests.each import each
from tests.jobs.runs import (
    EVERY_STEP,
    ROWS,
    copied,
    events_of,
    inject,
    losses_of,
    run,
    saved_steps,
    weights_of,
    write_expert,
)

SETTINGS = EVERY_STEP | {"eval_steps": 3, "dropout": 0.1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base) -> tuple[Path, Path]:
    manifest = write_expert(tmp_path_factory.mktemp("whole"), base, SETTINGS)
    return manifest, run(manifest).folder


def beside(folder: Path, name: str, *keep: int) -> Path:
    """A copy of the run that `resume="auto"` finds first, with these checkpoints."""
    copy = copied(folder, folder.with_name(name))
    for step in set(saved_steps(copy)) - set(keep):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:06d}")
    return copy


@pytest.mark.fault(8)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(whole):
    manifest, folder = whole
    copy = beside(folder, "demo-29990101-000000", 2, 3, 4)
    try:
        flip(copy / "checkpoints" / "step-000004" / "model.safetensors", 1000, 0)
        (copy / "checkpoints" / "step-000003" / "state.json").unlink()
        done = run(manifest, resume="auto")
        assert done.folder == copy
        told = [(Path(e["path"]).name, e["reason"]) for e in events_of(copy, "rejected")]
        assert told == [
            (".bad-step-000004", "model.safetensors does not match its hash in DONE"),
            (".bad-step-000003", "state.json is missing"),
        ]
        assert events_of(copy, "resumed")[0]["step"] == 2
        assert losses_of(copy) == {s: loss for s, loss in losses_of(folder).items() if s > 2}
        assert weights_of(copy) == weights_of(folder)
    finally:
        shutil.rmtree(copy)


def test_without_a_good_checkpoint_nothing_is_started_over(whole):
    manifest, folder = whole
    copy = beside(folder, "demo-29990101-000001", 2)
    try:
        flip(copy / "checkpoints" / "step-000002" / "optimizer.safetensors", 1000, 0)
        with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
            run(manifest, resume="auto")
        assert [event["event"] for event in events_of(copy)] == ["rejected"]
        assert not (copy / "final").exists()
    finally:
        shutil.rmtree(copy)


def overridden(**values):
    return {"overrides": tuple(f"training.config.{name}={value}" for name, value in values.items())}


@pytest.mark.fault(14)
@each(
    ("more", "told"),
    [
        (overridden(learning_rate=1e-4), r"schedule\.learning_rate: was 0\.01, is 0\.0001"),
        (overridden(max_seq_length=32), r"data\.index: was "),
        (overridden(attention="eager"), r'kernels\.attention: was "sdpa", is "eager"'),
    ],
)
def test_a_changed_setting_is_refused_with_the_difference(whole, tmp_path, more, told):
    manifest, folder = whole
    copy = copied(folder, tmp_path / "copy")
    with pytest.raises(CheckpointError, match=told) as caught:
        run(manifest, resume=str(copy / "checkpoints" / "step-000004"), **more)
    assert "  (undo the change, or resume anyway with --allow-changed)" in str(caught.value)
    assert saved_steps(copy) == [1, 2, 3, 4, 5, 6]  # nothing was put aside


@pytest.mark.fault(14)
def test_other_rows_and_another_tokenizer_are_refused(whole, base, tmp_path):
    _, folder = whole
    checkpoint_of = str(copied(folder, tmp_path / "copy") / "checkpoints" / "step-000004")
    other = write_expert(tmp_path / "rows", base, SETTINGS, rows=[*ROWS[1:], ROWS[0]])
    with pytest.raises(CheckpointError, match=r"data\.tokens: was "):
        run(other, resume=checkpoint_of)
    twin = tmp_path / "twin"
    shutil.copytree(base, twin)
    tokenizer = json.loads((twin / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (twin / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="tokenizer: was "):
        run(write_expert(tmp_path / "words", twin, SETTINGS), resume=checkpoint_of)


def test_a_changed_run_is_resumed_when_allowed_and_its_old_end_is_kept(whole, tmp_path):
    manifest, folder = whole
    copy = copied(folder, tmp_path / "copy", without=())
    before = weights_of(copy)
    done = run(
        manifest,
        resume=str(copy / "checkpoints" / "step-000004"),
        allow_changed=True,
        **overridden(learning_rate=1e-4),
    )
    assert list(losses_of(done.folder)) == [5, 6]
    [change] = events_of(copy, "resumed")[0]["changed"]
    assert change == "schedule.learning_rate: was 0.01, is 0.0001"
    assert max(event["rate"] for event in events_of(copy, "step")) < 1e-4
    assert weights_of(copy) != before
    old = {p.name: p.read_bytes() for p in (copy / ".old-final").glob("*.safetensors")}
    assert old == before


@pytest.mark.fault(6)
def test_a_disk_too_small_for_all_checkpoints_is_reported_before_the_first_step(
    whole, base, tmp_path, monkeypatch
):
    """Four lie there at once: three are kept, and a new one is whole before an old one goes."""
    one = 1.2 * events_of(whole[1], "saved")[0]["bytes"]
    settings = SETTINGS | {"save_total_limit": 3}
    monkeypatch.setattr(checkpoint, "free_bytes", lambda *_: int(3 * one))
    words = r"saving 4 checkpoints needs about [\d.]+ [KMG]iB, .* are free  \(make room and resume"
    with pytest.raises(DiskFull, match=words) as caught:
        run(write_expert(tmp_path, base, settings))
    assert caught.value.exit_code == 75
    folder = next((tmp_path / "runs").iterdir())
    assert losses_of(folder) == {}
    assert not events_of(folder, "loaded")  # nor is the model loaded in vain
    monkeypatch.setattr(checkpoint, "free_bytes", lambda *_: int(4.2 * one))
    assert run(write_expert(tmp_path, base, settings)).exit_code == 0


@pytest.mark.fault(6)
def test_a_write_that_fails_leaves_the_checkpoint_before_it_and_can_be_resumed(
    whole, base, tmp_path, monkeypatch
):
    """A real limit on the size of files, as a full disk would set: the optimizer's file, twice as
    large as that of the weights, does not fit any more. The event file continues."""
    manifest = write_expert(tmp_path, base, SETTINGS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (whole[1] / "checkpoints" / "step-000003" / "model.safetensors").stat().st_size

    def fault(loss, batch, now):
        if now.update == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(1.2 * size), before[1]))
        return loss

    try:
        with monkeypatch.context() as patch:
            inject(patch, fault)
            with pytest.raises(DiskFull, match=r"File too large: saving needs about .*make room"):
                run(manifest)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder = next((tmp_path / "runs").iterdir())
    assert saved_steps(folder) == [1, 2, 3]
    assert sorted(path.name[:5] for path in (folder / "checkpoints").iterdir()) == ["step-"] * 3
    assert list(losses_of(folder)) == [1, 2, 3, 4]
    done = run(manifest, resume="auto")
    assert losses_of(done.folder) == losses_of(whole[1])
    assert weights_of(done.folder) == weights_of(whole[1])


def test_a_resumed_run_has_the_means_of_the_whole_and_nothing_half_made(whole, tmp_path):
    manifest, folder = whole
    copy = copied(folder, tmp_path / "copy")
    for left in (copy / ".tmp-final-1", copy / "checkpoints" / ".tmp-step-000007-1"):
        left.mkdir()  # by a run that was killed
    run(manifest, resume=str(copy / "checkpoints" / "step-000004"))
    for name in ("epoch", "finished"):
        [ours], [theirs] = events_of(copy, name), events_of(folder, name)
        assert ours["loss"] == theirs["loss"]
    assert 0 < ours["earlier_seconds"] < ours["seconds"]  # what belongs to another session is known
    assert theirs["earlier_seconds"] == 0
    assert events_of(copy, "epoch")[0]["tokens"] == events_of(folder, "epoch")[0]["tokens"]
    assert list(copy.rglob(".tmp-*")) == []
    assert run(manifest, resume=str(copy)).exit_code == 0  # with nothing left it keeps its end
    assert not (copy / ".old-final").exists()
    assert weights_of(copy) == weights_of(folder)


def test_code_that_comes_with_a_model_runs_only_where_that_is_allowed(whole, tmp_path, monkeypatch):
    manifest, _ = whole
    refuse = MagicMock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(load, "load_model", refuse)
    for more in ({}, {"allow_remote_code": True}):
        with pytest.raises(ZeroDivisionError):
            run(manifest, **more)
    assert [call.kwargs["allow_remote_code"] for call in refuse.mock_calls] == [False, True]
