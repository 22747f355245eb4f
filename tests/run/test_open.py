"""A manifest is opened once: one look at the machine, one search for its rows, one plan."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import expert
from expert.core.errors import ExpertError
from expert.data import named_sources
from expert.data.feed.streaming import StreamPosition
from expert.jobs.diagnose import check
from expert.planning.machine import machine
from expert.run import open as opening
from expert.run.open import open_run
from tests.cli.conftest import run as run
from tests.jobs.runs import ROWS, events_of, write_expert

ONE_STEP = {"max_steps": 1, "save_strategy": "no", "device": "cpu"}
COUNTED = {
    "machines": (machine, "describe_machine"),
    "plans": (opening, "make_plan"),
    "searches for rows": (named_sources, "resolve_sources"),
}


@pytest.fixture
def counted(monkeypatch) -> dict[str, MagicMock]:
    """The functions that a run needs once, with their calls."""
    found = {}
    for name, (module, function) in COUNTED.items():
        found[name] = MagicMock(wraps=getattr(module, function))
        monkeypatch.setattr(module, function, found[name])
    monkeypatch.setattr(check, "describe_machine", machine.describe_machine)  # imported at its top
    return found


# The second plan is that with the counted rows: the first decides how they are prepared.
ONCE = {"machines": 1, "plans": 2, "searches for rows": 1}


@pytest.mark.parametrize(
    "command", [["train"], ["plan"], ["train", "--dry-run"], ["diagnose", "--no-timing"]]
)
def test_a_command_opens_its_manifest_once(run, base, tmp_path, counted, command):
    file = write_expert(tmp_path, base, ONE_STEP)
    ran = run(*command, "--manifest", str(file))
    assert ran.code == 0, ran.err
    assert {name: called.call_count for name, called in counted.items()} == ONCE


def test_the_plan_that_is_shown_is_the_plan_that_runs(base, tmp_path):
    file = write_expert(tmp_path, base, {**ONE_STEP, "max_steps": 3, "batch_size": "auto"})
    expert.prepare(file)
    shown, ran = expert.plan(file), open_run(file).plan
    unlike = ("memory", "decisions", "remarks")  # the memory of this machine that is free now
    assert {k: v for k, v in shown.model_dump().items() if k not in unlike} == {
        k: v for k, v in ran.model_dump().items() if k not in unlike
    }


def test_all_warnings_of_the_plan_and_of_the_rows_are_in_the_result_in_the_events_and_shown_once(
    run, base, tmp_path
):
    long = {"instruction": "long " * 80, "response": "end"}
    config = {**ONE_STEP, "max_steps": 9999, "epochs": 1, "batch_size": 64}
    file = write_expert(tmp_path, base, config, rows=[*ROWS, *[long] * 8])
    ran = run("train", "--manifest", str(file), "--json")
    done = json.loads(ran.out)
    told = [event["text"] for event in events_of(Path(done["folder"]), "warning")]
    assert [text.partition(":")[0] for text in told] == ["length.max_steps", "train"]
    assert told == done["warnings"]
    shown = " ".join((ran.out + ran.err).split())
    assert [shown.count(f"warning: {' '.join(text.split())}") for text in told] == [1, 1]


def test_a_gpu_that_is_not_here_is_refused_before_anything_is_prepared(base, tmp_path, monkeypatch):
    file = write_expert(tmp_path, base, {"device": "cuda"})
    here = machine.describe_machine(tmp_path)
    without = here.__class__(**{**here.__dict__, "gpus": ()})
    monkeypatch.setattr(machine, "describe_machine", lambda folder=None: without)
    with pytest.raises(ExpertError, match="no GPU was found"):
        expert.train(file)
    assert not (tmp_path / "datasets_optimized").exists()
    assert opening.plan(file).kernels.device == "cpu", "a plan only warns"


def test_a_stream_without_duplicates_has_its_rows_in_every_epoch(base, tmp_path):
    dataset = {"streaming": True, "validation": {"deduplicate": True}}
    config = {"epochs": 2, "dataloader_num_workers": 0, "device": "cpu", "lr_scheduler": "constant"}
    opened = open_run(write_expert(tmp_path, base, config, dataset=dataset, rows=ROWS + ROWS))
    works = opened.data.stream.works(done=0, place=StreamPosition(), epochs=2, total=None)
    steps = Counter(work.step.epoch for work in works)
    assert steps[0] == steps[1] > 0
