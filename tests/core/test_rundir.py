"""Every run has its own folder, used by one trainer at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from expert.core.publish import publishing, weights_hash
from expert.core.rundir import (
    RunFolder,
    RunFolderError,
    latest_run,
    named_manifest,
    outdated,
    relocated_path,
)
from tests.core.forking import fork
from tests.each import each

NOON = time.mktime((2026, 5, 4, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "sql", clock=lambda: NOON)


def started(parent: Path, name: str) -> RunFolder:
    (parent / name).mkdir(parents=True)
    (parent / name / "plan.json").write_text("{}")
    return RunFolder(parent / name)


def test_a_run_is_named_after_the_expert_and_the_time_and_many_get_folders_of_their_own(tmp_path):
    def create(_: int) -> Path:
        return RunFolder.create(tmp_path / "runs", "sql", clock=lambda: NOON).path

    names = ["sql-20260504-120000", "sql-20260504-120000-2", "sql-20260504-120000-3"]
    assert [create(n) for n in range(3)] == [tmp_path / "runs" / name for name in names]
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(create, range(40)))
    assert len(made) == 40
    assert all(path.is_dir() for path in made)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be written: .+training\.config"):
        RunFolder.create(tmp_path / "file" / "runs", "sql")


@each(
    ("expert", "name"),
    [("../../etc", "etc"), ("a b/c", "a-b-c"), ("..", "expert"), ("", "expert"), ("Ünit", "Ünit")],
)
def test_a_name_never_leaves_the_folder(tmp_path: Path, expert: str, name: str):
    run = RunFolder.create(tmp_path, expert, clock=lambda: NOON)
    assert run.path == tmp_path / f"{name}-20260504-120000"


@pytest.mark.fault(30)
def test_the_latest_run_is_found_by_the_time_in_its_name(tmp_path: Path):
    assert latest_run(tmp_path / "none", "sql") is None
    assert latest_run(tmp_path, "sql") is None
    for name in (
        "sql-20260504-120000-2",
        "sql-20260504-120000-10",
        "sql-20260504-120000",
        "sql-20251231-235959",
        "sql-fast-20270101-000000",
        "sql-20270101",
        "20270101-000000",
    ):
        started(tmp_path, name)
    (tmp_path / "sql-20280101-000000").mkdir()  # ended before it had a plan
    os.utime(tmp_path / "sql-20251231-235959", (NOON * 2, NOON * 2))
    latest = latest_run(tmp_path, "sql")
    assert latest
    assert latest.path.name == "sql-20260504-120000-10"
    fast = latest_run(tmp_path, "sql-fast")
    assert fast
    assert fast.path.name == "sql-fast-20270101-000000"


@pytest.mark.fault(30)
def test_a_living_holder_is_respected_and_a_dead_one_is_not(run: RunFolder):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom expert.core.rundir import RunFolder\n"
        f"with RunFolder(Path({str(run.path)!r})).locked():\n"
        "    print('locked', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "locked\n"
        try:
            for _ in range(2):  # checking must not release the lock
                held = pytest.raises(RunFolderError, match=f"process {process.pid} on")
                with held as refused, run.locked():
                    pass
                advice = f"stop that process first; if it is surely gone, remove {run.lock_file}"
                assert f"{run.path}: is in use by process" in str(refused.value)
                assert advice in str(refused.value)
        finally:
            process.send_signal(signal.SIGKILL)
    assert json.loads(run.lock_file.read_text())["pid"] == process.pid
    with run.locked():
        assert json.loads(run.lock_file.read_text())["pid"] == os.getpid()
    assert not run.lock_file.exists()


def test_a_worker_that_outlives_its_trainer_does_not_keep_the_lock(run: RunFolder):
    reader, writer = os.pipe()
    worker_begins, worker_began = os.pipe()

    def trainer() -> None:
        with run.locked():
            worker = os.fork()
            if worker == 0:
                os.write(worker_began, b"x")
                os.read(reader, 1)  # lives until the test releases it
                os._exit(0)
            # A forked process that has not run yet still holds the locks of its parent.
            os.read(worker_begins, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        # The worker holds the pipe of the helper open, so this forks by hand.
        child = fork()
        if child == 0:
            trainer()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with run.locked():
            pass
    finally:
        os.write(writer, b"x")
        for descriptor in (writer, reader, worker_begins, worker_began):
            os.close(descriptor)


@pytest.mark.fault(30)
def test_a_folder_that_cannot_be_written_is_reported(run: RunFolder, tmp_path: Path):
    run.lock_file.mkdir()
    refused = pytest.raises(RunFolderError, match=r"cannot be written: Is a directory  \(")
    with refused, run.locked():
        pass
    gone = RunFolder(tmp_path / "none")
    with pytest.raises(RunFolderError, match="there is no such folder"), gone.locked():
        pass


def test_a_folder_nobody_wrote_to_is_removed_and_no_other(tmp_path: Path):
    unused, used = (RunFolder.create(tmp_path, name) for name in ("a", "b"))
    with unused.locked():
        pass
    used.write_json("plan.json", {})
    (used.path / "curves").mkdir()
    for folder in (unused, used, RunFolder(tmp_path / "nowhere")):
        folder.remove_if_unused()
    assert [path.name for path in tmp_path.iterdir()] == [used.path.name]
    assert (used.path / "curves").is_dir()


def test_a_manifest_is_named_where_it_still_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "demo" / "manifest.json"
    assert named_manifest({"manifest": str(file)}) == named_manifest({}) == "FILE"
    file.parent.mkdir()
    file.write_text("{}")
    assert named_manifest({"manifest": str(file)}) == str(file)
    monkeypatch.chdir(tmp_path)
    assert named_manifest({"manifest": str(file)}) == str(Path("demo", "manifest.json"))


# --- recorded paths, from any working directory and after a move ---------------------------------


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def test_what_was_recorded_from_another_folder_is_found_beside_the_runs(tmp_path, monkeypatch):
    cache = made(tmp_path / "fruit" / "datasets_optimized" / "fruit")
    runs = made(tmp_path / "fruit" / "runs")
    monkeypatch.chdir(tmp_path / "fruit")
    for recorded, place in (("fruit/datasets_optimized/fruit", cache), ("fruit/runs", runs)):
        found = relocated_path(recorded, runs_then="fruit/runs", runs_now=Path("runs"))
        assert found == place


def test_what_was_moved_with_its_runs_is_found_and_a_copy_has_its_own(tmp_path):
    old, new = tmp_path / "fruit", tmp_path / "deep" / "pears"
    recorded = str(old / "datasets_optimized")
    # Deleted tokens would be prepared again beside the moved runs.
    for home in ((), (old, new)):
        for place in home:
            made(place / "datasets_optimized")
        found = relocated_path(recorded, runs_then=str(old / "runs"), runs_now=new / "runs")
        assert found == new / "datasets_optimized"


def test_paths_outside_the_runs_folder_are_not_relocated(tmp_path):
    cache, now = tmp_path / "large-disk" / "tokens", tmp_path / "a" / "b" / "c" / "runs"
    for runs_then in (str(tmp_path / "fruit" / "runs"), "fruit/runs"):
        assert relocated_path(str(cache), runs_then=runs_then, runs_now=now) == cache
        cache.mkdir(parents=True, exist_ok=True)
        assert relocated_path(str(cache), runs_then=runs_then, runs_now=now) == cache


# --- a validation.json is valid only for the weights it judged ------------------------------------

OTHER = "is about earlier weights: the run continued since"


def state(path: Path, weights: bytes, **others: str) -> Path:
    with publishing(path) as folder:
        (folder / "model.safetensors").write_bytes(weights)
        for name, text in others.items():
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a final state and a checkpoint."""
    run = RunFolder(tmp_path / "demo")
    state(run.final, b"first")
    state(run.checkpoints / "step-000004", b"half way")
    run.validation.write_text("{}", encoding="utf-8")
    return run


def test_the_hash_is_that_of_the_weights_alone(tmp_path):
    one = weights_hash(state(tmp_path / "one", b"same", config="a"))
    assert one == weights_hash(state(tmp_path / "two", b"same", config="b"))
    assert one != weights_hash(state(tmp_path / "three", b"other", config="a"))
    assert len(one) == 64
    assert weights_hash(tmp_path / "nothing") == ""


def test_a_verdict_holds_for_the_state_it_names(folder):
    final = {"step": None, "weights": weights_hash(folder.final)}
    half = {"step": 4, "weights": weights_hash(folder.checkpoints / "step-000004")}
    assert outdated(final, folder) == outdated(half, folder) == ""
    assert outdated({**final, "step": 4}, folder) == OTHER
    assert outdated({**half, "step": 5}, folder) == OTHER  # that checkpoint does not exist
    folder.final.rename(folder.path / ".old-final")
    assert outdated(final, folder) == OTHER
    state(folder.final, b"second")
    assert outdated(final, folder) == OTHER
