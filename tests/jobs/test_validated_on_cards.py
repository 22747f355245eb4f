"""`expert.validate` in several processes: one verdict, that of one process, or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from expert.core.errors import EXIT_RUN_FAILED
from expert.data.records import Example, Turn
from expert.jobs.validate import models as model_module
from expert.jobs.validate.models import (
    ProcessFailed,
    ReportedFailure,
    ValidatedModel,
    dealt_by_size,
    models_on_cards,
)
from expert.jobs.validate.validate import validate
from expert.parallel.launch import WorldError
from tests.answer.test_answering import GREEDY
from tests.jobs.runs import until
from tests.jobs.trained_runs import finished, finished_characters
from tests.jobs.validated_runs import as_it_was, learnt, written
from tests.warm import python

__all__ = ["as_it_was"]  # a fixture for every test here: the runs are looked at by others too

TIMES = ("seconds", "generation_seconds")
HOW = replace(GREEDY, stop_sequences=("\n", "é\ud800"))
QUESTIONS = [Example((Turn("user", "x" * size),)) for size in (1, 50, 20, 20, 90, 2_000_000)]
"""The last is too long for a line through a pipe."""
# Answers with the card it has and what it was asked. `ill` is what it does before that.
PROGRAM = """
import json, os, pickle, signal, sys, time
from expert.answer.writer import Answer
card, ill = os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("ILL", "")
def say(fact):
    print(json.dumps(fact), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    do, asked = pickle.load(open(order["ask"], "rb"))
    say({"note": "the same from both"})
    for done in range(1, len(asked["numbers"]) + 1):
        say({"done": done})
    if ill == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ill == "fault":
        sys.exit("ValueError: out of luck")
    if ill == "refuses":
        say({"failed": "another base", "exit_code": 2})
        continue
    if ill == "hangs":
        time.sleep(600)
    found = [
        Answer(text=f"{card} {len(row.turns[0].text)}", marked="", tokens=1, ended=True)
        for row in asked["questions"]
    ]
    with open(order["to"], "wb") as stream:
        pickle.dump(found, stream)
    say({"result": order["to"]})
"""


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


# Without what it imports, which takes seconds; the slow tests start real ones.
def test_a_process_writes_the_verdict_of_this_one(monkeypatch):
    monkeypatch.setattr(model_module, "COMMAND", (python(), *model_module.COMMAND[1:]))
    asked = {"baseline": "base", "limit": 11}
    reported: list[tuple[str, int, int]] = []
    many = verdict(learnt(), gpus="1", tell=lambda *each: reported.append(each), **asked)
    assert many == verdict(learnt(), **asked)
    assert len(many["cases"]) == 11
    answering = [done for what, done, of in reported if what.endswith("final: answering")]
    assert answering == list(range(1, 12))  # one bar over all


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["2", "3"])
def test_any_number_of_processes_writes_the_verdict_of_one(gpus):
    for run, asked in (
        (learnt(), {"checkpoints": "all", "baseline": str(finished("full"))}),
        (finished("lora+soft"), {"domain": "open"}),
        (finished_characters(), {}),
    ):
        if "baseline" in asked:
            asked = {**asked, "test_set": learnt().parents[1] / "test.jsonl"}
        assert verdict(run, gpus=gpus, **asked) == verdict(run, **asked)


@pytest.fixture
def program(monkeypatch, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.setattr(model_module, "COMMAND", (python(), str(file)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def answered(*cards: dict[str, str], note: Any = lambda text: None, tell: Any = None) -> list[str]:
    tell = tell or (lambda done, of: None)
    with models_on_cards(cards, "auto") as models:
        model = ValidatedModel(models, "final", None, None)
        found = model.answers(QUESTIONS, HOW, 0, tell=tell, note=note)
    return [each.text for each in found]


def card(name: str, ill: str = "") -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": name, "ILL": ill}


def test_answers_come_back_in_the_order_of_the_questions(program):
    notes: list[str] = []
    reported: list[tuple[int, int]] = []
    texts = answered(card("a"), card("b"), note=notes.append, tell=lambda *it: reported.append(it))
    assert texts == ["b 1", "b 50", "a 20", "a 20", "b 90", "a 2000000"]
    assert notes == ["the same from both"]
    assert sorted(reported) == [(done, 6) for done in range(1, 7)]
    assert [path.name for path in program.iterdir()] == ["program.py"]  # nothing is left


NAME = "process 2 of 2 (GPU-b)"


@pytest.mark.parametrize(
    ("ill", "sentence"),
    [
        (
            "killed",
            (
                f"{NAME} was killed by SIGKILL: the system ends processes like this when its "
                "memory is full: see dmesg"
            ),
        ),
        ("fault", f"{NAME} ended with code 1: ValueError: out of luck"),
    ],
)
def test_a_process_that_dies_ends_all_with_its_name_and_its_log(program, ill, sentence):
    with pytest.raises(ProcessFailed) as reported:
        answered(card("GPU-a", "hangs"), card("GPU-b", ill))
    assert reported.value.exit_code == EXIT_RUN_FAILED
    head, *more = str(reported.value).splitlines()
    assert head == sentence
    folders = [path for path in program.iterdir() if path.is_dir()]
    logs = [folder / "process-2.log" for folder in folders]
    assert more[-1].strip() == "no verdict was written"
    assert [f"  its log: {log}" for log in logs if log.stat().st_size] == more[:-1]
    assert not any((folder / "work").exists() for folder in folders)


def test_user_errors_read_as_with_one_process(program):
    with pytest.raises(ReportedFailure) as reported:
        answered(card("a", "hangs"), card("b", "refuses"))
    assert (str(reported.value), reported.value.exit_code) == ("another base", 2)
    assert [path.name for path in program.iterdir()] == ["program.py"]


def test_an_interrupt_ends_all_processes(program, monkeypatch):
    pids = []
    own = model_module.Child.ask

    def ask(child, request):
        pids.append(child.pid)
        return own(child, request)

    monkeypatch.setattr(model_module.Child, "ask", ask)

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(card("a", "hangs"), card("b", "hangs"), tell=interrupt)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [path.name for path in program.iterdir()] == ["program.py"]


def test_long_and_short_ones_are_dealt_evenly():
    sizes = [5, 100, 7, 90, 80, 3, 60, 1]
    for parts in (1, 2, 3, 9):
        shares = dealt_by_size(sizes, parts)
        assert sorted(number for share in shares for number in share) == list(range(8))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    loads = [sum(sizes[number] for number in share) for share in dealt_by_size(sizes, 2)]
    assert loads == [168, 178]


def test_cards_that_are_not_there_are_refused_before_anything_is_read():
    with pytest.raises(WorldError):
        validate("nowhere", device="cpu", gpus="all")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_where_the_command_is_killed_its_processes_end():
    code = (
        "import sys\nfrom expert.jobs.validate.models import models_on_cards\n"
        "with models_on_cards([{}, {}], 'cpu') as models:\n"
        "    print(*(each.child.pid for each in models._processes), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        parent.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_running, pids)), 60)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
