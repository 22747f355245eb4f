"""The thread and process of trackers, and TensorBoard's files read back."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from expert.core.install import pip_install
from expert.telemetry import trackers
from expert.telemetry.trackers import (
    TRACKERS,
    ProcessWriter,
    Tracker,
    TrackerKind,
    close_trackers,
    open_trackers,
)
from tests.core.forking import in_child
from tests.each import each

STEP = {
    "event": "step",
    "time": 1000.0,
    "step": 10,
    "loss": 1.5,
    "rate": 2e-4,
    "grad_norm": 0.7,
    "tokens_per_second": 104_000.0,
    "mfu": None,
    "gpu_utilization": 98.0,
}


class Desk:
    """A tracker with fake writers, and its warnings."""

    def __init__(self, run: Path = Path("run")) -> None:
        self.run = run
        self.said: list[str] = []
        self.writers: list[Any] = []
        self.full = False
        self.sink = Tracker(TRACKERS["tensorboard"], run, warn=self.warn)

    def warn(self, text: str) -> None:
        """A warning comes back as an event."""
        self.said.append(text)
        self.sink({"event": "warning", "text": text})

    def shown(self, *events: dict[str, Any]) -> list[Any]:
        """Send the events and close; returns the writers."""
        for event in events:
            self.sink(event)
        self.sink.close()
        return self.writers

    def make(self, folder: Path, first_step: int | None) -> Any:
        """A writer; if the disk is full, writing and closing fail."""
        assert folder == self.run / "tensorboard"
        self.writers.append(MagicMock(first_step=first_step))
        if self.full:
            failure = OSError(28, "No space left on device")
            self.writers[-1].configure_mock(
                **{"add_scalar.side_effect": failure, "close.side_effect": failure}
            )
        return self.writers[-1]


def scalars(writer: Any) -> list[tuple[Any, ...]]:
    return [call.args for call in writer.add_scalar.call_args_list]


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Desk:
    made = Desk(tmp_path)
    monkeypatch.setattr(trackers, "_summary_writer", made.make)
    return made


def test_events_become_points_of_every_curve_they_have_a_value_for(desk):
    asked = {"event": "eval", "step": 10, "perplexity": 3.5, "token_accuracy": 0.5}
    facts = {"steps_per_second": 2.5, "peak_reserved_bytes": 7, "cpu_peak_memory_bytes": 9}
    [writer] = desk.shown(
        STEP,
        {**asked, "loss": 1.25, "split": "validation"},
        {**asked, "loss": 1.5, "split": "test"},
        {"event": "step", "step": 1, **facts},
        {"event": "step", "step": 2, "rewards/margins": 0.5},
        {"event": "eval", "step": 2, "split": "validation", "logps/chosen": -9.0},
        {"event": "step", "step": 3, "loss": "nan"},
    )
    assert {when for *_, when in scalars(writer)[:5]} == {1000.0}
    *others, (tag, value, step, _) = scalars(writer)
    assert (tag, step) == ("loss/train", 3)
    assert math.isnan(value)
    assert [(tag, value) for tag, value, _, _ in others] == [
        ("loss/train", 1.5),
        ("learning_rate", 2e-4),
        ("grad_norm", 0.7),
        ("tokens_per_second", 104_000.0),
        ("gpu/utilization_percent", 98.0),
        ("loss/eval", 1.25),
        ("eval/perplexity", 3.5),
        ("eval/token_accuracy", 0.5),
        ("loss/test", 1.5),
        ("test/perplexity", 3.5),
        ("test/token_accuracy", 0.5),
        ("steps_per_second", 2.5),
        ("gpu/peak_memory_bytes", 7.0),
        ("cpu/peak_memory_bytes", 9.0),
        ("rewards/margins", 0.5),
        ("eval/logps/chosen", -9.0),
    ]


@pytest.mark.parametrize("events", [[STEP] * 3, [{"event": "started", "step": 0}]])
def test_a_full_disk_is_said_once_in_the_middle_or_at_the_end_and_not_raised(desk, events):
    desk.full = True
    desk.shown(*events)
    [sentence] = desk.said
    assert "no longer written: OSError: [Errno 28] No space left on device" in sentence
    assert "events.jsonl has all values" in sentence


@pytest.mark.fault(7)
def test_the_thread_of_tensorboard_that_finds_no_room_prints_nothing(tmp_path, capfd):
    pytest.importorskip("tensorboard")

    def action() -> str:
        import resource

        said: list[str] = []
        sys.dont_write_bytecode = True  # the limit would truncate it
        threading.excepthook = threading.__excepthook__  # instead of pytest's
        sink = Tracker(TRACKERS["tensorboard"], tmp_path, warn=said.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        for _ in range(500):  # more than fits its buffer: the thread writes
            sink(STEP)
        sink.close()
        return "\n".join(said)

    code, said = in_child(action)
    assert code == 0, said
    assert "File too large" in said
    assert len(said.splitlines()) == 1
    assert capfd.readouterr().err == ""


class Stuck:
    """A writer that blocks until it is released."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        self.taken: list[int] = []

    def write(self, event) -> None:
        self.entered.set()
        self.free.wait()
        self.taken.append(event["step"])

    def close(self) -> None: ...


@pytest.mark.fault(7)
def test_a_blocked_tracker_delays_neither_the_run_nor_other_trackers(desk, monkeypatch):
    writer = Stuck()
    said: list[str] = []
    kind = TrackerKind("TensorBoard files", lambda run, tell: writer)
    sink = Tracker(kind, Path("run"), warn=said.append, waiting=3)
    sink(STEP)
    desk.sink(STEP)
    writer.entered.wait()
    for step in range(1, 8):
        sink(STEP | {"step": step})
    assert ["are too slow and miss values" in text for text in said] == [True]
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.05)
    close_trackers([sink, desk.sink])
    assert ["could not be finished within" in text for text in said] == [False, True]
    assert desk.writers[0].close.called
    writer.free.set()


def child(code: str) -> TrackerKind:
    """A tracker whose process runs this code."""
    command = (sys.executable, "-c", f"import json, os, sys, time\n{code}")
    return TrackerKind("W&B curves", lambda run, tell: ProcessWriter("wandb", run, tell, command))


@each(
    ("code", "told"),
    [
        ("print(json.dumps({'failed': 'OSError: disk full'}))", "OSError: disk full"),
        ("print('hello'); sys.exit('no such account')", "ended with code 1: no such account"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("sys.stdin.readline(); os._exit(3)", "ended with code 3"),
    ],
)
def test_the_end_of_a_tracker_s_process_is_said_once_with_its_reason(code, told):
    said: list[str] = []
    sink = Tracker(child(code), Path("run"), warn=said.append)
    for _ in range(3):
        sink(STEP)
    sink.close()
    [sentence] = said
    assert "are no longer written: " + told in sentence.replace("its process ", "")


def test_a_process_that_hangs_is_ended(monkeypatch):
    said: list[str] = []
    sink = Tracker(child("time.sleep(600)"), Path("run"), warn=said.append)
    sink(STEP)
    while not isinstance(sink._writer, ProcessWriter):
        threading.Event().wait(0.01)
    process = sink._writer.child
    monkeypatch.setattr(trackers, "CLOSING_SECONDS", 0.05)
    sink.close()
    assert process.has_ended
    assert "could not be finished within" in said[0]


def test_points_that_were_undone_are_hidden_after_a_rollback_and_a_resume(desk):
    rolled_back = {"event": "rolled_back", "step": 340, "to_step": 300, "skipped": [4]}
    resumed = {"event": "resumed", "step": 400, "path": "x"}
    first, second, third = desk.shown(STEP, rolled_back, STEP, resumed, STEP)
    assert (first.close.called, second.first_step, third.first_step) == (True, 301, 401)
    assert scalars(second)
    assert scalars(third)


def test_a_missing_package_is_reported_in_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told: list[str] = []
    assert open_trackers(TRACKERS, Path("run"), told.append) == []
    for name, text in zip(TRACKERS, told, strict=True):
        assert f"needs the Python package {name}" in text
        assert pip_install(name) in text


def test_tensorboard_reads_what_was_written(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    sink = Tracker(TRACKERS["tensorboard"], tmp_path, warn=pytest.fail)
    sink(STEP)
    sink(STEP | {"step": 20, "loss": 1.25})
    sink({"event": "eval", "time": 1001.0, "step": 20, "loss": 1.125})
    sink.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    points = {
        (value.tag, event.step): value.simple_value
        for event in loader.LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert points[("loss/train", 10)] == 1.5
    assert points[("loss/train", 20)] == 1.25
    assert points[("loss/eval", 20)] == 1.125


def test_curves_are_not_written_through_a_link_that_appears_while_a_run_lasts(desk, tmp_path):
    folder, elsewhere = tmp_path / "tensorboard", tmp_path / "photos"
    elsewhere.mkdir()
    desk.sink(STEP)
    while not desk.writers:
        threading.Event().wait(0.01)
    folder.symlink_to(elsewhere)
    assert len(desk.shown({"event": "rolled_back", "step": 5, "to_step": 3})) == 1
    assert f"{folder}: is a link" in desk.said[0]
