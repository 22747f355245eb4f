"""Messages about the mistakes that new users make first."""

from __future__ import annotations

import json

import pytest

from tests.each import each
from tests.jobs.runs import base_model
from tests.run.test_preparing import ROWS, lines

TINY = "name: fruit\nbase_model: {}\ndataset: {}\nbatch_size: 4\nepochs: 1\nmax_seq_length: 64\n"


def a_manifest(folder, *, model="tiny", rows="train.jsonl", more="", count=12):
    (folder / "train.jsonl").write_text(lines(ROWS[:count]), encoding="utf-8")
    path = folder / "manifest.yaml"
    path.write_text(TINY.format(model, rows) + more, encoding="utf-8")
    return str(path)


def a_trainable_manifest(folder, **more):
    """With a base that is made up, whose steps take a tenth of those of `tiny`."""
    return a_manifest(folder, model=f"{{name: {base_model()}, prompt_template: chatml}}", **more)


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"model": "tinny"}, "did you mean 'tiny'?"),
        ({"rows": "trian.jsonl"}, "did you mean 'train.jsonl'?"),
    ],
)
def test_a_misspelt_model_file_or_column_is_reported_by_check_and_plan_and_refused_by_train(
    run, tmp_path, monkeypatch, wrong, reported
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = a_manifest(tmp_path, **wrong)
    for command in (("manifest", "check"), ("plan",), ("plan", "--gpu", "h200", "--gpu", "l4")):
        ran = run(*command, file)
        assert (ran.code, ran.out.count("did you mean")) == (0, 1)
        assert reported in ran.out
    checked = json.loads(run("manifest", "check", file, "--json").out)
    assert reported in checked[0]["notices"][-1]["text"]
    ran = run("train", "-m", file)
    assert ran.code == 2
    assert reported in ran.err


def test_rows_that_were_left_out_are_reported_and_recorded(run, tmp_path):
    file = a_trainable_manifest(tmp_path)
    with (tmp_path / "train.jsonl").open("a", encoding="utf-8") as stream:
        stream.write("{\n" * 3)
    bad = run("train", "-m", file)
    assert bad.code == 2
    assert "train.jsonl: 3 rows cannot be used\n" in bad.err
    assert bad.err.count("train.jsonl") == 1
    leave = ("--set", "max_bad_rows=3")
    reported = "warning: 3 bad rows were left out, and kept in "
    made = run("pretokenize", "-m", file, *leave)
    assert (made.code, made.out.count(reported)) == (0, 1)
    ran = run("train", "-m", file, *leave)
    assert (ran.code, ran.out.count(reported)) == (0, 1)
    [events] = (tmp_path / "runs").glob("*/events.jsonl")
    data = [e for e in map(json.loads, events.read_text().splitlines()) if e["event"] == "data"]
    assert {event["bad_rows"] for event in data} == {3}


def test_a_run_that_is_resumed_with_other_options_is_reported_which_and_the_whole_command(
    run, tmp_path, monkeypatch
):
    file = a_trainable_manifest(tmp_path)
    assert run("train", file, "--epochs", "2").code == 0
    [folder] = (tmp_path / "runs").iterdir()
    ran = run("train", file, "--resume")
    assert ran.code == 2
    assert "  - epochs: was 2, is 1\n" in ran.err
    assert ran.err.endswith(f"as it was started: expert train {file} --epochs 2 --resume\n")
    ran = run("train", file, "--epochs", "5", "--set", "seed=7", "--resume", str(folder))
    assert ran.err.endswith(f"expert train {file} --epochs 2 --set seed=42 --resume {folder}\n")
    monkeypatch.setattr("expert.run.session.session.Session", None)  # nothing is loaded or trained
    ran = run("train", file, "--set", "seed=7", "--epochs=2", "--set", "seed=42", "--resume")
    assert ran.code == 0, ran.err
    assert f"✓ nothing left to do: {folder} is finished\n" in ran.out
    assert f"--epochs N --resume {folder} --allow-changed\n" in ran.out


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        (("train", "{file}", "--dry-run"), "nothing was written"),
        (("pretokenize", "{folder}"), "cache miss"),
        (("dataset", "check", "{file}"), "no problems found in the data"),
        (("diagnose", "{file}", "--no-timing"), "a run would start"),
        (("plan", "{folder}"), "✓ fits"),
    ],
)
def test_the_manifest_may_be_named_without_its_option(run, tmp_path, command, reported):
    places = {"file": a_manifest(tmp_path), "folder": str(tmp_path)}
    words = [word.format(**places) for word in command]
    ran = run(*words)
    assert ran.code == 0, ran.err
    assert reported in ran.out
    twice = run(*words, "--manifest", places["file"])
    assert twice.code == 2
    assert "give one manifest" in " ".join(twice.err.replace("│", "").split())


def test_rows_that_are_missing_are_reported_with_the_script_that_makes_them(run, tmp_path):
    file = a_manifest(tmp_path)
    rows, script = tmp_path / "train.jsonl", tmp_path / "make_data.py"
    rows.unlink()
    script.touch()
    reported = f"train.jsonl: there is no {rows} (python {script} makes it)"
    for command in (("train",), ("plan",), ("dataset", "check"), ("pretokenize",)):
        ran = run(*command, "-m", file)
        assert reported in " ".join((ran.err + ran.out).split())


@each(
    ("name", "text"),
    [
        ("rows.csv", "prompt,response\nSay: hi,hi\n"),
        ("rows.json", json.dumps(ROWS)),
        ("rows.txt", "a: b: c\n"),
    ],
)
def test_rows_named_in_place_of_a_manifest_are_answered_with_the_command_that_makes_one(
    run, tmp_path, name, text
):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    ran = run("train", str(file))
    assert ran.code == 2
    assert f"expert new NAME --from {file}" in ran.err
