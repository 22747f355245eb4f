"""Damaged run folders: every command ends with a message and a documented exit code."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.cli.damaged_runs import (
    COMMANDS,
    ESCAPES,
    READERS,
    Damage,
    command,
    damages,
    ended,
    text_places,
    with_escapes,
)
from tests.faults.counting import cases as counted
from tests.jobs.runs import place
from tests.jobs.trained_runs import finished

LOADERS = tuple(name for name in COMMANDS if name not in READERS)


@cache
def sound() -> Path:
    """A finished run with a validation, shared and unchanged."""
    run = finished("lora")
    expert = Path(shutil.copytree(run.parents[1], place() / "sound"))
    copy = expert / "runs" / run.name
    assert ended("expert", "validate", str(copy), "--limit", "2", "--device", "cpu").code in (0, 5)
    return copy


def damaged_copy(to: Path, damage: Damage | None = None) -> Path:
    """A copy of the sound run in a copy of its expert's folder."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(sound().parents[1], to)
    run = to / "runs" / sound().name
    if damage is not None:
        damage.apply(run)
    return run


def fault_of(name: str, run: Path, out: Path) -> str:
    """What is wrong with how a command over a run ends; "" where nothing is."""
    if name == "resume":  # a run that was finished has nothing left to do
        shutil.rmtree(run / "final", ignore_errors=True)
    manifest = run.parents[1] / "manifest.json"
    return command(name, run=run, sound=sound(), manifest=manifest, out=out).fault


def faults(tmp_path: Path, cases: list[tuple[Damage, str]]) -> list[str]:
    found = []
    for number in counted(len(cases)):
        damage, name = cases[number]
        run = damaged_copy(tmp_path / "expert", damage)
        if fault := fault_of(name, run, tmp_path / "out"):
            found.append(f"{name}: {damage}: {fault}")
    return found


def test_every_command_reads_the_sound_run(tmp_path: Path):
    for name in READERS:
        run = damaged_copy(tmp_path / "expert")
        assert fault_of(name, run, tmp_path / "out") == ""


@pytest.mark.fault(31)
def test_commands_on_damaged_runs_end_with_a_message(tmp_path: Path):
    drawn = damages(sound(), 40, seed=1)
    assert faults(tmp_path, [(d, READERS[n % len(READERS)]) for n, d in enumerate(drawn)]) == []


@pytest.mark.fault(31)
def test_commands_that_load_a_model_report_damage_before_loading(tmp_path: Path):
    """Damages of files that every command needs, each of a kind of its own."""
    cases = [
        (Damage("plan.json", "nested", 1), "sample"),
        (Damage("plan.json", "a pipe", 1), "export"),
        (Damage("manifest.json", "binary", 1), "validate"),
        (Damage("plan.json", "a link to itself", 1), "sample"),
        (Damage("plan.json", "3 GB", 1), "export"),
        (Damage("plan.json", "a folder", 1), "validate"),
        (Damage("final/DONE", "null", 1), "sample"),
    ]
    assert faults(tmp_path, cases) == []


@pytest.mark.fault(31)
@pytest.mark.parametrize("file", ["plan.json", "events.jsonl", "validation.json", "manifest.json"])
def test_no_escape_sequence_of_a_run_reaches_the_terminal(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("report", "watch", "diagnose"):
        run = damaged_copy(tmp_path / "expert", Damage(file, "fields of escapes", 1))
        assert fault_of(name, run, tmp_path / "out") == ""


def test_the_name_of_a_run_folder_is_shown_without_its_escape_sequences(tmp_path: Path):
    hostile = ESCAPES.replace("/", "")
    run = damaged_copy(tmp_path / "expert")
    moved = run.rename(run.with_name(f"demo{hostile}-20260101-000000"))
    for name in ("watch", "report", "diagnose"):
        assert fault_of(name, moved, tmp_path / "out") == ""
    assert fault_of("watch", tmp_path / f"none{hostile}", tmp_path / "out") == ""


# --- the whole set -------------------------------------------------------------------------------


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_with_a_message_on_damaged_runs(tmp_path: Path, name: str):
    count = 150 if name in READERS else 60
    seed = list(COMMANDS).index(name) + 10
    drawn = damages(sound(), count, seed)
    assert faults(tmp_path, [(damage, name) for damage in drawn]) == []


@pytest.mark.fault(31)
@pytest.mark.slow
def test_no_escape_sequence_in_any_single_field_reaches_the_terminal(tmp_path: Path):
    """A field alone: where all of them change, a file is refused before it is shown."""
    found = []
    places = list(text_places(sound()))
    assert len(places) > 100
    for number, (file, index) in enumerate(places):
        run = damaged_copy(tmp_path / "expert")
        with_escapes(run / file, index)
        for name in {"report", (*READERS, *LOADERS)[number % len(COMMANDS)]}:
            if fault := fault_of(name, run, tmp_path / "out"):
                found.append(f"{name}: {file}, text {index}: {fault}")
    assert found == []
