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
    # Where the tests run in the background, Ctrl-C is ignored, and commands leave that so.
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield Runner(capsys, monkeypatch)
    for number, handler in before.items():
        signal.signal(number, handler)
