"""Damaged run folders: every command ends with a message and a documented exit code."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.cli.damaged_runs import ESCAPES, HOWS, damages, ended
from tests.faults.counting import cases as counted
from tests.jobs.runs import place
from tests.jobs.trained_runs import finished

CPU = "--device cpu"
COMMANDS = {
    "report": "report RUN --to OUT/report",
    "compare": "report RUN --compare SOUND --to OUT/compared",
    "watch": "watch RUN",
    "status": "watch RUN --json",
    "diagnose": "diagnose RUN --no-timing",
    "sample": f"sample RUN --prompt red --max-tokens 2 {CPU}",
    "export": f"export RUN --to OUT/exported --allow-failed {CPU}",
    "validate": f"validate RUN --limit 2 {CPU}",
    "resume": f"train --resume RUN -m MANIFEST {CPU}",
}
READERS = ("report", "compare", "watch", "status", "diagnose")
"""Those that load no model."""


@cache
def sound() -> Path:
    """A finished run with a validation, shared and unchanged."""
    run = finished("lora")
    expert = Path(shutil.copytree(run.parents[1], place() / "sound"))
    copy = expert / "runs" / run.name
    assert ended("validate", str(copy), "--limit", "2", "--device", "cpu").code in (0, 5)
    return copy


def copied(to: Path) -> Path:
    """A copy of the sound run in a copy of its expert's folder."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(sound().parents[1], to)
    return to / "runs" / sound().name


def fault_of(name: str, run: Path, out: Path) -> str:
    """What is wrong with how a command over a run ends; "" where nothing is."""
    if name == "resume":  # a run that was finished has nothing left to do
        shutil.rmtree(run / "final", ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    manifest = run.parents[1] / "manifest.json"
    places = {"RUN": run, "SOUND": sound(), "MANIFEST": manifest}
    words = [str(places.get(word, word)) for word in COMMANDS[name].split()]
    return ended(*(word.replace("OUT", str(out)) for word in words)).fault


def faults(tmp_path: Path, cases: list[tuple[str, str, str]]) -> list[str]:
    """Of cases of a command, a file and what is done to it."""
    found = []
    for number in counted(len(cases)):
        name, file, how = cases[number]
        run = copied(tmp_path / "expert")
        HOWS[how](run / file, random.Random(number))
        if fault := fault_of(name, run, tmp_path / "out"):
            found.append(f"{name}: {file}: {how}, {number}: {fault}")
    return found


@pytest.mark.fault(31)
def test_commands_on_damaged_runs_end_with_a_message(tmp_path: Path):
    drawn = damages(sound(), 30, seed=1)
    cases = [(READERS[n % len(READERS)], *damage) for n, damage in enumerate(drawn)]
    # Commands that load a model report damage before they do.
    cases += [
        ("sample", "plan.json", "nested"),
        ("export", "plan.json", "a pipe"),
        ("validate", "manifest.json", "binary"),
        ("sample", "plan.json", "a link to itself"),
        ("export", "plan.json", "3 GB"),
        ("sample", "final/DONE", "null"),
        *(("report", file, "escapes") for file in ("plan.json", "events.jsonl", "manifest.json")),
        *((name, "events.jsonl", "escapes") for name in ("watch", "diagnose")),
    ]
    assert faults(tmp_path, cases) == []


def test_the_name_of_a_run_folder_is_shown_without_its_escape_sequences(tmp_path: Path):
    hostile = ESCAPES.replace("/", "")
    run = copied(tmp_path / "expert")
    moved = run.rename(run.with_name(f"demo{hostile}-20260101-000000"))
    for name in ("watch", "report", "diagnose"):
        assert fault_of(name, moved, tmp_path / "out") == ""
    assert fault_of("watch", tmp_path / f"none{hostile}", tmp_path / "out") == ""


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_with_a_message_on_damaged_runs(tmp_path: Path, name: str):
    drawn = damages(sound(), 150 if name in READERS else 60, list(COMMANDS).index(name) + 10)
    assert faults(tmp_path, [(name, *damage) for damage in drawn]) == []
