"""Escape sequences in rows, models and answers are shown as text."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from expert.cli.sample import _Writer
from expert.cli.show.display import (
    Sheet,
    Waiting,
    make_console,
    show,
    show_bars,
    show_problems,
    show_sheet,
    write_json,
)
from tests.cli.damaged_runs import ESCAPES, ended, is_unseen

COLOURS = re.compile(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d?[AKG]|\r")  # those of rich itself


def raw(text: str) -> set[str]:
    return {hex(ord(c)) for c in text if c not in "\n\t" and is_unseen(c)}


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_that_is_shown_can_move_the_cursor(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    assert console.is_terminal is terminal
    hostile = ESCAPES.replace("\x1b[2J", "\x1b[5;5H")
    show(console, hostile, "bold")
    show_sheet(Sheet(("name", hostile), [[("a", hostile)]], title=hostile), console)
    show_bars([(hostile, 1.0, hostile)], 1.0, console)
    show_problems(f"{hostile}\n{hostile}")
    with Waiting(console, hostile):
        pass
    write_json({hostile: [hostile]})
    _Writer(console, several=True, quiet=False).begin(hostile, plain=True)
    shown = stream.getvalue()
    assert "owned" in shown
    assert raw(COLOURS.sub("", shown)) == set()


def test_json_has_the_same_value_without_a_raw_character(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    write_json({"id": ESCAPES + "\x7f\ud83d\ude00é"})
    assert raw(stream.getvalue()) == set()
    assert json.loads(stream.getvalue())["id"].startswith(ESCAPES)


def test_ids_and_answers_of_cases_are_shown_without_their_escape_sequences(
    tmp_path: Path, trained: Path
):
    rows = [
        {"id": f"{ESCAPES}{n}", "instruction": "say \x1b[2J", "response": "\x9b31m\u202e"}
        for n in range(2)
    ]
    file = tmp_path / "cases.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ["--test-set", str(file), "--device", "cpu", "--domain", "text"]
    for more in ([], ["--json"]):
        judged = ended("validate", str(trained), *words, *more)
        assert judged.code in (0, 5), judged.text
        assert judged.fault == ""
    assert ended("report", str(trained)).fault == ""
    assert raw((trained / "report.html").read_text(encoding="utf-8")) == set()
