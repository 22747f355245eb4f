"""Ranks of one machine, started by torch elastic: real processes that fail, and are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expert.core.errors import EXIT_NO_SPACE, EXIT_OK, EXIT_RUN_FAILED, EXIT_TERMINATED, EXIT_USAGE
from expert.jobs.launch import ranks
from expert.jobs.launch.cards import Cards
from expert.jobs.launch.each_gpu import train_each
from expert.jobs.launch.ranks import (
    COMMAND_VARIABLE,
    Ended,
    Stop,
    documented_exit_code,
    run_ranks,
    train_on_ranks,
)
from tests.cli.running import ROOT
from tests.jobs.runs import until

# torch leaves the log files of its processes open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
RANK = """
import os, signal, sys, time
from pathlib import Path
from expert.core.world import record_failure
from expert.parallel.launch import stop_with_parent
stop_with_parent()
words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
what = words.get(os.environ["RANK"], words.get("all", ""))
name, _, value = what.partition(":")
if name == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    Path(value, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)
elif name == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif name == "follow":
    while not Path(value).exists():  # the other one fails first
        time.sleep(0.05)
    record_failure("lost the other", exit_code=4, of_another=True)
    sys.exit(4)
elif name == "fail":
    code, _, mark = value.partition(":")
    record_failure("trouble here", exit_code=int(code))
    if mark:
        Path(mark).touch()
        time.sleep(0.3)  # another one ends before it
    sys.exit(int(code))
elif name == "once" and not Path(value).exists():
    Path(value).touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


def ended(folder: Path, *what: str) -> Ended:
    return run_ranks([sys.executable, "-c", RANK, *what], 2, folder, Stop())


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ((), EXIT_OK, ""),
        (("1=kill",), EXIT_RUN_FAILED, "rank 1 was killed by SIGKILL: "),
        (
            ("1=fail:75:MARK", "0=follow:MARK"),
            EXIT_NO_SPACE,
            "rank 1 ended with code 75: trouble here",
        ),
        (("1=fail:9",), EXIT_RUN_FAILED, "rank 1 ended with code 9: trouble here"),
    ],
)
def test_the_exit_code_and_the_message_are_those_of_the_rank_that_failed_first(
    what, code, message, tmp_path
):
    mark = str(tmp_path / "mark")
    found = ended(tmp_path, *(word.replace("MARK", mark) for word in what))
    assert found.exit_code == code
    assert found.message.startswith(message)


def restarted(monkeypatch, *what: str) -> tuple[Ended, list[str]]:
    """How ranks end that may be started again twice, and what the user is told."""
    told: list[str] = []
    monkeypatch.setattr(ranks, "PROGRAM", (sys.executable, "-c", RANK))
    for name in ("EXPERT_LAUNCH_FOLDER", COMMAND_VARIABLE, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    cards = Cards(visible=(), ranks=2, threads=1)
    return train_on_ranks(["x", *what], cards, max_restarts=2, tell=told.append), told


def test_all_ranks_start_again_after_a_crash_but_not_after_a_wrong_manifest(tmp_path, monkeypatch):
    found, told = restarted(monkeypatch, f"1=once:{tmp_path / 'mark'}")
    assert found.exit_code == EXIT_OK
    assert [text.partition(":")[0] for text in told] == [
        "rank 1 was killed by SIGKILL",
        "starting all ranks again (1 of 2)",
    ]
    found, told = restarted(monkeypatch, f"1=fail:{EXIT_USAGE}")
    assert (found.exit_code, len(told)) == (EXIT_USAGE, 1)


def started(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A launcher in its own process, and the process ids of its ranks, which wait for a signal."""
    program = (
        "import sys; from pathlib import Path; from expert.jobs.launch.ranks import *; "
        "sys.exit(run_ranks(sys.argv[2:], 2, Path(sys.argv[1]), Stop()).exit_code)"
    )
    words = [sys.executable, "-c", program, str(folder), sys.executable, "-c", RANK]
    process = subprocess.Popen([*words, f"all=wait:{folder}"])
    files = [folder / str(rank) for rank in range(2)]
    until(lambda: all(file.is_file() and file.read_text() for file in files) or None, 60)
    return process, [int(file.read_text()) for file in files]


def are_gone(pids: list[int]) -> bool | None:
    return not any(Path(f"/proc/{pid}").is_dir() for pid in pids) or None


def test_a_signal_to_the_launcher_reaches_every_rank_and_is_its_exit_code(tmp_path):
    process, pids = started(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == EXIT_TERMINATED
    assert are_gone(pids)


def test_ranks_do_not_outlive_a_launcher_that_was_killed_not_even_a_stopped_one(tmp_path):
    process, pids = started(tmp_path)
    os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait(60)
    until(lambda: are_gone(pids), 30)


def test_documented_exit_codes_are_kept_and_signals_have_one():
    codes = (0, 2, 75, 143, -15, -2, -9, 57)
    assert [documented_exit_code(code) for code in codes] == [0, 2, 75, 143, 143, 130, 4, 4]


# --- one run for each GPU ------------------------------------------------------------------------

RUN = """
import json, os, sys
file = sys.argv[2]
print(json.dumps({"folder": file, "place": os.environ["PLACE"]}))
sys.stderr.write("all is well\\nno rows\\n")
sys.exit(2 if "bad" in file else 0)
"""


def test_each_manifest_is_trained_on_a_free_place_and_a_failure_stops_no_other(monkeypatch):
    from expert.jobs.launch import each_gpu

    monkeypatch.setattr(each_gpu, "PROGRAM", (sys.executable, "-c", RUN))
    told: list[str] = []
    files = [Path(name) for name in ("a.json", "bad.json", "b.json")]
    places = [{"PLACE": "0"}, {"PLACE": "1"}]
    runs, code = train_each(files, ["--epochs", "1"], places, tell=told.append)
    assert code == EXIT_USAGE
    assert [run.code for run in runs] == [0, 2, 0]
    assert runs[1].text == "ended with code 2: no rows"
    assert [run.result["folder"] for run in runs] == [str(file) for file in files]
    assert {run.result["place"] for run in runs} == {"0", "1"}
    assert len(told) == 6
