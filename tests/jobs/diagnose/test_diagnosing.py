"""What is left to diagnose a run by, however seldom it logs."""

from __future__ import annotations

from expert.jobs.diagnose.diagnose import diagnose_run
from tests.jobs.runs import base_model, events_of, run, write_expert


def test_a_run_shorter_than_its_log_interval_can_be_diagnosed(tmp_path):
    config = {"max_steps": 5, "logging_steps": 1000}
    done = run(write_expert(tmp_path / "own", base_model(), config))
    [line] = events_of(done.folder, "step")
    assert (line["step"], line["updates"]) == (5, 5)
    found = diagnose_run(done.folder)
    assert found.step_verdict.kind != "unknown"
    assert found.anatomy.step.wall > 0
