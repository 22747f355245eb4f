"""`expert benchmark` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.jobs.benchmark import benchmark as job
from tests.cli.running import Runner
from tests.jobs.benchmark.fake_processes import Played
from tests.jobs.runs import base_model, write_expert


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    return str(write_expert(tmp_path / "expert", base_model(), {}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to measure"),
        (("--dataset", "rows.jsonl"), "without a manifest the built-in character GPT is trained"),
        (("--only", "rocket", "-m", "{manifest}"), "--only rocket: no such setting"),
        (("--to", "{folder}", "-m", "{manifest}"), "name a .json file"),
        (("--to", "x.md", "-m", "{manifest}"), "name a .json file"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    run: Runner, manifest, tmp_path, arguments, words
):
    places = {"manifest": manifest, "folder": tmp_path}
    ran = run("benchmark", *(argument.format(**places) for argument in arguments))
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


def test_settings_are_shown_as_they_are_measured(run: Runner, manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "events_of", Played({"packing": 250.0}))
    to = tmp_path / "results" / "mine.json"
    more = ("--only", "packing", "--to", str(to), "--json", "--device", "cpu")
    ran = run("benchmark", "-m", manifest, "--quick", *more, "--set", "seed=7")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["command"].startswith("expert benchmark -m ")
    assert "packing: several rows to a sequence" in ran.err
    assert "packing: 250 tokens/s, 2.50x" in ran.err
    assert json.loads(to.read_text(encoding="utf-8")) == found
    assert to.with_suffix(".html").is_file()
