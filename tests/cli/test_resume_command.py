"""The command that resumes a killed run, run exactly as it is printed."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from expert.core.rundir import RunFolder
from expert.manifest.reader import read_manifest
from expert.planning.machine.machine import describe_machine
from expert.run.open import open_run
from expert.run.session.start import started_facts
from expert.run.stored.resume_command import resume_command_of
from tests.jobs.runs import base_model, write_expert
from tests.jobs.trained_runs import CORPUS

GO_ON = "resume with: expert "
SMALL = 'base_models[0].architecture={"layers": 1, "heads": 1, "width": 8, "block_size": 16}'


@pytest.fixture
def fox(tmp_path: Path, monkeypatch) -> Path:
    """The working directory, with a text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fox.txt").write_text(CORPUS, encoding="utf-8")
    return tmp_path


def a_started_run(tmp_path: Path, manifest: Path) -> RunFolder:
    """A run folder with nothing but the event of its start, which takes liberties."""
    folder = RunFolder(tmp_path / "runs" / "demo-20260101-000000")
    folder.path.mkdir(parents=True)
    allowed = {"allow_remote_code": True, "allow_changed": True}
    started = {"event": "started", "time": 1.0, "manifest": str(manifest), **allowed}
    folder.events.write_text(json.dumps(started) + "\n", encoding="utf-8")
    return folder


def killed(folder: Path) -> None:
    """Make a finished run one that was killed after its last checkpoint but one."""
    events = folder / "events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["event"] != "finished"]
    events.write_text("".join(kept), encoding="utf-8")
    shutil.rmtree(folder / "final")
    saved = sorted((folder / "checkpoints").iterdir())
    if len(saved) > 1:
        shutil.rmtree(saved[-1])


def test_a_killed_run_is_resumed_by_the_command_that_watch_and_diagnose_print(run, tmp_path):
    base = base_model()
    file = write_expert(tmp_path / "e", base, {"epochs": 9, "save_steps": 2})
    out = tmp_path / "out"
    options = "--epochs 2 --set max_steps=4 --set logging_steps=2 --set seed=7 --device cpu"
    asked = ("--output", str(out), *options.split(), "--allow-remote-code")
    assert run("train", str(file), *asked).code == 0
    [folder] = out.iterdir()
    killed(folder)
    printed = run("watch", str(folder), "--once").out.splitlines()[-1]
    assert printed.startswith(GO_ON)
    command = shlex.split(printed.removeprefix(GO_ON))
    for words in ("--epochs 2", "seed=7", "max_steps=4", "logging_steps=2"):
        assert words in " ".join(command)
    assert "output_dir" not in " ".join(command)  # the run folder is named
    assert "--allow-remote-code" not in command  # only the person at the command line allows it
    assert run("diagnose", str(folder)).out.count("--epochs 2") >= 1
    again = run(*command)
    assert again.code == 0, again.err
    assert "resumed at step " in again.out
    assert (folder / "final").is_dir()


def test_a_run_keeps_its_rows_a_step_on_a_machine_with_less_memory(run, fox, monkeypatch):
    asked = ("--epochs", "2", "--device", "cpu", "--set", SMALL, "--set", "trackers=[]")
    chosen = "expert.planning.choose.sequences.char_gpt_batch"
    monkeypatch.setattr(chosen, lambda memory: (64, "as the first machine has it"))
    first = run("train", "--dataset", "fox.txt", *asked, "--set", "max_steps=3")
    assert first.code == 0, first.err
    [folder] = (fox / "runs").iterdir()
    killed(folder)
    monkeypatch.setattr(chosen, lambda memory: (32, "as the second machine has it"))
    resumed = ("train", "--dataset", "fox.txt", *asked, "--set", "max_steps=3", "--resume")
    shown = run(*resumed, "--dry-run", "--json")
    assert json.loads(shown.out)["plan"]["batch"]["examples_per_update"] == 64
    again = run(*resumed)
    assert again.code == 0, again.err
    assert len(list((fox / "runs").iterdir())) == 1


def test_no_resume_command_takes_a_permission_from_the_run_folder(tmp_path):
    folder = a_started_run(tmp_path, write_expert(tmp_path, "tiny", {}))
    assert "--allow" not in resume_command_of(folder)


def test_the_resume_command_repeats_vram_only_for_runs_on_a_card(tmp_path):
    file = write_expert(tmp_path, "tiny", {})
    folder = a_started_run(tmp_path, file)
    read = read_manifest(file)
    on_cpu = replace(describe_machine(tmp_path), gpus=())
    for card, words in ({"gpu": "rtx-4090"}, " --vram '8 GB'"), ({"machine": on_cpu}, ""):
        opened = replace(open_run(read, data="unread", **card), vram="8 GB")
        facts = started_facts(folder, opened.plan, opened)
        command = f"expert train --manifest {file}{words} --resume {folder.path}"
        assert resume_command_of(folder, {"event": "started", **facts}) == command
