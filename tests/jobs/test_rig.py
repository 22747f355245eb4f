"""The processes that measure rungs, when one crashes, hangs or talks nonsense."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from expert.core.process import Child
from expert.jobs.benchmark.rig import Begun, Rig, RungLost, Seat
from expert.jobs.benchmark.rungs import QUICK, Work, _seconds_per_update
from tests.insight.ladders import measured
from tests.wording import wording

BEGUN = {"seconds_per_update": 0.1, "updates_learnt": 5, "cores": 2, "threads": 2, "lowered": False}
WINDOW = {"first": 8, "updates": 4, "tokens": 100, "examples": 9, "seconds": 2.0, "others": 0.1}
STAMPED = ("spread", *("threads", "cores", "lowered"))
SEEN = {
    **{k: v for k, v in measured(5.0).model_dump().items() if k not in STAMPED},
    "windows": [4.0, 5.0, 8.0],
    **{"training_rows": 10, "held_out_rows": 2, "held_out_tokens": 20},
}
READY = f"""
import json, os, signal, sys, time
def say(**fact):
    print(json.dumps(fact), flush=True)
BEGUN, WINDOW, SEEN = json.loads({__import__("json").dumps([BEGUN, WINDOW, SEEN])!r})
def orders():
    say(begun=BEGUN)
    for line in iter(sys.stdin.readline, ""):
        do = json.loads(line)["do"]
        if do == "window":
            say(window=WINDOW)
        elif do == "tell":
            say(seen=SEEN)
        else:
            return
say(ready=1, environment={{"python": "x"}})
"""
GOOD = """
for line in iter(sys.stdin.readline, ""):
    say(doing="training", done=1, of=2)
    orders()
    say(ended=0)
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


@pytest.fixture
def seat_of(tmp_path):
    """Makes seats whose process runs some code; they are ended with the test."""
    made: list[Seat] = []

    def make(code: str) -> Seat:
        script = tmp_path / "server.py"
        script.write_text(READY + code, encoding="utf-8")
        made.append(Seat(log=tmp_path / "log.txt", command=[sys.executable, str(script)]))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def quiet(*_: Any) -> None:
    """Nobody is told."""


def test_a_rung_stands_ready_is_timed_tells_and_leaves(seat_of):
    told: list[tuple[str, int, int]] = []
    seat = seat_of(GOOD)
    for _ in range(2):  # the process stays for the next rung
        assert seat.begin(work(), lambda *words: told.append(words)) == Begun(**BEGUN)
        assert seat.taken
        assert seat.window(4, 2, quiet).rate == 50.0
        seen = seat.seen(quiet, stays=True)
        assert (seen.measured.tokens_per_second, seen.measured.spread) == (5.0, 2.0)
        assert (seen.measured.threads, seen.measured.cores) == (2, 2)
        assert seen.counts == {"training_rows": 10, "held_out_rows": 2, "held_out_tokens": 20}
        assert seat.window(4, 2, quiet).tokens == 100  # and is timed again
        seat.leave()
        assert not seat.taken
    assert told == [("starting", 0, 0), ("training", 1, 2), ("training", 1, 2)]
    assert seat.environment == {"python": "x"}


def test_a_rung_that_does_not_stay_has_gone_when_it_has_told(seat_of):
    seat = seat_of(
        """
for line in iter(sys.stdin.readline, ""):
    say(begun=BEGUN)
    sys.stdin.readline()
    say(seen=SEEN)
    say(ended=0)
"""
    )
    for _ in range(2):
        seat.begin(work(), quiet)
        assert seat.seen(quiet, stays=False).measured.tokens_per_second == 5.0
        assert not seat.taken


def test_two_rungs_live_beside_each_other(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(READY + GOOD, encoding="utf-8")
    with Rig(log=tmp_path / "log.txt", command=[sys.executable, str(script)]) as rig:
        one = rig.free_seat()
        one.begin(work(), quiet)
        other = rig.free_seat()
        other.begin(work(), quiet)
        assert one is not other
        assert one.window(4, 0, quiet) == other.window(4, 0, quiet)
        one.leave()
        assert rig.free_seat() is one
        assert rig.environment == {"python": "x"}


def test_a_rung_that_fails_says_why(seat_of):
    code = 'for line in sys.stdin:\n    say(failed="out of memory")\n    say(ended=1)\n'
    with pytest.raises(RungLost, match=wording("out-memory")):
        seat_of(code).begin(work(), quiet)


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_rung_that_crashes_names_the_signal_and_the_next_one_is_measured(seat_of):
    code = """
for n, line in enumerate(iter(sys.stdin.readline, "")):
    pid = os.fork()
    if pid == 0:
        if n == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        orders()
        os._exit(0)
    say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    seat = seat_of(code)
    with pytest.raises(RungLost, match=wording("process-ended-by")):
        seat.begin(work(), quiet)
    assert not seat.taken
    assert seat.begin(work(), quiet) == Begun(**BEGUN)


REAL = """
import os
from pathlib import Path
import expert.run.build
import expert.jobs.benchmark.rung_server as server, expert.jobs.benchmark.rungs as rungs

def measure(work, say, hear):
    Path({pid!r}).write_text(str(os.getpid()))
    say({{"begun": {begun!r}}})
    while (order := hear()).do == "window":
        say({{"window": {window!r}}})

expert.run.build.environment = dict
server._import_everything = lambda: None
rungs.measure = measure
server.main()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without forks a server measures one rung")
@pytest.mark.parametrize(
    "order",
    ["window", *(pytest.param(name, marks=pytest.mark.slow) for name in ("seen", "leave"))],
)
def test_a_rung_that_dies_while_it_stands_still_spoils_no_later_one(tmp_path, order):
    script, pid = tmp_path / "server.py", tmp_path / "pid"
    script.write_text(REAL.format(pid=str(pid), begun=BEGUN, window=WINDOW), encoding="utf-8")
    seat = Seat(log=tmp_path / "log.txt", command=[sys.executable, str(script)])
    try:
        seat.begin(work(), quiet)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        if order == "leave":
            seat.leave()
        else:
            with pytest.raises(RungLost, match=wording("process-ended-by-sigkill")):
                _order(seat, order)
        assert not seat.taken
        for _ in range(2):
            assert seat.begin(work(), quiet) == Begun(**BEGUN)
            assert seat.window(4, 0, quiet).tokens == 100
            seat.leave()
    finally:
        seat.stop()


def _order(seat: Seat, order: str) -> None:
    if order == "window":
        seat.window(4, 0, quiet)
    else:
        seat.seen(quiet, stays=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="without forks a server measures one rung")
def test_a_server_passes_over_an_order_for_a_rung_that_has_gone(tmp_path):
    script, pid = tmp_path / "server.py", tmp_path / "pid"
    script.write_text(REAL.format(pid=str(pid), begun=BEGUN, window=WINDOW), encoding="utf-8")
    child = Child([sys.executable, str(script)], log=tmp_path / "log.txt")
    try:
        child.ask({"do": "window", "updates": 4, "skip": 0})
        child.ask({"no": "work"})
        soon = time.monotonic() + 60
        said = [child.next(soon) for _ in range(3)]
    finally:
        child.stop()
    assert [next(iter(fact or {"nothing": 0})) for fact in said] == ["ready", "failed", "ended"]


def test_a_process_that_ended_between_two_rungs_is_started_again(seat_of):
    seat = seat_of("sys.stdin.readline()\norders()\nsay(ended=0)\n")
    for _ in range(2):
        seat.begin(work(), quiet)
        seat.leave()
        assert seat._child is not None
        seat._child.wait()


def test_a_rung_that_goes_on_slowly_is_not_given_up(seat_of):
    code = """
sys.stdin.readline()
for n in range(4):
    time.sleep(0.5)
    say(doing="training", done=n, of=0)
orders()
"""
    assert seat_of(code).begin(work(limit=1.5), quiet) == Begun(**BEGUN)


def test_a_rung_that_hangs_is_ended_with_all_that_it_started(seat_of, tmp_path):
    code = f"""
for n, line in enumerate(sys.stdin):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
    time.sleep(600)
"""
    with pytest.raises(RungLost, match="silent for 2 s"):
        seat_of(code).begin(work(limit=1.5), quiet)
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


def test_a_process_that_does_not_start_is_a_lost_rung_with_its_last_words(tmp_path):
    script = tmp_path / "server.py"
    script.write_text("raise SystemExit('no torch here')", encoding="utf-8")
    seat = Seat(log=tmp_path / "log.txt", command=[sys.executable, str(script)])
    with pytest.raises(RungLost, match=wording("process-did-not-start")):
        seat.begin(work(), quiet)


def test_a_process_that_leaves_in_the_middle_is_a_lost_rung(seat_of):
    seat = seat_of("for line in sys.stdin:\n    sys.exit(3)\n")
    for _ in range(2):  # another one was started
        with pytest.raises(RungLost, match=wording("its-process-ended")):
            seat.begin(work(), quiet)


def test_a_host_that_runs_ahead_does_not_make_updates_look_short():
    """Compiled in nine seconds, launched in 50 ms while the device was busy, then at its pace."""
    lines = [{"event": "step", "updates": 1, "seconds": seconds} for seconds in (9.0, 0.05, 0.6)]
    assert _seconds_per_update([*lines, {"event": "saved"}]) == 0.6
