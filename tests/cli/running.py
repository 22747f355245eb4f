"""Runs a command as a person would, in this process, and keeps what it wrote."""

from __future__ import annotations

import json
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


def run_without(*commands: tuple[str, ...]) -> list[Ran]:
    """Commands, one after the other, in an interpreter without the packages that train."""
    code = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({TRAINING_PACKAGES!r}))
from expert.__main__ import main
done = []
for words in {commands!r}:
    sys.argv, out, err = ["expert", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            done.append((end.code or 0, out.getvalue(), err.getvalue()))
json.dump(done, sys.stdout)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return [Ran(*each) for each in json.loads(ran.stdout)]
