"""Real child processes that answer in lines of JSON, and filtered lines on standard error."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

import psutil
import pytest

from expert.core.process import Child, filtered_stderr

PATIENCE = 60.0


@pytest.fixture
def begun():
    """Starts processes from Python code, and ends them after the test."""
    made: list[Child] = []

    def begin(code: str, **more) -> Child:
        made.append(Child([sys.executable, "-c", f"import json, os, sys\n{code}"], **more))
        return made[-1]

    yield begin
    for child in made:
        child.stop()


def soon() -> float:
    return time.monotonic() + PATIENCE


def test_it_answers_what_it_is_asked_and_lines_of_others_are_passed_over(begun):
    child = begun(
        """print("a library's line"); print("[1]")\n"""
        "for line in sys.stdin: print(json.dumps({'got': json.loads(line)}), flush=True)"
    )
    for number in (1, 2):
        assert child.ask({"number": number})
        assert child.next(soon()) == {"got": {"number": number}}
    assert child.next(time.monotonic() + 0.05) is None  # a silent process is not waited for
    assert not child.has_ended


def test_stderr_tail_and_exit_are_reported(begun, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("before\n", encoding="utf-8")
    child = begun("print('one', file=sys.stderr); sys.exit('two')", log=log)
    assert child.next(soon()) is None
    assert child.wait() == 1
    assert child.has_ended
    assert child.ask({"anybody": "there"}) is False
    assert child.stderr_tail() == "two"
    assert child.stderr_tail(2) == "one / two"
    child.stop()
    assert child.stderr_tail() == "two"
    assert log.read_text(encoding="utf-8") == "before\none\ntwo\n"


def test_grandchildren_are_killed_with_the_child(begun):
    child = begun(
        "import subprocess\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'pid': other.pid}), flush=True); sys.stdin.read()"
    )
    told = child.next(soon())
    assert told is not None
    assert child.stop() == -9
    for _ in range(600):
        try:
            os.kill(told["pid"], 0)
        except ProcessLookupError:
            return
        if psutil.Process(told["pid"]).status() == psutil.STATUS_ZOMBIE:
            return  # it has ended, and its exit code was not collected
        time.sleep(0.1)
    pytest.fail("it still runs")


def test_lines_written_past_python_are_left_out_and_others_come_in_order_whatever_is_raised(capfd):
    with suppress(ValueError), filtered_stderr(b"USDT:"):
        os.write(2, b"USDT:2026 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\n")
        os.write(2, b"ERROR: the card is gone\n")
        os.write(2, b"a warning\n")
        raise ValueError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "ERROR: the card is gone\na warning\nafter\n"
