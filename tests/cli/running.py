"""Runs a command as a person would, in this process, and keeps what it wrote."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from expert.__main__ import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXPERT_JSON = str(EXAMPLES / "expert-json" / "manifest.json")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


class Runner:
    """`run("plan", "-m", FILE)` -> exit code, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, *arguments: str) -> Ran:
        self.monkeypatch.setattr("sys.argv", ["expert", *arguments])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        wrote = self.capsys.readouterr()
        code = left.value.code
        return Ran(code if isinstance(code, int) else 0, wrote.out, wrote.err)


TRAINING_PACKAGES = ("torch", "transformers", "peft", "pyarrow", "numpy")


def run_without(*arguments: str, absent: tuple[str, ...] = TRAINING_PACKAGES) -> Ran:
    """The command in a fresh interpreter where these packages are not installed."""
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        f"sys.argv = ['expert', *{arguments!r}]\nfrom expert.__main__ import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)
