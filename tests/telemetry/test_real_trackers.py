"""W&B, MLflow and Trackio, offline, with their real packages: the values they stored are read back
and compared with events.jsonl. `make tracker-test` installs them."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expert.core.stored_json import read_object
from expert.telemetry.trackers import CURVES, TRACKERS, curve_values
from tests.jobs.runs import base_model, events_of, run, write_expert

INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(name)]
OTHERS = ("wandb", "mlflow", "trackio")
SECRET = "canary-0123456789abcdef"
SETTINGS: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "eval_steps": 2,
    "trackers": INSTALLED,
    "tracker_project": "colours",
}

Points = dict[tuple[str, int], float]
needs = pytest.mark.parametrize("name", [name for name in OTHERS if name in INSTALLED])
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the packages emit warnings of their own
    pytest.mark.skipif(
        not {*OTHERS} & {*INSTALLED}, reason="no tracker is installed (make tracker-test)"
    ),
]


def expected(folder: Path) -> Points:
    """Every value of every curve in events.jsonl; the later one of a repeated step."""
    return {
        (curve, int(event["step"])): value
        for event in events_of(folder)
        for curve, value in curve_values(event).items()
    }


# --- readers -------------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: protobuf messages of W&B in a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            return
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_files(folder: Path) -> list[Path]:
    identity = read_object(folder / "trackers" / "wandb.json")["id"]
    return sorted((folder.parent / "wandb").glob(f"offline-run-*-{identity}/*.wandb"))


def read_wandb(folder: Path) -> tuple[Points, dict[str, Any], dict[str, Any]]:
    found: Points = {}
    config: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    rows: list[int] = []
    for file in wandb_files(folder):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                row = {
                    (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append(row["_step"])
                found |= {(key, row["step"]): float(row[key]) for key in row if key in CURVE_NAMES}
            for update in (record.config.update, record.run.config.update):
                config |= {item.key: json.loads(item.value_json) for item in update}
            for item in (*record.summary.update, *record.run.summary.update):
                facts[item.key or item.nested_key[0]] = json.loads(item.value_json)
            if record.WhichOneof("record_type") == "run":
                facts |= {"name": record.run.display_name, "project": record.run.project}
            if record.WhichOneof("record_type") == "exit":
                facts["exit"] = record.exit.exit_code
    assert rows == sorted(set(rows)), "a continued run adds to its rows"
    return found, config, facts


def read_mlflow(folder: Path) -> tuple[Points, dict[str, Any], dict[str, Any]]:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder.parent / "mlflow").as_uri())
    [experiment] = [e for e in client.search_experiments() if e.name != "Default"]
    [only] = client.search_runs([experiment.experiment_id])
    assert only.info.run_id == read_object(folder / "trackers" / "mlflow.json")["id"]
    found = {
        (curve, metric.step): metric.value
        for curve in only.data.metrics
        for metric in client.get_metric_history(only.info.run_id, curve)
    }
    tags = only.data.tags
    facts = {"name": only.info.run_name, "project": experiment.name, "exit": only.info.status}
    return found, only.data.params, {**facts, "final": tags.get("final_folder")}


READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as S
project, = sys.argv[1:]
[name] = S.get_runs(project)
print(json.dumps([name, S.get_logs(project, name), S.get_run_config(project, name)]))
"""


def read_trackio(folder: Path) -> tuple[Points, dict[str, Any], dict[str, Any]]:
    # In a process: the package reads TRACKIO_DIR when it is imported.
    asked = [sys.executable, "-W", "ignore", "-c", READ_TRACKIO, "colours"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True)
    name, logs, config = json.loads(answer.stdout.splitlines()[-1])
    curves = [(row, key) for row in logs for key in row if key in CURVE_NAMES]
    found = {(key, row["step"]): float(row[key]) for row, key in curves}
    final = [row["final_folder"] for row in logs if "final_folder" in row]
    facts = {"name": name, "project": "colours", "final": final[-1] if final else None}
    return found, config, facts


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}
ENDED_WELL = {"wandb": 0, "mlflow": "FINISHED"}
CURVE_NAMES = {curve for curves in CURVES.values() for curve in curves.values()}


# --- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> Iterator[Path]:
    """A folder for everything, no network, and a secret in the environment."""
    place = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(place / "trackio"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("SOME_API_KEY", SECRET)
        yield place


@pytest.fixture(scope="module")
def trained(offline) -> Path:
    """A run with all installed trackers, stopped halfway and resumed."""
    more = {"description": f"key {SECRET}"}
    first = run(write_expert(offline, base_model(), SETTINGS | {"max_steps": 2}, **more))
    assert first.exit_code == 0
    again = write_expert(offline, base_model(), SETTINGS, **more)
    done = run(again, resume=str(first.folder), allow_changed=True)
    assert done.exit_code == 0, events_of(done.folder, "warning")
    return done.folder


@needs
def test_a_tracker_has_the_values_the_plan_the_names_and_where_the_result_is(trained, name):
    found, config, facts = READERS[name](trained)
    wanted = expected(trained)
    assert {step for _, step in wanted} == {1, 2, 3, 4}
    assert found == wanted
    plan = read_object(trained / "plan.json")
    rate = config["optim"]["learning_rate"] if name == "wandb" else config["optim.learning_rate"]
    assert float(rate) == plan["optim"]["learning_rate"]
    assert (facts["name"], facts["project"]) == (trained.name, "colours")
    assert facts["final"] == str(trained / "final")
    if name in ENDED_WELL:
        assert facts["exit"] == ENDED_WELL[name]
    # Nothing to warn of, and no link that would be followed.
    told = [event["text"] for event in events_of(trained, "warning")]
    assert [text for text in told if TRACKERS[name].title in text or name in text.lower()] == []
    assert [path for path in trained.rglob("*") if path.is_symlink()] == []


def test_no_secret_gets_into_what_trackers_keep(trained, offline):
    kept = [path for path in offline.rglob("*") if path.is_file()]
    told = [path for path in kept if SECRET.encode() in path.read_bytes()]
    assert {path.name for path in told} <= {"manifest.json"}


@pytest.mark.skipif("wandb" not in INSTALLED, reason="the package wandb is missing")
@pytest.mark.parametrize("key", ["", "0" * 40], ids=["no key", "no network"])
def test_where_w_and_b_cannot_be_used_it_is_written_offline_and_says_so(
    offline, tmp_path, monkeypatch, key
):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    settings = SETTINGS | {"max_steps": 1, "trackers": ["wandb"]}
    done = run(write_expert(tmp_path, base_model(), settings))
    assert done.exit_code == 0
    [told] = [e["text"] for e in events_of(done.folder, "warning") if "W&B" in e["text"]]
    assert "its curves are written offline  (upload them with: wandb sync " in told
    assert read_wandb(done.folder)[0] == expected(done.folder)


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="the package mlflow is missing")
def test_a_server_that_is_not_there_is_said_once_and_stops_nothing(offline, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    settings = SETTINGS | {"max_steps": 2, "trackers": ["mlflow"]}
    done = run(write_expert(tmp_path, base_model(), settings))
    assert done.exit_code == 0
    [told] = [e["text"] for e in events_of(done.folder, "warning") if "MLflow" in e["text"]]
    assert "are no longer written: " in told
