"""Every optimizer, schedule, adapter, tracker, judge and CSV dialect that a table or the manifest
names can be planned and built. A failure names the file that lacks one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from expert.core.rundir import RunFolder
from expert.data.read.csv_rows import SEPARATORS, read_csv
from expert.data.records import Row
from expert.judging.domain import JUDGES, WRITTEN, domain_of
from expert.judging.oracles.oracle import JudgeOptions, oracle_for
from expert.manifest.peers.unused import answer_to
from expert.manifest.schema.config import TrainingConfig
from expert.manifest.schema.kinds import (
    ADAPTERS,
    OPTIMIZERS,
    SCHEDULES,
    AdapterType,
    Optimizer,
    Scheduler,
    SchedulerOptions,
    Tracker,
)
from expert.manifest.schema.manifest import Adapter
from expert.model.load import load_model
from expert.planning.run_plan import RunPlan
from expert.telemetry.tracker_process import TRACKER_RUNS
from expert.telemetry.trackers import TRACKERS, open_trackers
from expert.training.optim import OptimizerUnavailable, build_optimizer
from expert.training.schedule import learning_rate, schedule_of
from tests.judging.judged import case_of
from tests.model.models import tiny_model, trainable_tensors
from tests.planning.planning import manifest, plan

CPU = torch.device("cpu")
FULL = {"full", "none"}
"""Not adapters: all weights, and soft prompts alone."""


def lacks(place: str, name: str, ask: Callable[[], Any]) -> Any:
    """The result of `ask`; a failure names the file that has no entry for the name."""
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - whatever it is, the place is what matters
        pytest.fail(f"{place} lacks {name}: {type(error).__name__}: {error}")


def planned(name: str, **config: Any) -> RunPlan:
    places = "manifest/schema, manifest/check or planning/choose"
    made: RunPlan = lacks(places, name, lambda: plan(manifest({"max_steps": 10, **config}), None))
    return made


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (get_args(Optimizer), OPTIMIZERS),
        (get_args(Scheduler), SCHEDULES),
        (set(get_args(AdapterType)) - FULL, ADAPTERS),
        (get_args(Tracker), TRACKERS),
    ],
    ids=["optimizers", "schedules", "adapters", "trackers"],
)
def test_every_name_of_the_manifest_has_a_row_and_every_row_a_name(names, table):
    assert set(names) == set(table)


def test_every_option_of_a_row_is_a_key_of_the_manifest():
    of_schedules = {option for kind in SCHEDULES.values() for option in kind.options}
    of_adapters = {option for kind in ADAPTERS.values() for option in kind.options}
    assert of_schedules == set(SchedulerOptions.model_fields)
    assert of_adapters <= set(TrainingConfig.model_fields)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_planned_and_built(name):
    made = planned(name, optim=name)
    assert made.optim.optimizer == name
    assert made.optim.learning_rate == OPTIMIZERS[name].rate_factor * ADAPTERS["lora"].rate
    weights = [("layer.weight", torch.nn.Parameter(torch.ones(4, 4)))]
    try:
        built = build_optimizer(weights, made.optim, device=CPU)
    except OptimizerUnavailable as error:
        pytest.skip(str(error))
    except ValueError as error:
        pytest.fail(f"training/optim.py lacks {name}: {error}")
    assert [parameter for group in built.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_planned_and_has_a_curve(name):
    made = planned(name, lr_scheduler=name)
    schedule = schedule_of(made.optim, 10)
    place = "training/schedule.py"
    rates = lacks(place, name, lambda: [learning_rate(step, schedule) for step in range(10)])
    assert max(rates) == made.optim.learning_rate
    assert all(0 < rate <= made.optim.learning_rate for rate in rates)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_is_planned_built_and_counted(name, tmp_path):
    folder = tiny_model(tmp_path / "model")
    config = {"adapter_type": name, "max_steps": 10}
    models = [{"name": str(folder)}]
    named = manifest(config, base_models=models)
    made = lacks("manifest/schema/kinds.py", name, lambda: plan(named, None, folder=tmp_path))
    parts = (made.model, made.adapter, made.kernels)
    more: dict[str, Any] = {"vocabulary": None, "device": CPU, "seed": 0, "total_steps": 10}
    loaded = lacks("model/adapters.py", name, lambda: load_model(*parts, **more))
    trained = sum(tensor.numel() for tensor in trainable_tensors(loaded).values())
    planned_weights = made.adapter.trainable_parameters
    assert planned_weights == trained, f"weights of {name} in manifest/schema/kinds.py"


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_may_be_named_by_a_released_one(name):
    lacks("AdapterName of manifest/schema/kinds.py", name, lambda: Adapter(type=name))


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_is_planned_and_opened_and_no_longer_refused(name, tmp_path, monkeypatch):
    assert planned(name, trackers=[name]).watch.trackers == [name]
    assert answer_to(f"{name}_project") is None, f"peers/unused.txt refuses {name}_*"
    missing = f"telemetry/tracker_process.py lacks {name}"
    assert name == "tensorboard" or name in TRACKER_RUNS, missing
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    warnings: list[str] = []
    opened = open_trackers([name], RunFolder.create(tmp_path, "demo").path, warnings.append)
    if not opened:
        pytest.skip(str(warnings))
    [tracker] = opened
    tracker({"event": "step", "step": 1, "loss": 1.0})
    tracker.close()
    assert not warnings


def test_nothing_that_is_built_is_refused_as_a_key_of_another_trainer():
    built = [*OPTIMIZERS, *ADAPTERS, *TRACKERS]
    for name in {*built, *(name.split("_")[0] for name in built)}:
        for key in (f"{name}_of_another", f"use_{name}"):
            answer = answer_to(key)
            refused = answer is not None and "not supported" in str(answer)
            assert not refused, f"manifest/peers/unused.txt refuses {key}"
    elsewhere = str(answer_to("comet_workspace"))
    assert all(name in elsewhere for name in TRACKERS)


@pytest.mark.parametrize("domain", JUDGES)
def test_every_judge_is_found_by_its_names_and_judges(domain):
    judge = lacks("judging/oracles", domain, lambda: oracle_for(domain))
    assert judge(case_of("x"), "x", JudgeOptions()).reason is not None
    for name, meant in WRITTEN.items():
        assert domain_of((), {"grammar_type": name}) == meant


@pytest.mark.parametrize("separator", SEPARATORS)
def test_every_separator_of_a_csv_file_is_found_by_the_file(separator):
    text = f"a{separator}b\n1{separator}2\n".encode()
    [row] = read_csv(io.BufferedReader(io.BytesIO(text)), "rows.csv")
    assert isinstance(row, Row)
    assert row.values == {"a": "1", "b": "2"}
