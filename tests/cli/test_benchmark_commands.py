"""`expert benchmark` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expert.cli.benchmark import show_ladder
from expert.jobs.benchmark import benchmark as job
from tests.cli.running import Runner
from tests.cli.screens import recorded
from tests.insight.ladders import ladder, setting
from tests.jobs.benchmark.fake_processes import Played
from tests.jobs.runs import base_model, write_expert

CLIMBED = ladder(
    setting("baseline", 100.0, cumulative=1.0),
    setting("packing", 250.0, gain=2.5, cumulative=2.5, loss_difference=0.001, tolerance=0.05),
    setting("compile", None, "not here"),
)


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    return str(write_expert(tmp_path / "expert", base_model(), {}))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to measure"),
        (("--dataset", "rows.jsonl"), "without a manifest the built-in character GPT is trained"),
        (("--only", "rocket", "-m", "{manifest}"), "--only rocket: no such setting"),
        (("--to", "{folder}", "-m", "{manifest}"), "is a folder (--to"),
        (("--to", "x.md", "-m", "{manifest}"), "the result is JSON, and .md is written next to it"),
        (("--compare", "nowhere", "nowhere"), "nowhere: not a result of expert benchmark"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    run: Runner, manifest, tmp_path, arguments, words
):
    places = {"manifest": manifest, "folder": tmp_path}
    ran = run("benchmark", *(argument.format(**places) for argument in arguments))
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


def test_two_results_side_by_side_and_what_differs_between_them(run: Runner, tmp_path):
    other = CLIMBED.model_copy(update={"dataset": "other.jsonl", "model": "big", "card": "H200"})
    faster = ladder(setting("baseline", 150.0), setting("loader", 220.0))
    written = {"a": CLIMBED, "b": faster, "c": other}
    for name, one in written.items():
        (tmp_path / name).write_text(one.model_dump_json(), encoding="utf-8")
    pair = (str(tmp_path / "a"), str(tmp_path / "b"))
    ran = run("benchmark", "--compare", *pair)
    assert ran.code == 0
    line = next(line for line in ran.out.splitlines() if line.startswith("baseline: tokens/s"))
    assert line.split()[2:] == ["100", "150", "1.500x"]
    assert "different" not in ran.out
    rows = json.loads(run("benchmark", "--compare", *pair, "--json").out)
    assert [list(row.values()) for row in rows if row["what"].endswith(" tokens/s")] == [
        ["baseline: tokens/s", 100.0, 150.0, 1.5],
        ["packing: tokens/s", 250.0, None, None],
        ["loader: tokens/s", None, 220.0, None],
    ]
    assert rows[0].keys() == {"what", "first", "second", "ratio"}
    ran = run("benchmark", "--compare", pair[0], str(tmp_path / "c"), "--json")
    assert "different data" in ran.err
    json.loads(ran.out)


def test_the_ladder_is_a_sentence_a_table_and_how_it_was_measured():
    for terminal in (False, True):
        shown, file = recorded(terminal=terminal, width=160)
        show_ladder(CLIMBED, shown)
        text = file.getvalue()
        assert "demo on Test CPU: 250 tokens/s, 2.5 times the baseline" in text
        assert "expert benchmark --quick" in text
        assert "GPU" not in text  # no setting has it: no column
        assert ("█" in text) == terminal


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
    assert to.with_suffix(".md").is_file()
    assert to.with_suffix(".html").is_file()
