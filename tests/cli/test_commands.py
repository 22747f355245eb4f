"""Every command: what it prints, what it exits with, and that no fault shows a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jsonschema
import pytest

from expert.cli.app import COMMAND_ORDER
from tests.cli.running import EXAMPLES, EXPERT_JSON

EXAMPLE_FILES = sorted([*EXAMPLES.rglob("*.yaml"), *EXAMPLES.rglob("manifest.json")])
assert len(EXAMPLE_FILES) >= 3


def test_help_fits_on_a_screen_the_commands_of_every_week_first(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "bool" not in run("train", "--help").out  # a switch has no value beside it
    lines = run("--help").out.splitlines()
    assert len(lines) <= 23, lines  # and the prompt
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    named = [words[1] for words in rows if len(words) > 2 and words[1] in COMMAND_ORDER]
    every_week = "new dataset plan train watch sample validate export serve board"
    assert named == every_week.split()
    assert {word.strip(".,") for words in rows for word in words} >= set(COMMAND_ORDER)


@pytest.mark.parametrize("file", EXAMPLE_FILES, ids=lambda file: file.parent.name)
def test_every_shipped_manifest_reads_and_plans(run, file):
    assert run("manifest", "check", str(file)).code == 0
    assert run("plan", "--manifest", str(file), "--gpu", "rtx-4080-super").code == 0


def test_a_plan_is_a_table_of_key_value_because_and_source_or_json(run):
    asked = ("plan", "--manifest", EXPERT_JSON, "--gpu", "rtx-4090")
    ran = run(*asked, "--full")
    assert ran.out == run(*asked, "--all").out  # its name in earlier versions
    lines = [line.split("  ") for line in ran.out.splitlines()]
    heads = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["key", "value", "because", "source"] in heads
    [first] = [line for line in heads if line[:1] == ["kernels.precision"]]
    assert (first[1], first[-1]) == ("bf16", "machine")
    assert first[2].startswith("GeForce RTX 4090 (8.9) has")
    assert "optim.weight_decay" in ran.out
    other = ("--set", "epochs=7", "--set", "base_models[0].name=HuggingFaceTB/SmolLM2-135M")
    plan = json.loads(run(*asked, "--json", *other).out)
    assert plan["kernels"]["precision"] == "bf16"
    assert {"path", "value", "because", "source"} == plan["decisions"][0].keys()
    assert plan["length"]["epochs"] == 7
    assert plan["model"]["parameters"] == 134_515_008
    assert "GeForce RTX 4090   H200 SXM" in run(*asked, "--gpu", "h200").out
    both = json.loads(run(*asked, "--gpu", "h200", "--json").out)
    assert [plan["target"] for plan in both] == ["GeForce RTX 4090", "H200 SXM"]


def test_a_plan_is_its_verdict_time_and_three_decisions_unless_all_of_it_is_asked_for(run):
    ran = run("plan", "--manifest", EXPERT_JSON, "--gpu", "rtx-4090")
    lines = ran.out.splitlines()
    assert lines[0].startswith("✓ fits: ")
    assert any(line.startswith("expected time: unknown") for line in lines)
    assert len([line for line in lines if line.startswith(("batch.", "kernels.", "data."))]) == 3
    assert "every setting and its reason" in lines[-1]
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80


def test_a_plan_with_many_warnings_keeps_to_a_screen_and_starts_with_what_would_fit(run):
    settings = (
        *("base_model=Llama-3.1-8B", "max_seq_length=4096", "learning_rate=0.5", "epochs=30"),
        *("dropout=0.9", "attention=flash4", "warmup_steps=9000", "eval_batch_size=4000"),
    )
    words = [word for setting in settings for word in ("--set", setting)]
    ran = run("plan", EXPERT_JSON, "--gpu", "rtx-4060", *words)
    lines = ran.out.splitlines()
    assert lines[0].startswith("✗ does not fit: ")
    assert lines[1].startswith("warning: memory.fits: ")
    assert "more warnings" in ran.out
    assert len(lines) <= 15


def test_a_value_from_the_command_line_says_so(run):
    asked = ("plan", "--manifest", EXPERT_JSON, "--gpu", "rtx-4090", "--json")
    given = ("rank=8", "micro_batch_size=2", "packing=false", "optim=sgd", "bf16=true")
    words = [word for setting in given for word in ("--set", setting)]
    decided = {each["path"]: each for each in json.loads(run(*asked, *words).out)["decisions"]}
    paths = ("adapter.rank", "batch.micro_batch", "data.packing", "optim.optimizer")
    assert {decided[path]["source"] for path in paths} == {"--set"}
    assert {decided[path]["because"] for path in paths} == {"set on the command line"}
    assert decided["data.dataset"]["source"] == "manifest"


def test_keys_under_other_names_are_counted_and_listed_on_request(run, tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("base_model: tiny\ndataset: a.jsonl\nepochs: 2\n", encoding="utf-8")
    assert "2 keys read under another name: --full shows them" in run("plan", str(file)).out
    assert "line 3: epochs: read as training.config.epochs" in run("plan", str(file), "--full").out


def test_a_plan_that_does_not_fit_exits_with_3_and_one_of_unknown_size_with_0(run, tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("base_model: microsoft/phi-4\ndataset: a.jsonl\n", encoding="utf-8")
    ran = run("plan", "--manifest", str(file), "--gpu", "gtx-1650")
    assert ran.code == 3
    assert "✗ does not fit: " in ran.out
    assert "warning: memory.fits: needs " in ran.out
    file.write_text("base_model: Qwen3-1.5B\ndataset: a.jsonl\n", encoding="utf-8")
    ran = run("plan", "--manifest", str(file), "--gpu", "rtx-4090")
    assert ran.code == 0
    assert "whether it fits is unknown: Qwen3-1.5B is not on this machine" in ran.out


def test_a_broken_manifest_lists_every_problem_and_the_others_are_still_checked(run, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "base_model: x\ndataset: a.jsonl\ntraining:\n  config:\n    epoch: 3\n    rank: two\n",
        encoding="utf-8",
    )
    ran = run("manifest", "check", str(broken), EXPERT_JSON)
    assert ran.code == 2
    assert ran.err.startswith(f"{broken}: 2 problems\n  - line 5: training.config.epoch: unknown")
    assert "line 6: training.config.rank: got 'two' (text), expected a whole number" in ran.err
    assert f"✓ {EXPERT_JSON}: expert-json is valid" in ran.out
    broken.write_text("base_model: x\ndataset: a.jsonl\nmood: cheerful\n", encoding="utf-8")
    [found] = json.loads(run("manifest", "check", "--json", str(broken)).out)
    assert found["problems"] == []
    assert {"kind", "path", "text", "line"} == found["notices"][0].keys()
    strict = run("manifest", "check", "--strict", str(broken))
    assert strict.code == 2
    assert "line 3: mood: unknown key" in strict.err


def test_explain_shows_a_key_from_the_schema(run):
    out = run("manifest", "explain", "per_device_train_batch_size").out
    assert "training.config.batch_size" in out
    assert "a whole number of at least 1" in out
    everything = json.loads(run("manifest", "explain", "--json").out)
    assert len(everything) > 100


def test_the_schema_accepts_every_example(run):
    schema = json.loads(run("manifest", "schema").out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(Path(EXPERT_JSON).read_text(encoding="utf-8")), schema)


def test_upgrade_writes_beside_the_file_and_never_over_another(run, tmp_path):
    old = tmp_path / "old.json"
    old.write_text('{"base_model": "x", "dataset": "a.jsonl"}', encoding="utf-8")
    assert json.loads(run("manifest", "upgrade", "--stdout", str(old)).out)["name"]
    ran = run("manifest", "upgrade", str(old), "--in-place", "--output", "x.json")
    assert (ran.code, "choose one" in ran.err) == (2, True)
    ran = run("manifest", "upgrade", str(old), "--output", str(old / "new.json"))
    assert (ran.code, "Traceback" in ran.err, str(old) in ran.err) == (2, False, True)
    assert [path.name for path in tmp_path.glob("*.json")] == ["old.json"]
    assert run("manifest", "upgrade", str(old)).code == 0
    written = json.loads(old.with_name("old-2.0.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == "2.0"
    assert written["training"]["config"]["bf16"] == "auto"
    again = run("manifest", "upgrade", str(old))
    assert again.code == 2
    assert "old-2.0.json exists" in again.err
    before = old.read_text(encoding="utf-8")
    assert run("manifest", "upgrade", "--in-place", str(old)).code == 0
    assert (tmp_path / "old.json.bak").read_text(encoding="utf-8") == before


def test_the_machine_and_its_cards_are_listed(run):
    assert "cores available" in run("machine").out
    facts = json.loads(run("machine", "--json").out)
    assert {"value", "source"} == facts["cores_available"].keys()
    assert "rtx-4090" in run("machine", "--cards").out
    assert len(json.loads(run("machine", "--cards", "--json").out)) >= 60


def test_a_fault_of_our_own_is_reported_in_plain_words_and_kept_in_a_file(run, monkeypatch):
    fail = MagicMock(side_effect=ZeroDivisionError("something impossible"))
    monkeypatch.setattr("expert.planning.machine.machine.describe_machine", fail)
    ran = run("machine")
    assert ran.code == 1
    assert "Internal error in expert: ZeroDivisionError" in ran.err
    assert "Traceback" not in ran.err
    name = ran.err.split("Details are in ")[1].split(";")[0].replace("\n", "")
    kept = Path(name).read_text(encoding="utf-8")
    os.unlink(name)
    assert "Traceback" in kept
    assert "something impossible" in kept


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("nonsense 2>&1", 2),  # an error that nobody reads keeps its exit code
        ("machine --models", 0),
        ("machine --cards", 0),  # short enough to wait in a buffer until the end
        (f"plan -m {EXAMPLES / 'llama-8b' / 'manifest.yaml'} --vram 2GB --all", 3),
    ],
)
def test_a_reader_that_leaves_a_pipe_gets_no_complaint_and_changes_no_exit_code(arguments, code):
    # The reader leaves before anything is written, whatever the size of the pipe.
    pipe = f"{sys.executable} -m expert {arguments} | exec true; echo ${{PIPESTATUS[0]}}"
    ran = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == (f"{code}\n", "")
