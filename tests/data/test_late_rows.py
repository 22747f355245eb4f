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


BAD_ROWS = [{"instruction": "", "response": ""}, *ROWS[:20], {"wrong": 1}, *ROWS[20:]]


@pytest.mark.parametrize(
    ("config", "more"),
    [
        # A third of the rows is cut.
        ({"group_by_length": False, "dataloader_num_workers": 1, "max_seq_length": 24}, {}),
        # Bad and overlong rows are left out.
        (
            {"max_seq_length": 33, "overlong": "drop"},
            {
                "rows": BAD_ROWS,
                "dataset": {"max_bad_rows": 2},
                "soft_prompts": [{"name": "lead", "tokens": 3}],
            },
        ),
    ],
    ids=["cut, by a worker", "left out, with a soft prompt"],
)
def test_late_tokenisation_trains_the_same_as_prepared_tokens(tmp_path, base, config, more):
    settings = {**PADDED, **config}
    ahead = run(write_expert(tmp_path / "ahead", base, settings, **more)).folder
    settings["tokenize"] = "late"
    late = run(write_expert(tmp_path / "late", base, settings, **more)).folder
    assert len(losses_of(late)) == 4
    assert losses_of(late) == losses_of(ahead)
    assert weights_of(late) == weights_of(ahead)
    assert {event["kind"] for event in events_of(ahead, "feed")} == {"padded"}
    assert {event["kind"] for event in events_of(late, "feed")} == {"late"}
