"""Folders that commands take: an expert's where a run is meant, a manifest's where a file is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.running import run_without
from tests.jobs.trained_runs import finished
from tests.run.test_locate import expert_folder


@pytest.mark.parametrize(
    "command",
    [
        ("sample", "{}", "--prompt", "say cat 2", "--max-tokens", "2", "--device", "cpu"),
        ("report", "{}", "--to", "{out}"),
        ("diagnose", "{}"),
        ("watch", "{}", "--once"),
        ("export", "{}", "--to", "{out}", "--device", "cpu"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_on_a_run_takes_an_expert_s_folder(run, tmp_path, command):
    expert = Path(str(finished("lora"))).parent.parent
    assert (expert / "manifest.json").is_file()
    ran = run(*(word.replace("{}", str(expert)).format(out=tmp_path / "out") for word in command))
    assert (ran.code, "Error" in ran.err) == (0, False), ran.err


def test_a_run_is_reported_watched_and_diagnosed_where_torch_is_not_installed(tmp_path):
    run = str(shutil.copytree(finished("lora"), tmp_path / "run"))
    report, watched, once, diagnosed, machine = run_without(
        ("report", run), ("watch", run), ("watch", run, "--once"), ("diagnose", run),
        ("diagnose", "--no-timing"),
    )  # fmt: skip
    for ran in (report, watched, once, diagnosed):
        assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "run" / "report.html").is_file()
    assert "step" in watched.out
    assert "step" in once.out
    assert diagnosed.out.startswith("compute-bound: good. The CPU computes ")
    assert machine.code in (0, 2)


def test_a_folder_named_as_manifest_means_the_file_in_it_and_is_reported(run, tmp_path):
    expert = expert_folder(tmp_path / "demo", "manifest.yaml")
    for command in (("plan", "--gpu", "rtx-4090", "--manifest"), ("plan", "--gpu", "rtx-4090")):
        ran = run(*command, str(expert))
        assert ran.code == 0, ran.err
        assert f"manifest: {expert / 'manifest.yaml'}" in ran.err
    assert run("manifest", "check", str(expert)).code == 0


def test_resume_takes_the_folder_of_an_expert_and_shows_which_run_it_took(run, trained):
    folder, home = trained, trained.parents[1]
    shutil.copytree(folder, home / "runs" / "other-29991231-000000")  # of another expert
    asked = ("train", "-m", str(home / "manifest.json"), "--device", "cpu", "--resume")
    for more, reported in (
        (("--dry-run",), f"the run would resume {folder}; nothing was written\n"),
        ((), f"resumed at step 6 from {folder / 'checkpoints' / 'step-000006'}\n"),
    ):
        ran = run(*asked, str(home), *more)
        assert ran.code == 0, ran.err
        assert f"run: {folder}\n" in ran.err
        assert reported in ran.out
    assert "run: " not in run(*asked, str(folder)).err
