"""One run for each card: the queue, a failure that stops no other, a signal that reaches all."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from expert.core.errors import EXIT_NO_SPACE, EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from expert.jobs.launch import each_gpu
from expert.jobs.launch.each_gpu import QueuedRun, train_each, worst_exit_code
from tests.jobs.runs import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")

PROGRAM = """
import json, os, signal, sys, time
manifest, words = sys.argv[2], sys.argv[3:]
asked = json.load(open(manifest))
print("step 1/2", file=sys.stderr, flush=True)
open(manifest + ".started", "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
def stop(number, frame):
    time.sleep(0.1)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, stop)
time.sleep(asked.get("sleep", 0))
print(json.dumps({"steps": 2, "loss": 1.5, "words": words}))
print("the end", file=sys.stderr)
if asked.get("kill"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(asked.get("code", 0))
"""
PLACES = [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}]


@pytest.fixture(autouse=True)
def program(monkeypatch, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(each_gpu, "PROGRAM", (sys.executable, str(file)))
    monkeypatch.setattr(each_gpu, "SECONDS_BETWEEN_LOOKS", 0.02)


def manifests(folder: Path, *asked: dict[str, object]) -> list[Path]:
    files = [folder / f"m{place}.json" for place in range(len(asked))]
    for file, content in zip(files, asked, strict=True):
        file.write_text(json.dumps(content))
    return files


def test_every_manifest_has_a_card_alone_and_the_others_wait_for_a_free_one(tmp_path):
    files = manifests(tmp_path, {"sleep": 0.3}, {}, {}, {})
    most: list[int] = []

    def show(runs: list[QueuedRun]) -> None:
        most.append(sum(run.state == "running" for run in runs))

    runs, code = train_each(files, ["--epochs", "2"], PLACES, show=show)
    assert code == EXIT_OK
    assert max(most) == 2
    assert [run.name for run in runs] == ["m0", "m1", "m2", "m3"]
    assert [run.text for run in runs] == ["finished"] * 4
    for run, file in zip(runs, files, strict=True):
        assert run.place is not None
        card = PLACES[run.place]["CUDA_VISIBLE_DEVICES"]
        assert Path(f"{file}.started").read_text() == card
        assert run.result == {"steps": 2, "loss": 1.5, "words": ["--json", "--epochs", "2"]}
        assert not run.log.exists()


def test_a_failed_run_stops_no_other_and_the_worst_exit_code_is_returned(tmp_path):
    files = manifests(tmp_path, {"code": EXIT_USAGE}, {"kill": True}, {}, {"code": EXIT_NO_SPACE})
    runs, code = train_each(files, [], PLACES[:1], show=lambda runs: None)
    assert code == EXIT_RUN_FAILED
    assert [run.code for run in runs] == [EXIT_USAGE, EXIT_RUN_FAILED, EXIT_OK, EXIT_NO_SPACE]
    assert runs[1].text.endswith("SIGKILL: the end")
    assert runs[3].log.read_text() == "step 1/2\nthe end\n"
    assert worst_exit_code([]) == EXIT_OK


def test_a_signal_reaches_all_that_run_and_nothing_else_is_started(tmp_path):
    files = manifests(tmp_path, {"sleep": 60}, {"sleep": 60}, {})

    def stop() -> None:
        until(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    runs, code = train_each(files, [], PLACES, show=lambda runs: None)
    assert code == 143
    assert [(run.state, run.code) for run in runs] == [
        ("ended", 143),
        ("ended", 143),
        ("not started", None),
    ]


def test_names_of_runs_are_short_and_unique():
    def names(*files: str) -> list[str]:
        return each_gpu._names([Path(file) for file in files])

    assert names("a/sql.json", "b/csv.json") == ["sql", "csv"]
    assert names("a/manifest.json", "b/manifest.json") == ["a", "b"]
    assert names("a/m.json", "x/a/m.json") == ["m-0", "m-1"]
