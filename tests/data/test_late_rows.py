"""Tokenising late: the slow way most people begin with, through a whole run."""

from __future__ import annotations

from typing import Any

from tests.jobs.runs import ROWS, events_of, losses_of, run, weights_of, write_expert

PADDED: dict[str, Any] = {
    "packing": False,
    "micro_batch_size": 4,
    "max_steps": 4,
}
BAD_ROWS = [{"instruction": "", "response": ""}, *ROWS[:20], {"wrong": 1}, *ROWS[20:]]


def test_late_tokenisation_trains_the_same_as_prepared_tokens(tmp_path, base):
    """By a worker, with a soft prompt; bad and overlong rows are left out."""
    settings = {**PADDED, "max_seq_length": 33, "overlong": "drop", "dataloader_num_workers": 1}
    more: dict[str, Any] = {
        "rows": BAD_ROWS,
        "dataset": {"max_bad_rows": 2},
        "soft_prompts": [{"name": "lead", "tokens": 3}],
    }
    ahead = run(write_expert(tmp_path / "ahead", base, settings, **more)).folder
    settings["tokenize"] = "late"
    late = run(write_expert(tmp_path / "late", base, settings, **more)).folder
    assert len(losses_of(late)) == 4
    assert losses_of(late) == losses_of(ahead)
    assert weights_of(late) == weights_of(ahead)
    assert {event["kind"] for event in events_of(ahead, "feed")} == {"padded"}
    assert {event["kind"] for event in events_of(late, "feed")} == {"late"}
