"""The process that measures rungs, when it crashes, hangs or talks nonsense."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.rig import Rig
from expert.jobs.rungs import QUICK, Work, _seconds_per_update
from tests.insight.ladders import measured

SEEN = {
    **{k: v for k, v in measured(5.0).model_dump().items() if k != "spread"},
    "windows": [4.0, 5.0, 8.0],
    **{"training_rows": 10, "held_out_rows": 2, "held_out_tokens": 20},
}
READY = """
import json, os, signal, sys, time
def say(**fact):
    print(json.dumps(fact), flush=True)
say(ready=1, environment={"python": "x"})
"""


def work(limit: float = 30.0) -> Work:
    pace = {**QUICK.__dict__, "limit_seconds": limit}
    return Work(
        name="x",
        plan={},
        manifest={},
        folder="",
        runs="",
        pace=pace,
        learnt=None,
        judged_in="fp32",
    )


def rig(tmp_path: Path, code: str) -> Rig:
    script = tmp_path / "server.py"
    script.write_text(READY + code, encoding="utf-8")
    return Rig(log=tmp_path / "log.txt", command=[sys.executable, str(script)])


def quiet(*_: Any) -> None:
    """Nobody is told."""


def test_what_was_seen_comes_back_with_its_spread(tmp_path):
    told: list[tuple[str, int, int]] = []
    code = f"""
for line in sys.stdin:
    say(doing="training", done=1, of=2)
    say(seen=json.loads({__import__("json").dumps(SEEN)!r}))
    say(ended=0)
"""
    with rig(tmp_path, code) as one:
        seen = one.measure(work(), lambda *words: told.append(words))
        again = one.measure(work(), quiet)
    assert seen.measured is not None
    assert (seen.measured.tokens_per_second, seen.measured.spread) == (5.0, 2.0)
    assert seen.counts == {"training_rows": 10, "held_out_rows": 2, "held_out_tokens": 20}
    assert told == [("starting", 0, 0), ("training", 1, 2)]
    assert again == seen
    assert one.environment == {"python": "x"}


def test_a_rung_that_fails_says_why(tmp_path):
    code = 'for line in sys.stdin:\n    say(failed="out of memory")\n    say(ended=1)\n'
    with rig(tmp_path, code) as one:
        assert one.measure(work(), quiet).because == "out of memory"


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_rung_that_crashes_names_the_signal_and_the_next_one_is_measured(tmp_path):
    code = f"""
for n, line in enumerate(sys.stdin):
    pid = os.fork()
    if pid == 0:
        if n == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        say(seen=json.loads({__import__("json").dumps(SEEN)!r}))
        os._exit(0)
    say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    with rig(tmp_path, code) as one:
        assert one.measure(work(), quiet).because == "its process was ended by SIGSEGV"
        assert one.measure(work(), quiet).measured is not None


def test_a_process_that_ended_between_two_rungs_is_started_again(tmp_path):
    code = f"""
sys.stdin.readline()
say(seen=json.loads({__import__("json").dumps(SEEN)!r}))
say(ended=0)
"""
    with rig(tmp_path, code) as one:
        for _ in range(2):
            assert one.measure(work(), quiet).measured is not None
            assert one._child is not None
            one._child.wait()


def test_a_rung_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    code = f"""
for n, line in enumerate(sys.stdin):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    time.sleep(600)
"""
    with rig(tmp_path, code) as one:
        assert one.measure(work(limit=1.5), quiet).because == "not done after 2 s"
        pid = int((tmp_path / "pid").read_text())
        for _ in range(100):
            if not _lives(pid):
                break
            time.sleep(0.05)
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_process_that_does_not_start_is_a_failed_rung_with_its_last_words(tmp_path):
    script = tmp_path / "server.py"
    script.write_text("raise SystemExit('no torch here')", encoding="utf-8")
    with Rig(log=tmp_path / "log.txt", command=[sys.executable, str(script)]) as one:
        assert one.measure(work(), quiet).because == "its process did not start: no torch here"


def test_a_process_that_leaves_in_the_middle_is_a_failed_rung(tmp_path):
    code = "for line in sys.stdin:\n    sys.exit(3)\n"
    with rig(tmp_path, code) as one:
        assert one.measure(work(), quiet).because == "its process ended"
        assert one.measure(work(), quiet).because == "its process ended"  # another one was started


def test_a_host_that_runs_ahead_does_not_make_updates_look_short():
    """Compiled in nine seconds, launched in 50 ms while the device was busy, then at its pace."""
    lines = [{"event": "step", "updates": 1, "seconds": seconds} for seconds in (9.0, 0.05, 0.6)]
    assert _seconds_per_update([*lines, {"event": "saved"}]) == 0.6
