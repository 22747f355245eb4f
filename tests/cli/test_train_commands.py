"""`expert train` as a person runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from expert.cli.show.options import flag_overrides, read_requested_manifest
from expert.core.interrupts import Interrupted
from expert.run.stored.resume_command import command_to_resume
from tests.each import each
from tests.jobs.runs import base_model, write_expert
from tests.jobs.trained_runs import CORPUS

SMALL = (
    *("--set", 'base_models[0].architecture={"layers": 1, "heads": 1, "width": 8}'),
    *("--set", "base_models[0].architecture.block_size=16"),
    *("--set", "batch_size=64", "--set", "trackers=[]"),
)


@pytest.fixture
def expert(tmp_path) -> Path:
    """A manifest of an expert that trains in a second."""
    return write_expert(tmp_path / "e", base_model(), {"max_steps": 2})


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- training ------------------------------------------------------------------------------------


def test_a_run_is_shown_in_plain_lines_and_ends_with_what_to_do_next(run, expert):
    ran = run("train", "--manifest", str(expert), "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert "loading the model …" in lines
    first = next(place for place, line in enumerate(lines) if line.startswith("step "))
    assert first <= 8
    switches = [line for line in lines[:first] if line.startswith(("✓ ", "– "))]
    assert max(map(len, switches)) <= 80
    [unused] = [line for line in switches if line.startswith("– not used on a CPU: ")]
    assert "CUDA graphs" in unused
    assert any(line.startswith("step 2/2  loss ") for line in lines)
    [folder] = (expert.parent / "runs").iterdir()
    assert lines[-4:] == [
        f"final: {folder / 'final'}",
        f"next: expert validate {folder} --baseline base",
        f'      expert sample {folder} --prompt "…"',
        f"      expert export {folder} --to FOLDER",
    ]


@pytest.mark.fault(7)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
@pytest.mark.parametrize("lost", ["reader", "disk"])
def test_a_run_whose_output_cannot_be_written_continues_to_its_end(run, expert, monkeypatch, lost):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") if lost == "reader" else open("/dev/full", "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        ran = run("train", "-m", str(expert), "--device", "cpu")
    assert ran.code == 0
    assert ("No space left on device: no more output" in ran.err) == (lost == "disk")
    [folder] = (expert.parent / "runs").iterdir()
    assert (folder / "final" / "DONE").is_file()


def test_flags_overrule_the_manifest_and_the_result_is_json(run, expert, tmp_path):
    more = ("--output", str(tmp_path / "mine"), "--epochs", "1", "--set", "max_steps=null")
    ran = run("train", "-m", str(expert), "--device", "cpu", *more, "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert Path(found["folder"]).parent == tmp_path / "mine"
    plan = json.loads((Path(found["folder"]) / "plan.json").read_text(encoding="utf-8"))
    assert plan["length"]["epochs"] == 1
    assert found["steps"] == plan["length"]["steps_per_epoch"]
    assert found["exit_code"] == 0
    assert "step 1/" in ran.err


def test_without_a_manifest_a_text_trains_the_character_model(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fox.txt").write_text(CORPUS, encoding="utf-8")
    ran = run("train", "--dataset", "fox.txt", "--epochs", "1", "--device", "cpu", *SMALL)
    assert ran.code == 0, ran.err
    [folder] = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["name"] == "char-fox"
    assert ran.out.splitlines()[-2] == f'next: expert sample runs/{folder.name} --prompt "…"'
    assert manifest["base_models"][0]["name"] == "char-gpt"
    assert manifest["training"]["dataset"]["path"] == str(tmp_path / "fox.txt")
    assert (folder / "final" / "vocabulary.json").is_file()


SEED = """
training:
  batch_size: 128
  use_compile: true
  gradient_clip: 0.5
  log_interval: 100
"""
NOT_USED = "config.yaml is not used: "


@each(
    ("settings", "reported", "expected"),
    [
        (
            SEED,
            ["using the settings in config.yaml"],
            {
                "expert": "char-shakespeare",
                "model.name": "char-gpt",
                "batch.examples_per_update": 128,
                "optim.max_grad_norm": 0.5,
                "watch.logging_steps": 100,
                "length.epochs": 25,
                "adapter.type": "full",
            },
        ),
        # Settings of something else are reported not to be used.
        *(
            (settings, [NOT_USED, why], {"expert": "char-shakespeare"})
            for settings, why in (
                ("base_model: tiny\ntraining: {dataset: {path: rows.jsonl}}\n", "it trains tiny"),
                ("- just\n- a list\n", "expected an object"),
            )
        ),
    ],
)
def test_settings_beside_a_text_are_used_if_they_are_for_one(
    run, tmp_path, monkeypatch, settings, reported, expected
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(settings, encoding="utf-8")
    ran = run("train", "--dataset", "shakespeare", "--dry-run", "--json", "--device", "cpu")
    assert all(words in ran.err for words in reported)
    plan = json.loads(ran.out)["plan"]
    for path, value in expected.items():
        found = plan
        for key in path.split("."):
            found = found[key]
        assert found == value, path
    (tmp_path / "config.yaml").write_text("training: {config: {batch_sise: 4}}\n", encoding="utf-8")
    slip = run("train", "--dataset", "shakespeare", "--dry-run", "--device", "cpu")
    assert slip.code == 2
    assert "did you mean 'batch_size'?" in slip.err


def test_other_rows_replace_all_of_the_manifests_own(expert, tmp_path, monkeypatch):
    manifest = json.loads(expert.read_text(encoding="utf-8"))
    manifest["training"]["dataset"] |= {"validation_path": "v.jsonl", "format": "jsonl"}
    expert.write_text(json.dumps(manifest), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other, odd #1.csv").write_text("instruction,response\na,b\n", encoding="utf-8")
    (tmp_path / "saved").mkdir()
    for name, path in (
        ("other, odd #1.csv", str(tmp_path / "other, odd #1.csv")),
        ("saved::train", f"{tmp_path / 'saved'}::train"),
        ("org/rows::test", "org/rows::test"),
    ):
        flags = flag_overrides(dataset=name, output=None, epochs=None, device=None)
        data = read_requested_manifest(expert, name, tuple(flags)).manifest.training.dataset
        assert (data.path, data.validation_path, data.format) == (path, None, None)


# --- resuming ------------------------------------------------------------------------------------


def test_a_changed_run_is_refused_with_the_difference_unless_allowed(run, trained):
    shutil.rmtree(trained / "final")
    asked = ("train", "-m", str(trained.parents[1]), "--device", "cpu", "--resume", str(trained))
    ran = run(*asked, "--set", "learning_rate=0.5")
    assert ran.code == 2
    assert "schedule.learning_rate: was 0.01, is 0.5" in ran.err
    ran = run(*asked, "--set", "learning_rate=0.5", "--allow-changed")
    assert ran.code == 0
    assert "  changed: schedule.learning_rate: was 0.01, is 0.5\n" in ran.out


# --- a dry run -----------------------------------------------------------------------------------


def test_a_dry_run_shows_the_plan_and_writes_nothing(run, expert, tmp_path):
    before = tree(tmp_path)
    ran = run("train", "-m", str(expert), "--dry-run", "--device", "cpu")
    assert ran.code == 0
    assert tree(tmp_path) == before
    assert ran.out.startswith("✓ fits: ")
    assert ran.out.endswith("nothing was written\n")
    found = json.loads(run("train", "-m", str(expert), "--dry-run", "--json").out)
    assert found["plan"]["expert"] == "demo"
    assert found["resume"] is None
    assert tree(tmp_path) == before


# --- what is refused -----------------------------------------------------------------------------


@each(
    ("argv", "command"),
    [
        (["expert", "train", "-m", "a b.json"], "expert train -m 'a b.json' --resume runs/a"),
        (["expert", "train", "--resume", "runs/b"], "expert train --resume runs/a"),
        (["expert", "train", "--resume", "--seed"], "expert train --seed --resume runs/a"),
        (["/x/expert/__main__.py", "train"], "python -m expert train --resume runs/a"),
        (["/nowhere/bin/expert", "train"], "/nowhere/bin/expert train --resume runs/a"),
    ],
)
def test_the_command_that_resumes_is_whole(argv, command):
    assert command_to_resume(argv, Path("runs/a")) == command


def test_ctrl_c_before_the_first_step_is_reported_and_leaves_no_folder(run, expert, monkeypatch):
    interrupted = MagicMock(side_effect=Interrupted(signal.SIGINT))
    monkeypatch.setattr("expert.run.session.session.Instruments", interrupted)
    ran = run("train", "-m", str(expert), "--device", "cpu")
    assert (ran.code, ran.err, interrupted.call_count) == (130, "", 1)
    assert "stopped by Ctrl-C before the first step: no run was started" in ran.out
    assert list((expert.parent / "runs").iterdir()) == []


def test_the_adapter_to_start_from_is_named_from_where_the_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = flag_overrides(dataset=None, output=None, epochs=None, device=None, start=Path("run"))
    assert flags == [f'training.config.start_from="{tmp_path / "run"}"']
