"""Event files for TensorBoard, written with a stand-in and read back from the real thing."""

from __future__ import annotations

import math
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from expert.core.install import pip_install
from expert.telemetry.trackers import TRACKERS, Tracker, TrackerKind, TrackerUnavailable
from tests.core.forking import in_child
from tests.wording import wording

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


def kind_with(open) -> TrackerKind:
    return replace(TRACKERS["tensorboard"], open=open)


class FakeWriter:
    """Keeps what it is told; `full` makes every write fail as a full disk does."""

    def __init__(self, first_step: int | None = None) -> None:
        self.first_step = first_step
        self.scalars: list[tuple[str, float, int, float | None]] = []
        self.flushes = 0
        self.closed = False
        self.full = False

    def add_scalar(
        self, tag: str, scalar_value: float, global_step: int, walltime: float | None
    ) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.scalars.append((tag, scalar_value, global_step, walltime))

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.closed = True


class Desk:
    """A sink with its writers and what it said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.writers: list[FakeWriter] = []
        self.sink = Tracker(kind_with(self.make), Path("run"), warn=self.said.append)

    def make(self, folder: Path, first_step: int | None) -> FakeWriter:
        assert folder == Path("run/tensorboard")
        self.writers.append(FakeWriter(first_step))
        return self.writers[-1]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_step_becomes_one_point_of_every_curve_it_has_a_value_for(desk):
    desk.sink(STEP)
    assert desk.writers[0].scalars == [
        ("loss/train", 1.5, 10, 1000.0),
        ("rate", 2e-4, 10, 1000.0),
        ("grad_norm", 0.7, 10, 1000.0),
        ("tokens_per_second", 104_000.0, 10, 1000.0),
        ("gpu/utilization_percent", 98.0, 10, 1000.0),
    ]


def test_evaluations_have_curves_of_their_own(desk):
    desk.sink({"event": "eval", "step": 10, "loss": 1.25, "perplexity": 3.5, "best": True})
    assert desk.writers[0].scalars == [
        ("loss/eval", 1.25, 10, None),
        ("eval/perplexity", 3.5, 10, None),
    ]


def test_the_loss_on_test_rows_is_not_drawn_into_that_on_validation_rows(desk):
    asked = {"event": "eval", "step": 10, "perplexity": 3.5, "token_accuracy": 0.5}
    desk.sink({**asked, "loss": 1.25, "split": "validation"})
    desk.sink({**asked, "loss": 1.5, "split": "test"})
    assert [(tag, value) for tag, value, _, _ in desk.writers[0].scalars] == [
        ("loss/eval", 1.25),
        ("eval/perplexity", 3.5),
        ("eval/token_accuracy", 0.5),
        ("loss/test", 1.5),
        ("test/perplexity", 3.5),
        ("test/token_accuracy", 0.5),
    ]


def test_speed_and_memory_of_card_and_host_have_curves(desk):
    facts = {"steps_per_second": 2.5, "peak_reserved_bytes": 7, "cpu_peak_memory_bytes": 9}
    desk.sink({"event": "step", "step": 1, **facts})
    assert [(tag, value) for tag, value, _, _ in desk.writers[0].scalars] == [
        ("steps_per_second", 2.5),
        ("gpu/peak_memory_bytes", 7.0),
        ("cpu/peak_memory_bytes", 9.0),
    ]


def test_a_loss_that_is_no_number_is_drawn_as_such(desk):
    desk.sink({"event": "step", "step": 3, "loss": "nan"})
    [(tag, value, step, _)] = desk.writers[0].scalars
    assert (tag, step) == ("loss/train", 3)
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("event", "flushes"), [("eval", 1), ("saved", 1), ("finished", 1), ("stopped", 1), ("step", 0)]
)
def test_files_are_brought_up_to_date_at_the_moments_that_matter(desk, event, flushes):
    desk.sink({"event": event, "step": 5})
    assert desk.writers[0].flushes == flushes


def test_after_a_failure_it_says_so_once_and_is_silent(desk):
    desk.writers[0].full = True
    for _ in range(3):
        desk.sink(STEP)
    desk.sink.close()
    [sentence] = desk.said
    assert wording("no-longer-written-oserror") in sentence
    assert wording("has-all-values") in sentence


@pytest.mark.fault(7)
@pytest.mark.skipif(sys.platform == "win32", reason="a limit of POSIX on the size of files")
def test_the_thread_of_tensorboard_that_finds_no_room_prints_nothing(tmp_path, capfd):
    pytest.importorskip("tensorboard")

    def action() -> str:
        import resource

        said: list[str] = []
        sys.dont_write_bytecode = True  # it would be cut off by the limit
        threading.excepthook = threading.__excepthook__  # in place of that of pytest
        sink = Tracker(TRACKERS["tensorboard"], tmp_path, warn=said.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        for _ in range(500):  # more than is kept in memory: the thread itself writes
            sink(STEP)
        sink.close()
        return "\n".join(said)

    code, said = in_child(action)
    assert code == 0, said
    assert "File too large" in said
    assert len(said.splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_what_it_says_may_come_back_to_it_as_an_event():
    writer = FakeWriter()
    writer.full = True
    sink: Tracker
    heard = []

    def tell(text: str) -> None:
        heard.append(text)
        sink({"event": "warning", "text": text})

    sink = Tracker(kind_with(lambda folder, step: writer), Path("x"), warn=tell)
    sink(STEP)
    assert len(heard) == 1


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(desk):
    def refuse(folder: Path, first_step: int | None) -> FakeWriter:
        raise PermissionError(13, "Permission denied")

    sink = Tracker(kind_with(refuse), Path("x"), warn=desk.said.append)
    sink(STEP)
    sink.close()
    assert len(desk.said) == 1


def test_a_full_disk_at_the_end_is_said_not_raised(desk):
    desk.writers[0].full = True
    desk.sink.close()
    assert len(desk.said) == 1


def test_a_roll_back_hides_the_points_that_were_undone(desk):
    desk.sink({"event": "rolled_back", "step": 340, "to_step": 300, "skipped": [4]})
    desk.sink(STEP)
    first, second = desk.writers
    assert (first.closed, second.first_step) == (True, 301)
    assert second.scalars


def test_a_resumed_run_hides_points_after_its_checkpoint(desk):
    desk.sink({"event": "resumed", "step": 400, "path": "x"})
    desk.sink(STEP)
    first, second = desk.writers
    assert (first.closed, second.first_step) == (True, 401)
    assert second.scalars


def test_a_missing_package_is_reported_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        TrackerUnavailable, match=wording("needs-python-package-tensorboard")
    ) as caught:
        Tracker(TRACKERS["tensorboard"], tmp_path, warn=pytest.fail)
    assert pip_install("tensorboard") in str(caught.value)


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


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_curves_are_not_written_through_a_link_that_appears_while_a_run_lasts(tmp_path):
    folder, elsewhere = tmp_path / "tensorboard", tmp_path / "photos"
    elsewhere.mkdir()
    told: list[str] = []
    made: list[Path] = []

    def make(place: Path, first_step: int | None) -> FakeWriter:
        made.append(place)
        return FakeWriter(first_step)

    sink = Tracker(kind_with(make), folder.parent, warn=told.append)
    folder.symlink_to(elsewhere)
    sink({"event": "rolled_back", "step": 5, "to_step": 3})
    assert len(made) == 1
    assert wording("is-a-link-to-5", folder=folder, elsewhere=elsewhere) in told[0]
