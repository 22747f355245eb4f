"""`expert.validate` in several processes: one verdict, that of one process, or none."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import EXIT_RUN_FAILED
from expert.data.records import Example, Turn
from expert.jobs.validate import models as model_module
from expert.jobs.validate.models import ProcessFailed, models_on_cards
from expert.jobs.validate.validate import validate
from tests.answer.test_answering import GREEDY
from tests.jobs.validated_runs import as_it_was, learnt, written

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too

TIMES = ("seconds", "generation_seconds")


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: without_times(each) for key, each in found.items() if key not in TIMES}
    return [without_times(each) for each in found] if isinstance(found, list) else found


def verdict(run: Path, **asked: Any) -> dict[str, Any]:
    """What is saved, but for the times."""
    validate(run, **{"device": "cpu", **asked})
    found = without_times(written(run))
    (run / "validation.json").unlink()
    return dict(found)


@pytest.mark.slow  # each imports torch
def test_two_processes_write_the_verdict_of_one():
    asked = {"baseline": "base", "limit": 11}
    reported: list[tuple[str, int, int]] = []
    many = verdict(learnt(), gpus="2", tell=lambda *each: reported.append(each), **asked)
    assert many == verdict(learnt(), **asked)
    assert len(many["cases"]) == 11
    answering = [done for what, done, of in reported if what.endswith("final: answering")]
    assert answering[-1] == 11  # one bar over all


# Answers with its card and the size of what it was asked, or does what `ILL` says.
PROGRAM = """
import os, signal, sys
from multiprocessing.connection import Connection
connection, ill = Connection(int(sys.argv[1])), os.environ["ILL"]
do, asked = connection.recv()
connection.send(("note", "the same from both"))
connection.send(("done", len(asked["questions"])))
if ill == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if ill == "refuses":
    connection.send(("failed", ("another base", 2)))
if ill:
    signal.pause()
card, sizes = os.environ["CUDA_VISIBLE_DEVICES"], [len(q.turns[0].text) for q in asked["questions"]]
connection.send(("result", [f"{card} {size}" for size in sizes]))
"""


def answered(*ills: str, **callbacks: Any) -> list[Any]:
    sizes = (1, 50, 20, 20, 90, 2_000_000)
    questions = [Example((Turn("user", "x" * size),)) for size in sizes]
    cards = [
        {"CUDA_VISIBLE_DEVICES": f"GPU-{name}", "ILL": ill}
        for name, ill in zip("ab", ills, strict=True)
    ]
    callbacks = {"tell": lambda done, of: None, "note": lambda text: None, **callbacks}
    how = replace(GREEDY, stop_sequences=("\n", "é\ud800"))
    with models_on_cards(cards, "auto") as model:
        return list(model.answers(questions, how, 0, **callbacks))


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(model_module, "COMMAND", (sys.executable, "-c", PROGRAM))


def test_answers_come_back_in_the_order_of_the_questions(fake):
    notes: list[str] = []
    reported: list[tuple[int, int]] = []
    found = answered("", "", note=notes.append, tell=lambda *it: reported.append(it))
    assert [text.split()[1] for text in found] == ["1", "50", "20", "20", "90", "2000000"]
    assert {text.split()[0] for text in found} == {"GPU-a", "GPU-b"}
    assert notes == ["the same from both"]
    assert sorted(reported) == [(3, 6), (6, 6)]


def test_a_process_that_dies_or_refuses_ends_all(fake):
    with pytest.raises(
        ProcessFailed, match=r"process 2 of 2 \(GPU-b\) was killed by SIGKILL"
    ) as it:
        answered("hangs", "killed")
    assert it.value.exit_code == EXIT_RUN_FAILED
    with pytest.raises(ProcessFailed, match="another base") as refused:
        answered("hangs", "refuses")
    assert refused.value.exit_code == 2


def test_cards_that_are_not_there_are_refused_before_anything_is_read():
    with pytest.raises(Exception, match="--gpus all"):
        validate("nowhere", device="cpu", gpus="all")
