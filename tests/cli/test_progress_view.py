"""Progress of a run: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import errno
import io
import os
import re
from typing import Any

import pytest

from expert.cli.show.display import make_console
from expert.cli.show.progress import (
    SECONDS_BETWEEN_LINES,
    PreparingView,
    RunProgress,
    Stages,
    fitting,
    initial_text,
)
from expert.insight.event_text import step_parts
from tests.cli.screens import PLAIN_STEP, STARTED, STEP, Screen, recorded
from tests.each import each

# --- between two step lines ----------------------------------------------------------------------


def progressed(screen: Screen, *moments: tuple[float, int]) -> list[str]:
    """What was printed after the start, if steps were launched at these times."""
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        before = len(screen.lines())
        for screen.now, step in moments:
            screen.view.progress(step)
    return screen.lines()[before:]


def test_plain_output_has_a_line_after_the_first_step_and_then_one_in_twenty_seconds():
    every_second = [(float(step), step) for step in range(1, 43)]
    assert progressed(Screen(terminal=False), *every_second) == [
        "step 1/900",
        "step 21/900",
        "step 41/900",
    ]


def test_a_step_line_counts_as_progress_output():
    screen = Screen(terminal=False)
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        for screen.now, step in ((1.0, 1), (19.0, 119)):
            screen.view.progress(step)
        screen.view(STEP)
        screen.now = 30.0
        screen.view.progress(130)
    assert screen.lines()[-2:] == ["step 1/900", PLAIN_STEP]
    every = Screen(terminal=False)  # if every step has a line, the first has no other
    with every.view:
        every.view(STARTED | {"logging_steps": 1})
        every.view.progress(1)
    assert every.lines()[-1] == "run folder: runs/a"


def test_before_the_first_step_line_the_bar_shows_the_time_left_by_the_pace_of_steps():
    screen = Screen(terminal=True, width=80)
    progressed(screen, (0.0, 1), (2.0, 2), (10.0, 6))
    shown = screen.console.export_text()
    assert "6/900  ETA 30 min" in shown  # five steps in ten seconds, 894 left
    assert "1/900  ETA" not in shown  # a single step has no pace


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


@pytest.mark.parametrize("last", [899, 900])
def test_a_bar_that_is_left_shows_the_last_step_however_fast_it_came(last):
    screen = Screen(terminal=True)
    with screen.view:
        screen.view(STARTED)
        screen.view(STEP | {"step": 898})
        for step in range(898, last + 1):
            screen.view.progress(step)
        screen.view({"event": "finished"})
    left = re.split("[━╸] ", screen.console.export_text().splitlines()[-2])[-1]
    assert left.startswith(f"{last}/900  loss 1.2345")
    assert ("ETA" in left) == (last < 900)


# --- the bar -------------------------------------------------------------------------------------


def test_in_a_terminal_a_step_moves_a_bar_that_fits_a_hundred_columns():
    screen = Screen(terminal=True).show(STARTED, STEP)
    text = screen.console.export_text()
    assert (
        "120/900  loss 1.2345  104,233 tok/s  2.31 it/s  GPU 98 %  peak 25.0 GiB  ETA 12 min"
        in text
    )
    assert "━" in text
    drawn = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.file.getvalue()))
    assert max(map(len, drawn)) <= 100
    above = Screen(terminal=True).show(STARTED, STEP, {"event": "warning", "text": "[red]hot"})
    assert "warning: [red]hot" in above.console.export_text()  # brackets are not markup
    last = Screen(terminal=True).show(STARTED, STEP | {"step": 900, "eta_seconds": 60})
    assert "ETA 60 s" in last.console.export_text()  # of the evaluations that are left


def test_the_bar_is_drawn_at_most_ten_times_a_second_and_always_at_the_end():
    screen = Screen(terminal=True)
    with screen.view as view:
        view(STARTED)
        for step in range(1, 51):
            view(STEP | {"step": step})
        assert "50/900" not in screen.file.getvalue()
        screen.now = 0.2
        view(STEP | {"step": 51})
        assert "51/900" in screen.file.getvalue()
        view(STEP | {"step": 900})
        assert "900/900" in screen.file.getvalue()


@each("end", [(), ({"event": "stopped", "reason": "Ctrl-C"},)], ids=["without an end", "stopped"])
def test_the_bar_ends_with_the_run_and_a_resumed_run_gets_a_new_one(end):
    screen = Screen(terminal=True)
    with screen.view as view:
        for event in (STARTED, STEP, *end):
            view(event)
        before = len(screen.file.getvalue())
        screen.now = 1.0
        view(STARTED | {"total_steps": 950})
        assert "\x1b[?25h" in screen.file.getvalue()  # the cursor is back
        view(STEP)
    assert "120/950" in screen.file.getvalue()[before:]


@each("width", [40, 60, 80, 100, 160])
def test_the_bar_never_takes_more_than_one_line(width):
    parts = step_parts(STEP, total=900, epochs=3)
    assert len(fitting(parts, width - 9)) <= width - 9
    assert fitting(parts, width - 9).startswith("120/900")
    assert fitting(parts, 20) == "120/900  loss 1.2345"  # the loss is the last to go


@each(
    ("epoch", "shown"),
    [*((n, "1/3") for n in (1, 0.2, 0)), *((n, "3/3") for n in (3, 2.5, 9)), (1, "1/2.5")],
)
def test_the_epoch_is_counted_from_one_as_a_number_or_as_progress(epoch, shown):
    parts = step_parts(STEP | {"epoch": epoch}, total=900, epochs=float(shown[2:]))
    assert parts["epoch"] == f"epoch {shown}"


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
    with Stages(console) as stage, PreparingView(console), RunProgress(console, live=True) as view:
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


def test_an_evaluation_of_a_moment_is_not_shown():
    screen = Screen(terminal=True)
    evaluated(screen, (0.0, 0), (0.5, 2500), (1.9, 5000))
    assert "evaluating" not in screen.file.getvalue()


def test_the_first_batch_of_an_evaluation_which_may_compile_shows_no_pace():
    lines = evaluated(Screen(terminal=False), (0.0, 0), (40.0, 10), (42.0, 30), (60.0, 210))
    assert lines[:2] == [
        "evaluating validation: 10/5,000 rows",
        "evaluating validation: 210/5,000 rows  10 rows/s  ETA 8 min",
    ]


def test_before_the_first_step_line_the_time_left_has_the_evaluations_in_it():
    screen = Screen(terminal=True, width=80)
    with screen.view:
        screen.view(STARTED | {"total_steps": 40, "evaluation_updates": 100.0})
        for screen.now, step in ((0.0, 1), (2.0, 3)):
            screen.view.progress(step)
    assert "3/40  ETA 2 min" in screen.console.export_text()  # 37 steps and 100


# --- around a run ---------------------------------------------------------------------------------


def test_outside_a_terminal_preparing_shows_a_line_now_and_then():
    console, file = recorded(terminal=False)
    now = [0.0]
    with PreparingView(console, clock=lambda: now[0]) as tell:
        tell("train rows.jsonl", 10, 100)
        now[0] += SECONDS_BETWEEN_LINES
        tell("train rows.jsonl", 2000, 3_000_100)
        tell("train rows.jsonl", 2001, 3_000_200)
    assert file.getvalue().splitlines() == [
        "reading the data …",
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
        assert "reading the data" in file.getvalue()
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
        "reading the data",
        "train rows.jsonl",
        "demo: tiny",
        "loading the model",
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
        for now, event in (("loading the model", before), ("first step", {"event": "loaded"})):
            view(event)
            drawn = file.tell()
            console.print("a line above the spinner")
            assert now in file.getvalue()[drawn:]
        view({"event": "step", "step": 1, "loss": 2.0})
        drawn = file.tell()
        console.print("a line above the bar")
        assert "computing the first step" not in file.getvalue()[drawn:]


def test_a_failure_is_reported_by_its_error_while_the_run_is_live():
    failed: dict[str, Any] = {"event": "failed", "error": "no"}
    for live, expected in ((True, ""), (False, "failed: no\n")):
        console, file = recorded(terminal=False)
        with RunProgress(console, live=live) as view:
            view(failed)
        assert file.getvalue() == expected
