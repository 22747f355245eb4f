"""The runner of commands, away from this machine's own settings."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.running import Runner
from tests.jobs.trained_runs import finished


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_COLOR", "1")
    # Where the tests run in the background, Ctrl-C is ignored, and commands leave that so.
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield Runner(capsys, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of LoRA that is finished, in a copy of its expert's folder."""
    run = finished("lora")
    shutil.copytree(run.parents[1], tmp_path / "lora")
    return tmp_path / "lora" / "runs" / run.name
