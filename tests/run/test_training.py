"""Whole runs: they learn, can be resumed at any step, and leave what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from expert.core.publish import damage
from tests.faults.counting import case
from tests.jobs.runs import EVERY_STEP, copied, events_of, losses_of, run, weights_of, write_expert
from tests.parallel.test_worlds import numbers_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base) -> tuple[Path, Path]:
    """A run with two epochs, accumulation, dropout and evaluation, and a checkpoint each step."""
    folder = tmp_path_factory.mktemp("whole")
    settings = {"epochs": 2, "dropout": 0.2, "micro_batch_size": 1, "eval_steps": 3}
    manifest = write_expert(folder, base, EVERY_STEP | settings)
    return manifest, run(manifest).folder


def test_a_run_learns_and_leaves_a_whole_run_folder(whole):
    _, folder = whole
    losses = numbers_of(folder)
    assert losses[-1] < 0.8 * losses[0]
    names = {path.name for path in folder.iterdir()}
    assert {"manifest.json", "plan.json", "environment.json", "events.jsonl", "final"} <= names
    assert ".lock" not in names
    assert damage(folder / "final") == ""
    told = [event["event"] for event in events_of(folder)]
    assert told[0] == "started"
    assert told[-1] == "finished"
    evaluated = [event["step"] for event in events_of(folder, "eval")]
    last = max(losses_of(folder))
    assert evaluated == sorted({*range(3, last + 1, 3), last})


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    "some", [(1, 6, 7, 11), pytest.param(range(1, 12), marks=pytest.mark.slow, id="every step")]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(whole, tmp_path, some):
    """From its first step, from the end of an epoch, from the start of one, from the last step."""
    manifest, folder = whole
    expected, weights = losses_of(folder), weights_of(folder)
    steps = sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir())
    assert steps == list(range(1, len(expected) + 1))
    for step in some:
        copy = copied(folder, tmp_path / f"from-{step}")
        done = run(manifest, resume=str(copy / "checkpoints" / f"step-{step:06d}"))
        rest = losses_of(done.folder)
        with case():
            assert rest == {number: expected[number] for number in expected if number > step}
            assert weights_of(done.folder) == weights


def test_a_resumed_run_starts_from_the_same_changed_base(base, tmp_path):
    settings = {"adapter_init": "pissa", "loraplus_lr_ratio": 4, "save_steps": 2, "max_steps": 4}
    settings["modules_to_save"] = ["embed_tokens", "lm_head"]
    manifest = write_expert(tmp_path / "made", base, settings)
    whole = run(manifest).folder
    resumed = copied(whole, tmp_path / "resumed")
    done = run(manifest, resume=str(resumed / "checkpoints" / "step-000002"))
    assert weights_of(done.folder) == weights_of(whole)
    made = load_file(done.folder / "final" / "adapter_model.safetensors")
    assert {name.rsplit(".", 2)[-2] for name in made} == {
        *("lora_A", "lora_B", "embed_tokens", "lm_head")
    }


@pytest.mark.fault(13)
def test_micro_batch_size_changes_no_loss(base, tmp_path):
    """The same sums in another order: they differ by rounding, 1e-6 of a float32 loss."""
    found = []
    for rows in (1, 4):
        settings = {"micro_batch_size": rows, "epochs": 1}
        found.append(numbers_of(run(write_expert(tmp_path / str(rows), base, settings)).folder))
    assert len(found[0]) > 3
    assert found[1] == pytest.approx(found[0], rel=2e-5)


def test_packed_unpacked_and_padded_runs_begin_with_the_same_loss(base, tmp_path):
    """All rows in one step: the loss of the whole data set, however it is laid out."""
    first = {}
    for packing in (True, "concat", False):
        settings = {"packing": packing, "batch_size": 64, "epochs": 1, "max_steps": 1}
        folder = tmp_path / str(packing)
        made = run(write_expert(folder, base, settings, dataset={"validation_split": 0}))
        first[packing] = float.fromhex(losses_of(made.folder)[1])
    assert first[True] == pytest.approx(first[False], rel=1e-6)
    # Where join-and-cut divides a document, its parts are shorter contexts: another, near loss.
    assert first["concat"] == pytest.approx(first[False], rel=0.05)


def test_early_stopping_ends_a_run_that_no_longer_improves(base, tmp_path):
    settings = {"early_stopping_patience": 2, "early_stopping_threshold": 0.5}
    done = run(write_expert(tmp_path, base, {**settings, "learning_rate": 1e-9, "eval_steps": 1}))
    assert done.exit_code == 0
    assert done.steps == 3  # one evaluation sets the mark, two bring nothing
    assert events_of(done.folder, "finished")[0]["early"]


def test_the_best_checkpoint_is_what_the_run_leaves(base, tmp_path):
    # The highest loss counts as the best here, so that the best step is never the last.
    settings = {"greater_is_better": True, "eval_steps": 1, "save_steps": 1}
    done = run(write_expert(tmp_path, base, settings | {"save_total_limit": 1}))
    evals = {event["step"]: event["loss"] for event in events_of(done.folder, "eval")}
    best = max(evals, key=lambda step: evals[step])
    assert best != done.steps
    assert events_of(done.folder, "took_best")[0]["step"] == best
    assert done.eval_loss == evals[best]
    assert done.last_eval_loss == evals[done.steps] != done.eval_loss
    assert events_of(done.folder, "finished")[0]["last_eval_loss"] == done.last_eval_loss
    checkpoint = done.folder / "checkpoints" / f"step-{best:06d}" / "model.safetensors"
    saved, final = (
        {tuple(tensor.flatten().tolist()) for tensor in load_file(file).values()}
        for file in (checkpoint, done.folder / "final" / "adapter_model.safetensors")
    )
    assert final == saved


def test_a_best_checkpoint_that_is_damaged_is_reported_and_the_last_weights_are_kept(
    base, tmp_path
):
    def damaged(event):
        if event["event"] == "saved" and event["step"] > 1:
            path = Path(event["path"]).parent / "step-000001" / "model.safetensors"
            path.write_bytes(b"torn")

    settings = {"greater_is_better": True, "eval_steps": 1, "save_steps": 1, "epochs": 1}
    done = run(write_expert(tmp_path, base, settings), sinks=[damaged])
    assert done.exit_code == 0
    assert events_of(done.folder, "took_best") == []
    told = [event["text"] for event in events_of(done.folder, "warning")]
    assert any("the best cannot be loaded" in text for text in told)
    assert damage(done.folder / "final") == ""


def test_the_test_rows_are_reported_with_the_step_whose_weights_they_judge(base, tmp_path):
    settings = {"metric_for_best_model": "eval_token_accuracy", "greater_is_better": False}
    settings |= {"eval_steps": 1, "save_steps": 1, "epochs": 1}
    rows = [{"instruction": f"say {n}", "response": "and " * n} for n in range(1, 5)]
    tmp_path.joinpath("test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run(write_expert(tmp_path, base, settings, dataset={"test_path": "test.jsonl"}))
    best = events_of(done.folder, "took_best")[0]["step"]
    assert best < done.steps
    [told] = [event for event in events_of(done.folder, "eval") if event["split"] == "test"]
    assert told["step"] == best
    assert done.eval_loss is None  # another number was followed
    assert events_of(done.folder, "finished")[0]["eval_loss"] is None


def test_a_limited_evaluation_takes_the_same_rows_each_time(base, tmp_path):
    told = []
    settings = {"max_steps": 4, "eval_steps": 2, "eval_max_rows": 6, "packing": False}
    dataset = {"validation_split": 0.5}
    expert = write_expert(tmp_path, base, settings, dataset=dataset)
    done = run(expert, evaluating=lambda split, rows, total: told.append((split, rows, total)))
    assert set(told) >= {("validation", 0, 6), ("validation", 6, 6)}
    rows = [each for _, each, _ in told]
    assert max(rows) == 6
    assert [rows.index(0), rows.count(0)] == [0, 2]  # each evaluation begins anew
    [end] = events_of(done.folder, "finished")
    assert end["wall_seconds"] > end["seconds"]
    first, second = events_of(done.folder, "eval")
    assert first["tokens"] == second["tokens"]
    assert first["loss"] != second["loss"]


def test_a_run_that_max_steps_ends_early_says_how_many_epochs_it_makes(base, tmp_path):
    short = run(write_expert(tmp_path / "short", base, {"max_steps": 2}))
    [started] = events_of(short.folder, "started")
    assert (started["ends_by"], started["epochs"]) == ("max_steps", 2)
    assert 0 < started["epochs_to_come"] < 1
    whole = run(write_expert(tmp_path / "whole", base, {"max_steps": 1000}))
    [started] = events_of(whole.folder, "started")
    assert "epochs_to_come" not in started
