"""`expert diagnose` before a run, and its --parity, --profile and --try, as a person types them."""

from __future__ import annotations

import json

import pytest

from tests.jobs.runs import write_expert
from tests.jobs.trained_runs import finished
from tests.wording import wording


def test_a_manifest_is_looked_at_and_the_last_line_sums_it_up(run, tmp_path):
    manifest = write_expert(tmp_path, "tiny", {"save_strategy": "no"})
    ran = run("diagnose", "-m", str(manifest), "--no-kernels", "--gpu", "rtx-4090")
    assert ran.code == 0
    assert "training.config.save_strategy: epoch" in ran.out
    assert ran.out.splitlines()[-1] == wording("warning-run-would-start")
    options = ("--set", "training.config.attention=eager", "--gpu", "rtx-4090", "--json")
    found = json.loads(run("diagnose", "-m", str(manifest), *options).out)
    by_name = {each["name"]: each for each in found["findings"]}
    assert by_name["eager-attention"]["overrides"] == ["training.config.attention=auto"]
    assert found["exit_code"] == 0
    (tmp_path / "train.jsonl").unlink()
    ran = run("diagnose", "-m", str(manifest), "--no-kernels")
    assert ran.code == 2
    assert wording("would-not-start") in ran.out.splitlines()[-1]
    alone = run("diagnose", "--no-kernels")
    assert alone.code == 0
    assert "kernels-not-tried" in alone.out


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("runs", "-m", "x.json"), wording("name-run-manifest-not")),
        (("--parity",), wording("needs-file-run")),
        (("--try", "--profile", "1", "-m", "x.json"), "choose one"),
        (("--parity", "-m", "x.json", "--gpu", "h200"), "leave out --gpu"),
        (("runs", "--gpu", "h200"), wording("run-has-own-card")),
        (("--gpu", "rtx-9999"), wording("no-such-card-in")),
    ],
)
def test_options_that_contradict_each_other_are_refused(run, arguments, reported):
    ran = run("diagnose", *arguments)
    assert ran.code == 2
    assert reported in " ".join(ran.err.replace("│", " ").split())


def test_parity_is_a_table_of_differences_against_tolerances(run, tmp_path, base):
    ran = run("diagnose", "-m", str(write_expert(tmp_path, base, {})), "--parity")
    assert ran.code == 0
    words = " ".join(ran.out.split())
    assert "✓ equal" in words
    assert "packed = unpacked" in words
    assert "float32 rounds at 2^-24" in words
    assert ran.out.splitlines()[-1] == wording("fast-paths-compute-what")


def test_a_profile_of_a_run_is_written_into_its_folder(run):
    folder = finished("lora")
    ran = run("diagnose", str(folder), "--profile", "1")
    assert ran.code == 0
    assert "aten::mm" in ran.out
    [trace] = (folder / "profile").iterdir()
    assert str(trace) in ran.out.splitlines()[-1]


def test_a_fix_is_tried_and_reported_before_and_after(run, tmp_path, base):
    config = {"gradient_checkpointing": True, "max_seq_length": 64}
    manifest = write_expert(tmp_path, base, config)
    ran = run("diagnose", "-m", str(manifest), "--try")
    assert ran.code == 0
    assert "--set training.config.gradient_checkpointing=auto" in ran.out
    assert "before" in ran.out
    assert wording("tokens-a-second") in ran.out
