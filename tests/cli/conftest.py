"""The runner of commands, away from this machine's own settings."""

from __future__ import annotations

import signal

import pytest

from tests.cli.running import Runner


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_COLOR", "1")
    before = signal.getsignal(signal.SIGINT)
    yield Runner(capsys, monkeypatch)
    signal.signal(signal.SIGINT, before)
