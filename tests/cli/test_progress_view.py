"""Progress of a run: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import errno
import io
import os
import re

import pytest

from expert.cli.show.display import Waiting, make_console
from expert.cli.show.progress import SECONDS_BETWEEN_LINES, PreparingView, RunProgress
from tests.cli.screens import STARTED, STEP, Screen, recorded

# --- between two step lines ----------------------------------------------------------------------


def test_plain_output_has_a_line_after_the_first_step_and_then_one_in_twenty_seconds():
    screen = Screen(terminal=False)
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        before = len(screen.lines())
        for step in range(1, 43):
            screen.now = float(step)
            screen.view.progress(step)
    assert screen.lines()[before:] == [f"step {step}/900" for step in (1, 21, 41)]


def test_the_bar_moves_with_every_step_and_keeps_what_the_last_line_showed():
    screen = Screen(terminal=True)
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        screen.now = 1.0
        screen.view.progress(1)
        assert "1/900" in screen.file.getvalue()
        screen.now = 2.0
        screen.view(STEP)
        screen.now = 3.0
        screen.view.progress(121)
    assert re.search(r"121/900  loss 1\.2345", screen.file.getvalue())


# --- the bar -------------------------------------------------------------------------------------


def test_in_a_terminal_a_step_moves_a_bar_that_fits_a_hundred_columns():
    screen = Screen(terminal=True).show(STARTED, STEP)
    text = screen.console.export_text()
    assert "120/900  loss 1.2345  104,233 tok/s  2.31 it/s  GPU 98 %  peak 25.0 GiB  ETA" in text
    assert "━" in text
    drawn = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.file.getvalue()))
    assert max(map(len, drawn)) <= 100
    above = Screen(terminal=True).show(STARTED, STEP, {"event": "warning", "text": "[red]hot"})
    assert "warning: [red]hot" in above.console.export_text()  # brackets are not markup


@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_step_shows_no_time_left(terminal):
    """What is left are evaluations, which show their own rows."""
    last = Screen(terminal=terminal).show(STARTED, STEP | {"step": 900, "eta_seconds": 180})
    assert "900/900" in last.file.getvalue()
    assert "ETA" not in last.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_that_is_closed_ends_neither_a_run_nor_what_comes_before_it(
    terminal, monkeypatch
):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout", Closed())
    console = make_console(needed=False)
    assert console.is_terminal is terminal
    with Waiting(console) as stage, PreparingView(console), RunProgress(console, live=True) as view:
        stage("loading")
        view({"event": "kernels", "lines": ["✓ packing"]})
        view(STARTED)
        view(STEP)
        view(STEP)


# --- evaluations ---------------------------------------------------------------------------------


def evaluated(screen: Screen, *moments: tuple[float, int]) -> list[str]:
    """What was printed after the last step line, when rows were launched at these moments."""
    with screen.view:
        screen.view(STARTED)
        screen.view(STEP | {"step": 900})
        before = len(screen.lines())
        for screen.now, rows in moments:
            screen.view.evaluating("validation", rows, 5000)
        screen.view({"event": "eval", "step": 900, "split": "validation", "loss": 1.5})
    return screen.lines()[before:]


def test_a_long_evaluation_has_plain_lines_with_its_pace_and_the_time_left():
    every_second = [(float(second), 100 * second) for second in range(51)]
    assert evaluated(Screen(terminal=False), *every_second) == [
        "evaluating validation: 2,000/5,000 rows  100 rows/s  ETA 30 s",
        "evaluating validation: 4,000/5,000 rows  100 rows/s  ETA 10 s",
        "step 900  validation loss 1.5000",
    ]


def test_a_long_evaluation_has_a_bar_of_its_own_that_goes_when_it_is_over():
    screen = Screen(terminal=True)
    evaluated(screen, (0.0, 0), (1.0, 100), (3.0, 300))
    assert "evaluating validation: 300/5,000 rows  100 rows/s  ETA 47 s" in screen.file.getvalue()
    assert "evaluating" not in screen.lines()[-1]


# --- around a run ---------------------------------------------------------------------------------


def test_where_the_number_of_rows_is_known_preparing_shows_when_it_will_be_done():
    console, file = recorded(terminal=False)
    now = [0.0]
    with PreparingView(console, clock=lambda: now[0]) as tell:
        tell.expect("train rows.jsonl, part 2/8", 10_000)
        tell("train rows.jsonl, part 2/8", 4000, 1000)  # made by an earlier attempt
        now[0] += SECONDS_BETWEEN_LINES
        tell("train rows.jsonl, part 2/8", 5000, 2000)
        now[0] += SECONDS_BETWEEN_LINES
        tell("train rows.jsonl, part 2/8", 10_000, 9000)
        tell.waits("waiting for process 7")
        now[0] += SECONDS_BETWEEN_LINES
        tell("train bad.jsonl", 70, 0)
    assert file.getvalue().splitlines()[1:] == [
        "preparing train rows.jsonl, part 2/8: 5,000 of 10,000 rows, 2,000 tokens, 200 tokens/s, "
        "ETA 25 s",
        "preparing train rows.jsonl, part 2/8: 10,000 rows, 9,000 tokens, 800 tokens/s",
        "waiting for process 7",
        "preparing train bad.jsonl: 70 rows",
    ]


def test_in_a_terminal_a_spinner_gives_way_to_the_run():
    console, file = recorded(terminal=True)
    with RunProgress(console, live=True) as view:
        with PreparingView(console) as tell:
            tell("train rows.jsonl", 10, 100)
        view({"event": "started", "expert": "demo", "model": "tiny", "total_steps": 2})
        view({"event": "kernels", "lines": ["✓ packing"]})
        view({"event": "step", "step": 1, "loss": 2.0})
        view({"event": "step", "step": 2, "loss": 1.0})
    text = file.getvalue()
    order = ("train rows.jsonl", "demo: tiny", "loading the model", "loss 1.0")
    places = list(map(text.index, order))
    assert places == sorted(places)
