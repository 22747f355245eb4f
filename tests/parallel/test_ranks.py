"""Ranks of one machine: real processes that fail, hang, are killed and are asked to stop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expert.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_NO_SPACE,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from expert.parallel import ranks
from expert.parallel.ranks import Ended, documented_exit_code, start_ranks
from tests.warm import python

pytestmark = pytest.mark.skipif(os.name != "posix", reason="ranks are started on POSIX systems")

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(Path(__file__).with_name("rank_program.py"))]
ENV = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
PATIENCE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    monkeypatch.setattr(ranks, "FAILURE_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(ranks, "EXIT_GRACE_SECONDS", 0.5)


def started(
    *what: str, number: int = 2, restarts: int = 0, interpreter: str = sys.executable
) -> tuple[Ended, list[str]]:
    """How ranks that run these words ended, and what was told."""
    told: list[str] = []

    def command(run: Path | None) -> list[str]:
        return [
            interpreter,
            PROGRAM[1],
            *what,
            *([f"all:say=resumes {run}"] if run is not None else []),
        ]

    ended = start_ranks(command, number, env=ENV, max_restarts=restarts, tell=told.append)
    return ended, told


def test_ranks_find_each_other_and_the_first_one_has_the_terminal(capfd):
    ended, told = started("all:sum", "1:say=unseen", interpreter=python())
    assert (ended.exit_code, told) == (EXIT_OK, [])
    assert capfd.readouterr().out == "sum 3\n"


def test_a_rank_that_is_killed_ends_all_and_is_named_first():
    ended, told = started("1:kill", "0:hang", "2:hang", number=3)
    assert ended.exit_code == EXIT_RUN_FAILED
    assert told[0] == (
        "rank {rank} was killed by {signal}: the system ends processes like "
        "this when its memory is full: see dmesg"
    ).format(rank=1, signal="SIGKILL")


def test_a_rank_that_does_not_answer_is_named_by_those_that_wait_for_it_and_ended(tmp_path):
    there = tmp_path / "there"
    hangs = ("1:say=in-vain", f"1:once={there}", "1:hang")
    ended, told = started(*hangs, f"0:after={there}", "0:blame=1")
    assert ended.exit_code == EXIT_RUN_FAILED
    message, log = told[0].splitlines()
    assert message == "silence-of 1"
    assert Path(log.split(": ")[1]).read_text().startswith("in-vain")


def test_ranks_that_are_started_again_know_where_those_before_left_their_failure(tmp_path):
    run, last = tmp_path / "run", tmp_path / "last"
    words = (f"0:run={run}", f"0:last={last}", "all:fail=4")
    started(*words, restarts=1)
    assert last.read_text() == str(run / "ranks" / "failure.json")


@pytest.mark.parametrize("code", [EXIT_USAGE, EXIT_NO_SPACE])
def test_the_exit_code_and_the_message_are_those_of_the_rank_that_failed(code):
    ended, told = started(f"1:fail={code}", "0:hang")
    assert ended.exit_code == code
    assert told == [
        "rank {rank} ended with code {code}: {message}".format(
            rank=1, code=code, message="trouble-at 1"
        )
    ]


def test_without_a_message_the_last_error_of_the_log_is_shown():
    ended, told = started("1:say=ValueError: row-7 broken", "1:say=good bye", "1:exit=7", "0:hang")
    assert ended.exit_code == EXIT_RUN_FAILED
    head, where = told[0].splitlines()
    error = "ValueError: row-7 broken"
    assert head == f"rank {1} ended with code {7}: {error}"
    assert Path(where.split(": ")[1]).read_text() == "ValueError: row-7 broken\ngood bye\n"


def test_of_ranks_that_fail_together_the_first_message_counts_and_a_signal_before_it():
    _, told = started("2:fail=4", "all:fail=4", number=3)
    assert len(told) == 1
    _, told = started("1:kill", "all:fail=4", number=3)
    assert len(told) == 1


def test_the_log_of_a_rank_is_in_the_run_folder_with_what_it_wrote_before(tmp_path):
    run = tmp_path / "run"
    ended, _ = started("all:say=early", f"all:run={run}", "all:say=late", "all:exit=0", number=3)
    assert ended == Ended(exit_code=EXIT_OK, run=run)
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["rank-1.log", "rank-2.log"]
    assert (run / "ranks" / "rank-2.log").read_text() == "early\nlate\n"


def test_ranks_that_keep_failing_are_started_again_as_often_as_asked(tmp_path):
    words = tmp_path / "words"
    ended, told = started(f"all:words={words}", "1:kill", restarts=2)
    assert ended.exit_code == EXIT_RUN_FAILED
    assert told[1::2] == [
        f"starting all ranks again ({1} of {2})",
        f"starting all ranks again ({2} of {2})",
    ]
    assert len(words.read_text().splitlines()) == 6


def test_a_restart_that_ends_well_is_a_good_end(tmp_path):
    mark, words, run = tmp_path / "mark", tmp_path / "words", tmp_path / "run"
    what = (f"all:words={words}", f"0:run={run}", f"1:once={mark}", "1:kill")
    ended, told = started(*what, restarts=1)
    assert ended == Ended(exit_code=EXIT_OK, run=run)
    assert len(told) == 2
    lines = words.read_text().splitlines()
    assert sorted(line.endswith(f"resumes {run}") for line in lines) == [False, False, True, True]


@pytest.mark.parametrize("code", [EXIT_USAGE, EXIT_NO_SPACE, EXIT_TERMINATED])
def test_what_a_restart_cannot_help_is_not_started_again(tmp_path, code):
    words = tmp_path / "words"
    ended, _ = started(f"all:words={words}", f"1:exit={code}", "0:wait", restarts=3)
    assert ended.exit_code == code
    assert len(words.read_text().splitlines()) == 2


def test_a_rank_that_stays_after_the_first_has_ended_is_killed_and_named():
    ended, told = started("1:hang")
    assert (ended.exit_code, told) == (EXIT_OK, [f"rank {1} did not exit and was killed"])


def test_documented_exit_codes_are_kept_and_signals_have_one():
    assert [documented_exit_code(code) for code in (0, 2, 75, 143, -15, -2, -9, 57)] == [
        *(EXIT_OK, EXIT_USAGE, EXIT_NO_SPACE, EXIT_TERMINATED, EXIT_TERMINATED),
        *(EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_RUN_FAILED),
    ]


# --- a parent of its own, which is asked to stop -------------------------------------------------

PARENT = """
import sys
from pathlib import Path
from expert.parallel.ranks import start_ranks
words = sys.argv[1:]
sys.exit(start_ranks(
    lambda run: words, 2, env={}, tell=lambda text: sys.stderr.write(text + "\\n")).exit_code)
"""


def parent(*what: str, **more: object) -> subprocess.Popen[bytes]:
    env = {**os.environ, **ENV}
    words = [python(), "-c", PARENT, *PROGRAM, *what]
    return subprocess.Popen(words, env=env, **more)  # type: ignore[call-overload,no-any-return]


def wait_for(path: Path, lines: int = 1) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not path.is_file() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_signal_goes_to_every_rank_once_and_they_may_take_their_time(tmp_path, number, code):
    run = tmp_path / "run"
    process = parent(f"all:run={run}", "all:wait", stdout=subprocess.PIPE)
    wait_for(run / "ranks" / "rank-1.log")
    assert process.stdout is not None
    assert process.stdout.readline() == b"rank 0 waits\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out.decode()) == (code, f"asked by {number.value}\n")
    log = (run / "ranks" / "rank-1.log").read_text()
    assert log == f"rank 1 waits\nasked by {number.value}\n"


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(tmp_path):
    run = tmp_path / "run"
    process = parent(f"all:run={run}", "all:hang", stdout=subprocess.PIPE)
    wait_for(run / "ranks" / "rank-1.log")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == EXIT_INTERRUPTED


@pytest.mark.slow
def test_ranks_whose_parent_was_killed_are_asked_to_stop(tmp_path):
    run = tmp_path / "run"
    process = parent(f"all:run={run}", "all:wait", stdout=subprocess.PIPE)
    log = run / "ranks" / "rank-1.log"
    wait_for(log)
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)  # ends when the first rank has closed it
    wait_for(log, lines=2)
    assert log.read_text() == f"rank 1 waits\nasked by {signal.SIGTERM.value}\n"


def test_in_a_terminal_ctrl_c_reaches_each_rank_once(tmp_path):
    """The first rank writes to the terminal itself, and the key sends one signal."""
    run = tmp_path / "run"
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV)
        words = [*PROGRAM, f"all:run={run}", "all:wait"]
        os.execv(sys.executable, [sys.executable, "-c", PARENT, *words])
    wait_for(run / "ranks" / "rank-1.log")
    seen = b""
    while b"rank 0 waits" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    seen += os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == EXIT_INTERRUPTED
    assert seen.count(b"asked by 2") == 1
    assert (run / "ranks" / "rank-1.log").read_text() == "rank 1 waits\nasked by 2\n"
