"""Values that are not finite never reach a weight, and loss spikes are rolled back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from tokenizers import Tokenizer

from expert.run.session.failures import RunFailed
from expert.telemetry.trackers import TRACKERS
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

# A checkpoint after every step, of which there are 6 in an epoch.
SETTINGS = EVERY_STEP | {"evaluation_strategy": "no", "micro_batch_size": 2}
UNSAVED = SETTINGS | {"save_steps": None, "save_strategy": "no"}
# Long enough that a spike can be told from noise: it needs 25 losses before it.
LONG = SETTINGS | {"epochs": 6, "save_steps": 5, "learning_rate": 1e-3, "micro_batch_size": 4}


@pytest.fixture(scope="module")
def clean(tmp_path_factory, base) -> Path:
    return run(write_expert(tmp_path_factory.mktemp("clean"), base, LONG)).folder


def at(updates, change):
    """A fault in these steps, numbered from 0."""
    return lambda loss, batch, now: change(loss) if now.update in updates else loss


def tensors_after(folder, step):
    place = folder / "checkpoints" / f"step-{step:06d}"
    return [(place / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


class OneBadGradient(torch.autograd.Function):
    """The loss is as it was, and the gradient that comes back through it is not finite."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


@pytest.mark.fault(15)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda loss: loss * float("nan"), id="a loss that is no number"),
        pytest.param(lambda loss: loss + float("inf"), id="an infinite loss, finite gradients"),
        pytest.param(OneBadGradient.apply, id="a gradient"),
    ],
)
def test_what_is_not_finite_changes_no_weight_and_names_its_rows(
    base, tmp_path, monkeypatch, change
):
    inject(monkeypatch, at({2}, change))
    manifest = write_expert(tmp_path, base, SETTINGS | {"on_not_finite": "skip"})
    folder = run(manifest).folder
    assert tensors_after(folder, 3) == tensors_after(folder, 2) != tensors_after(folder, 1)
    told = events_of(folder, "not_finite")
    assert [(event["step"], event["policy"]) for event in told] == [(3, "skip")]
    assert len(told[0]["bins"]) == 4
    assert 4 <= len(told[0]["rows"]) <= 10
    assert all(0 <= row < len(ROWS) for row in told[0]["rows"])
    assert saved_steps(folder)[-1] == 6


def test_the_rows_that_are_named_are_those_that_were_read(base, tmp_path, monkeypatch):
    """Every row says its own number, so that the tokens of the bad batch tell which it was."""
    rows = [{"instruction": f"row {number}", "response": "yes " * 9} for number in range(20)]
    seen = []

    def fault(loss, batch, now):
        if now.update == 1:
            seen.append(batch.tokens.clone())
            return loss * float("nan")
        return loss

    inject(monkeypatch, fault)
    settings = SETTINGS | {"packing": False, "dataloader_num_workers": 0, "batch_size": 4}
    manifest = write_expert(tmp_path, base, settings, rows=rows, dataset={"validation_split": 0})
    with pytest.raises(RunFailed, match=r"step 2 is not finite; rows \d+, \d+, \d+, \d+ were"):
        run(manifest)
    folder = next((tmp_path / "runs").iterdir())
    named = events_of(folder, "not_finite")[0]["rows"]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    read = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for b in seen for row in b]
    numbers = [int(re.search(r"row (\d+)", text)[1]) for text in read]
    assert named == numbers
    assert len(named) == 4


@pytest.mark.fault(15)
def test_a_rollback_passes_over_the_step_that_was_not_finite(base, tmp_path, monkeypatch):
    inject(monkeypatch, at({3}, lambda loss: loss * float("nan")))
    done = run(write_expert(tmp_path, base, SETTINGS | {"on_not_finite": "rollback"}))
    told = events_of(done.folder, "rolled_back")
    assert [(event["to_step"], event["skipped"]) for event in told] == [(3, [[3, 3]])]
    steps = [event["step"] for event in events_of(done.folder, "step")]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert saved_steps(done.folder) == [1, 2, 3, 5, 6]
    rates = {event["step"]: event["rate"] for event in events_of(done.folder, "step")}
    assert rates[5] < 0.25 * rates[3]  # half of the rate, and a warm-up of five steps again


@pytest.mark.fault(16)
def test_a_loss_that_spikes_is_undone_and_the_rest_is_learned(base, clean, tmp_path, monkeypatch):
    inject(monkeypatch, at(range(27, 32), lambda loss: loss * 10))
    manifest = write_expert(tmp_path, base, LONG)
    done = run(manifest)
    spike = events_of(done.folder, "spike")[0]
    assert (spike["step"], spike["policy"]) == (28, "rollback")
    assert spike["loss"] > 5 * spike["median"]
    told = events_of(done.folder, "rolled_back")
    # The checkpoint after 30 steps is one of weights that are broken: it is not gone back to.
    assert [(e["from_step"], e["to_step"], e["skipped"]) for e in told] == [(32, 25, [[26, 31]])]
    steps = [event["step"] for event in events_of(done.folder, "step")]
    assert steps == [*range(1, 33), 26, *range(33, 37)]
    rates = {event["step"]: event["rate"] for event in events_of(done.folder, "step")}
    planned = {event["step"]: event["rate"] for event in events_of(clean, "step")}
    assert rates[26] == pytest.approx(planned[26] * 0.5 * 1 / 5)  # five: 11 steps are left
    assert rates[36] == pytest.approx(planned[36] * 0.5)
    expected = {step: loss for step, loss in losses_of(clean).items() if step <= 26}
    assert {s: loss for s, loss in losses_of(done.folder).items() if s <= 26} == expected
    last = [float.fromhex(losses_of(folder)[36]) for folder in (done.folder, clean)]
    assert last[0] < 1.1 * last[1]

    # A run that is resumed after the rollback passes the window over too, and ends the same.
    again = copied(done.folder, tmp_path / "again")
    monkeypatch.undo()
    resumed = run(manifest, resume=str(again / "checkpoints" / "step-000035"))
    rest = {step: loss for step, loss in losses_of(done.folder).items() if step > 35}
    assert losses_of(resumed.folder) == rest
    assert weights_of(resumed.folder) == weights_of(done.folder)
    state = json.loads((again / "checkpoints" / "step-000035" / "state.json").read_text())["state"]
    assert state["state"]["skipped"] == [[26, 31]]
    assert state["state"]["rollbacks"] == 1
    # The end of the curve is the plan's, which may be longer when the run is resumed.
    kept = {"rate_factor", "restart_warmup_at", "restart_warmup_steps"}
    assert set(state["state"]["schedule"]) == kept
    # What was undone counts in no mean.
    means = [events_of(folder, "finished")[0]["loss"] for folder in (done.folder, clean)]
    assert means[0] < 1.05 * means[1]


@pytest.mark.fault(16)
def test_spikes_without_end_stop_the_run_after_so_many_rollbacks(base, tmp_path, monkeypatch):
    inject(monkeypatch, at(range(22, 52), lambda loss: loss * 10))
    with pytest.raises(RunFailed, match="the loss spiked to"):
        run(write_expert(tmp_path, base, LONG | {"max_rollbacks": 2, "epochs": 9}))
    folder = next((tmp_path / "runs").iterdir())
    policies = [event["policy"] for event in events_of(folder, "spike")]
    assert policies == ["rollback", "rollback", "stop"]
    assert len(events_of(folder, "rolled_back")) == 2


def test_without_a_checkpoint_a_rollback_starts_over(base, tmp_path, monkeypatch):
    inject(monkeypatch, at({2}, lambda loss: loss * float("nan")))
    done = run(write_expert(tmp_path, base, UNSAVED | {"on_not_finite": "rollback"}))
    assert events_of(done.folder, "rolled_back")[0]["to_step"] == 0
    steps = [event["step"] for event in events_of(done.folder, "step")]
    assert steps == [1, 2, 3, 1, 2, 4, 5, 6]
    losses = [event["loss"] for event in events_of(done.folder, "step")]
    assert losses[3] == losses[0]


@pytest.mark.fault(15)
def test_by_default_a_run_stops_at_what_is_not_finite_and_keeps_what_it_had_learned(
    base, tmp_path, monkeypatch
):
    manifest = write_expert(tmp_path, base, UNSAVED)
    with monkeypatch.context() as patch:
        inject(patch, at({2}, lambda loss: loss * float("nan")))
        with pytest.raises(RunFailed, match="after step 3 was saved, --resume continues"):
            run(manifest)
    folder = next((tmp_path / "runs").iterdir())
    assert events_of(folder, "stopped")[0]["exit_code"] == 4
    assert events_of(folder, "step")[-1]["loss"] == "nan"  # what happened, never a repaired number
    path = folder / "checkpoints" / "step-000003"
    state = json.loads((path / "state.json").read_text())["state"]["state"]
    assert (state["skipped"], state["skips"]) == ([[2, 2]], 1)
    done = run(manifest, resume="auto")
    assert [event["step"] for event in events_of(done.folder, "step")] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_fails_at_the_start_is_reported_and_the_run_continues(
    base, tmp_path, monkeypatch
):
    refuse = MagicMock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setitem(TRACKERS, "tensorboard", TRACKERS["tensorboard"]._replace(open=refuse))
    settings = SETTINGS | {"trackers": ["tensorboard"], "max_steps": 1}
    done = run(write_expert(tmp_path, base, settings))
    assert done.exit_code == 0
    told = [event["text"] for event in events_of(done.folder, "warning")]
    lost = "TensorBoard files are no longer written: PermissionError"
    assert sum(lost in text for text in told) == 1
