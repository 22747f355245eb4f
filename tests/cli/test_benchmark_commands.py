"""`expert benchmark` as a person calls it."""

from __future__ import annotations

import json

from expert.jobs.benchmark import benchmark as job
from tests.cli.running import Runner
from tests.jobs.benchmark.fake_processes import Played
from tests.jobs.runs import base_model, write_expert


def test_settings_are_shown_as_they_are_measured(run: Runner, tmp_path, monkeypatch):
    manifest = str(write_expert(tmp_path / "expert", base_model(), {}))
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
