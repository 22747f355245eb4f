"""What is shown around a run: waiting, preparing, and its status."""

from __future__ import annotations

from typing import Any

from expert.cli.show.progress import SECONDS_BETWEEN_LINES, PreparingView, RunProgress, initial_text
from tests.cli.screens import recorded
from tests.each import each
from tests.wording import wording


def test_outside_a_terminal_preparing_shows_a_line_now_and_then():
    console, file = recorded(terminal=False)
    now = [0.0]
    with PreparingView(console, clock=lambda: now[0]) as tell:
        tell("train rows.jsonl", 10, 100)
        now[0] += SECONDS_BETWEEN_LINES
        tell("train rows.jsonl", 2000, 3_000_100)
        tell("train rows.jsonl", 2001, 3_000_200)
    assert file.getvalue().splitlines() == [
        wording("reading-the-data"),
        "preparing train rows.jsonl: 2,000 rows, 3.0 M tokens, 600,000 tokens/s",
    ]


@each("terminal", [True, False])
def test_commands_that_only_read_rows_say_so_at_once_in_a_terminal_and_later_elsewhere(terminal):
    console, file = recorded(terminal=terminal)
    now = [0.0]
    before = initial_text(console)
    with PreparingView(console, clock=lambda: now[0], before=before, verb="reading") as tell:
        now[0] += SECONDS_BETWEEN_LINES
        tell("train", 10, 100)
    if terminal:
        assert wording("reading-data") in file.getvalue()
    else:
        assert file.getvalue() == "reading train: 10 rows, 100 tokens\n"


def test_where_the_number_of_rows_is_known_preparing_shows_when_it_will_be_done():
    console, file = recorded(terminal=False)
    now = [0.0]
    with PreparingView(console, clock=lambda: now[0]) as tell:
        tell.expect("train rows.jsonl, part 2/8", 10_000)
        tell("train rows.jsonl, part 2/8", 4000, 1000)  # made by an earlier attempt
        now[0] += SECONDS_BETWEEN_LINES
        tell("train rows.jsonl, part 2/8", 5000, 2000)
        tell.waits("waiting for process 7")
    assert file.getvalue().splitlines()[1:] == [
        "preparing train rows.jsonl, part 2/8: 5,000 of 10,000 rows, 2,000 tokens, 200 tokens/s, "
        "ETA 25 s",
        "waiting for process 7",
    ]


def test_in_a_terminal_a_spinner_gives_way_to_bars_and_they_to_the_run():
    console, file = recorded(terminal=True)
    with RunProgress(console, live=True) as view:
        with PreparingView(console) as tell:
            tell("train rows.jsonl", 10, 100)
        view({"event": "started", "expert": "demo", "model": "tiny", "total_steps": 2})
        view({"event": "kernels", "lines": ["✓ packing"]})
        view({"event": "step", "step": 1, "loss": 2.0})
        view({"event": "step", "step": 2, "loss": 1.0})
    text = file.getvalue()
    order = [
        wording("reading-data"),
        "train rows.jsonl",
        "demo: tiny",
        wording("loading-the-model"),
        "loss 1.0",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_in_a_terminal_the_spinner_stays_until_the_first_step():
    console, file = recorded(terminal=True)
    before = {"event": "warning", "text": "rows were left out"}
    with RunProgress(console, live=True) as view:
        view({"event": "started", "expert": "demo", "model": "tiny", "total_steps": 2})
        view({"event": "kernels", "lines": ["✓ packing"]})
        for now, event in (("loading-the-model", before), ("first-step", {"event": "loaded"})):
            view(event)
            drawn = file.tell()
            console.print("a line above the spinner")
            assert wording(now) in file.getvalue()[drawn:]
        view({"event": "step", "step": 1, "loss": 2.0})
        drawn = file.tell()
        console.print("a line above the bar")
        assert wording("first-step") not in file.getvalue()[drawn:]


def test_a_failure_is_reported_by_its_error_while_the_run_is_live():
    failed: dict[str, Any] = {"event": "failed", "error": "no"}
    for live, expected in ((True, ""), (False, "failed: no\n")):
        console, file = recorded(terminal=False)
        with RunProgress(console, live=live) as view:
            view(failed)
        assert file.getvalue() == expected
