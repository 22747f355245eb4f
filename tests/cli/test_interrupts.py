"""Commands that are stopped from outside: the exit code, one line, and nothing half-written."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expert.data.tokens import prepare
from tests.jobs.runs import base_model, write_expert
from tests.jobs.trained_runs import finished

PREPARED_STAYS = "finished data sets are kept; the same command prepares the rest"
PATIENCE_SECONDS = 60.0


@pytest.fixture
def expert(tmp_path: Path) -> Path:
    return write_expert(tmp_path / "expert", base_model(), {})


def stopped_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """A signal comes at the beginning of the first call."""
    original: Callable[..., Any] = getattr(owner, name)

    def with_a_signal(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        signal.raise_signal(number)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, with_a_signal)


@pytest.mark.fault(5)
def test_a_run_or_its_preparing_that_is_stopped_leaves_nothing_half_written(
    run, expert, monkeypatch
):
    stopped_in(monkeypatch, prepare, "write_shard", signal.SIGINT)
    ran = run("pretokenize", "-m", str(expert))
    assert ran.code == 130
    assert ran.err == f"expert pretokenize: stopped by Ctrl-C: {PREPARED_STAYS}\n"
    stopped_in(monkeypatch, prepare, "write_shard", signal.SIGTERM)
    ran = run("train", "-m", str(expert), "--device", "cpu")
    assert (ran.code, ran.err) == (143, "")
    assert "stopped by SIGTERM before the first step: no run was started" in ran.out
    assert list(expert.parent.rglob("data-*.arrow")) == []
    assert not (expert.parent / "runs").exists()
    assert run("pretokenize", "-m", str(expert)).code == 0


def test_a_validation_that_is_stopped_writes_no_verdict(run, monkeypatch):
    from expert.jobs.validate.validate import Examination

    folder = finished("lora")
    (folder / "validation.json").unlink(missing_ok=True)
    stopped_in(monkeypatch, Examination, "_losses", signal.SIGTERM)
    ran = run("validate", "--expert", str(folder), "--device", "cpu", "--limit", "2")
    assert ran.code == 143
    assert "expert validate: stopped by SIGTERM: no verdict was written" in ran.err
    assert not (folder / "validation.json").exists()


def test_a_signal_that_was_ignored_from_the_start_stays_ignored(run):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run("--version").code == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


WAITS_FOR_A_SIGNAL = f"""
import sys, time
from expert.data.tokens import prepare
swallow = sys.argv.pop() == "swallow"  # as callbacks of compiled code do

def waits(*job):
    try:
        print("there", flush=True)
        time.sleep({PATIENCE_SECONDS})
    except SystemExit:
        if not swallow:
            raise
        print("swallowed", flush=True)
        time.sleep({PATIENCE_SECONDS})
    yield

prepare._shards = waits
from expert.__main__ import main
main()
"""


@pytest.mark.fault(5)
@pytest.mark.parametrize(
    ("how", "said", "reported"),
    [
        ("raise", ["there"], f"expert pretokenize: stopped by SIGTERM: {PREPARED_STAYS}\n"),
        ("swallow", ["there", "swallowed"], ""),
    ],
)
def test_a_process_ends_with_the_line_or_at_the_second_signal_at_once(expert, how, said, reported):
    command = [sys.executable, "-c", WAITS_FOR_A_SIGNAL, "pretokenize", "-m", str(expert), how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stderr
        for word in said:
            assert process.stdout.readline() == f"{word}\n"
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 143
        assert process.stderr.read() == reported
