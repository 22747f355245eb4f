"""A process that hangs ends with its stacks; one that is slow, stopped or busy does not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from expert.core.errors import EXIT_HUNG
from expert.parallel.hang import NO_LIMIT, STARTING_PUSHES, HangTimer
from tests.each import each
from tests.forked import forked

LIMIT = 60.0


def patience(pushes: int, longest: float = 0.0, extra: float = 0.0) -> float:
    timer = HangTimer(Path("unused"), lambda text: None, limit=LIMIT, computes=False)
    timer.close()
    timer._pushes, timer._longest, timer._extra = pushes, longest, extra
    return timer._patience()


@each(
    ("pushes", "more", "seconds"),
    [
        (0, {}, 10 * LIMIT),  # the first steps compile
        (STARTING_PUSHES, {}, LIMIT),
        (STARTING_PUSHES, {"longest": 15.0}, LIMIT + 30),
        (STARTING_PUSHES, {"extra": 200.0}, LIMIT + 200),
        (STARTING_PUSHES, {"extra": NO_LIMIT}, LIMIT + NO_LIMIT),
    ],
)
def test_what_is_known_to_take_longer_may(pushes, more, seconds):
    assert patience(pushes, **more) == seconds


def hang(folder: Path, kind: str) -> None:
    def report(text: str) -> None:
        (folder / "reported").write_text(text)

    limit = 1.0 if kind == "busy" else 0.2
    timer = HangTimer(folder / "stacks.txt", report, limit=limit, computes=True)
    for _ in range(STARTING_PUSHES):
        timer.push()
    if kind == "busy":
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            pass
    elif kind == "stopped":
        (folder / "pid").write_text(str(os.getpid()))
        for _ in range(20):
            timer.push()
            time.sleep(0.05)
    else:
        time.sleep(60)
    timer.close()


def test_a_process_that_hangs_ends_with_its_stacks(tmp_path):
    process = forked(hang, tmp_path, "hangs")
    process.join(60)
    assert process.exitcode == EXIT_HUNG
    assert "in hang" in (tmp_path / "stacks.txt").read_text()
    assert "the run hangs" in (tmp_path / "reported").read_text()


def test_a_process_that_computes_does_not_hang(tmp_path):
    process = forked(hang, tmp_path, "busy")
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_process_that_is_continued_after_it_was_stopped_does_not_hang(tmp_path):
    process = forked(hang, tmp_path, "stopped")
    while not (tmp_path / "pid").is_file():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 0
