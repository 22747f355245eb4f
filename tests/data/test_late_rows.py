"""Tokenising late: the slow way most people begin with, through a whole run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs.runs import ROWS, events_of, losses_of, run, weights_of, write_expert

PADDED: dict[str, Any] = {
    "packing": False,
    "micro_batch_size": 4,
    "max_steps": 4,
    "dataloader_num_workers": 0,
}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ({}, {}),
        ({"group_by_length": False, "dataloader_num_workers": 1}, {}),
        ({"max_seq_length": 24}, {}),  # a third of the rows is cut
        ({"max_seq_length": 30, "overlong": "drop"}, {}),
        ({}, {"soft_prompts": [{"name": "lead", "tokens": 3}]}),
    ],
    ids=["plain", "a worker", "cut", "dropped", "soft prompt"],
)
def test_a_run_that_tokenises_late_learns_exactly_what_a_prepared_one_learns(
    tmp_path, base, config, more
):
    settings = {**PADDED, **config}
    ahead = run(write_expert(tmp_path / "ahead", base, settings, **more)).folder
    settings["tokenize"] = "late"
    late = run(write_expert(tmp_path / "late", base, settings, **more)).folder
    assert len(losses_of(late)) == 4
    assert losses_of(late) == losses_of(ahead)
    assert weights_of(late) == weights_of(ahead)
    assert {event["kind"] for event in events_of(ahead, "feed")} == {"padded"}
    assert {event["kind"] for event in events_of(late, "feed")} == {"late"}


def test_rows_that_preparing_left_out_are_left_out_late_too(tmp_path, base):
    rows = [{"instruction": "", "response": ""}, *ROWS[:20], {"wrong": 1}, *ROWS[20:]]
    dataset = {"max_bad_rows": 2}
    settings = {**PADDED, "tokenize": "late"}
    late = write_expert(tmp_path / "late", base, settings, rows=rows, dataset=dataset)
    ahead = write_expert(tmp_path / "ahead", base, PADDED, rows=rows, dataset=dataset)
    assert losses_of(run(late).folder) == losses_of(run(ahead).folder)
