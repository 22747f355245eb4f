"""What a person sees of a run, from plain events: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from expert.cli.event_lines import lines_of, step_parts
from expert.cli.progress_view import ProgressView, fitting

STARTED = {
    "event": "started",
    "expert": "expert-json",
    "model": "Qwen/Qwen3-0.6B",
    "device": "NVIDIA H200",
    "total_steps": 900,
    "epochs": 3,
    "run": "runs/a",
    "trainable_parameters": 4_600_000,
    "tokens_per_epoch": 1_200_000,
}
STEP = {
    "event": "step",
    "step": 120,
    "loss": 1.23449,
    "rate": 1.9e-4,
    "tokens_per_second": 104_233.4,
    "gpu_utilization": 98.0,
    "gpu_memory_bytes": 25 * 2**30,
    "data_wait": 0.001,
    "eta_seconds": 720,
    "epoch": 1,
}
EPOCH = {
    "event": "epoch",
    "step": 300,
    "epoch": 1,
    "loss": 1.714,
    "eval_loss": 1.65,
    "seconds": 42.0,
    "tokens_per_second": 103_000.0,
    "samples_per_second": 5.1,
}
PLAIN_STEP = (
    "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s  GPU 98 %  data wait 0.1 %  ETA 12 min"
)


class Screen:
    """A console that is recorded, and the view on it; its clock stands still until turned."""

    def __init__(self, *, terminal: bool, width: int = 100) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=terminal, width=width, record=True, color_system=None
        )
        self.now = 0.0
        self.view = ProgressView(self.console, clock=lambda: self.now)

    def show(self, *events: dict[str, Any]) -> Screen:
        with self.view:
            for event in events:
                self.view(event)
        return self

    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


def plain(*events: dict[str, Any]) -> list[str]:
    return Screen(terminal=False).show(*events).lines()


def only_line(**event: Any) -> str:
    [line] = plain(event)
    return line


# --- between two step lines ----------------------------------------------------------------------


def progressed(screen: Screen, *moments: tuple[float, int]) -> list[str]:
    """What was printed after the start, when updates were launched at these moments."""
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        before = len(screen.lines())
        for screen.now, step in moments:
            screen.view.progress(step)
    return screen.lines()[before:]


def test_plain_output_has_a_line_after_the_first_update_and_then_one_in_twenty_seconds():
    every_second = [(float(step), step) for step in range(1, 43)]
    assert progressed(Screen(terminal=False), *every_second) == [
        "step 1/900",
        "step 21/900",
        "step 41/900",
    ]


def test_a_step_line_is_a_sign_of_life_too():
    screen = Screen(terminal=False)
    with screen.view:
        screen.view(STARTED | {"logging_steps": 10})
        for screen.now, step in ((1.0, 1), (19.0, 119)):
            screen.view.progress(step)
        screen.view(STEP)
        screen.now = 30.0
        screen.view.progress(130)
    assert screen.lines()[-2:] == ["step 1/900", PLAIN_STEP]


def test_where_every_update_has_its_line_the_first_has_no_other():
    screen = Screen(terminal=False)
    with screen.view:
        screen.view(STARTED | {"logging_steps": 1})
        screen.view.progress(1)
    assert screen.lines()[-1] == "run folder: runs/a"


def test_before_the_first_step_line_the_bar_tells_the_time_left_by_the_pace_of_updates():
    screen = Screen(terminal=True, width=80)
    progressed(screen, (0.0, 1), (2.0, 2), (10.0, 6))
    shown = screen.console.export_text()
    assert "6/900  ETA 30 min" in shown  # five updates in ten seconds, 894 to come
    assert "1/900  ETA" not in shown  # one update alone tells no pace


def test_the_bar_moves_with_every_update_and_keeps_what_the_last_line_said():
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


def test_updates_faster_than_the_eye_are_not_drawn():
    screen = Screen(terminal=True)
    with screen.view:
        screen.view(STARTED)
        for step in range(1, 900):
            screen.now = 1.0 + step * 1e-5
            screen.view.progress(step)
        assert screen.file.getvalue().count("/900") == 1


@pytest.mark.parametrize("last", [899, 900])
def test_a_bar_that_is_left_shows_the_last_update_however_fast_it_came(last):
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


def test_the_bar_is_full_as_soon_as_the_last_update_is_launched():
    screen = Screen(terminal=True)
    with screen.view:
        screen.view(STARTED)
        screen.view(STEP | {"step": 899})
        screen.view.progress(900)
        assert "900/900" in screen.file.getvalue()


# --- lines ---------------------------------------------------------------------------------------


def test_outside_a_terminal_a_step_is_one_plain_line():
    assert plain(STARTED, STEP)[-1] == PLAIN_STEP


def test_a_start_says_who_learns_what_where():
    assert plain(STARTED) == [
        "expert-json: Qwen/Qwen3-0.6B on NVIDIA H200",
        "900 steps, 3 epochs, 1.2 M tokens an epoch, 4.6 M parameters learn",
        "run folder: runs/a",
    ]
    assert ", 1 epoch," in plain(STARTED | {"epochs": 1})[1]


def test_values_that_are_not_known_are_left_out_of_a_step():
    unknown = {"gpu_utilization": None, "data_wait": None, "eta_seconds": None}
    assert plain(STARTED, STEP | unknown)[-1] == (
        "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s"
    )


def test_a_value_of_zero_is_a_value():
    line = only_line(event="step", step=9, loss=0.0, data_wait=0.0, eta_seconds=0)
    assert line == "step 9  loss 0.00  data wait 0.0 %  ETA 0.0 s"


def test_a_step_without_a_start_has_no_total():
    assert only_line(event="step", step=7, loss=2.0) == "step 7  loss 2.0000"


def test_small_losses_keep_their_digits():
    told = {"event": "finished", "loss": 0.1438, "eval_loss": 2.1e-05}
    assert plain(told) == ["finished  mean loss 0.1438  best validation loss 2.10e-05"]
    assert only_line(event="step", step=9, loss=0.000234) == "step 9  loss 0.000234"


def test_rates_that_leave_the_warm_up_out_say_so():
    facts = {"seconds": 4.0, "tokens": 7871, "samples_per_second": 176.7}
    line = only_line(event="epoch", epoch=1, tokens_per_second=3931.0, **facts)
    assert line == "epoch 1  4.0 s  3,931 tok/s  176.7 samples/s after the warm-up"
    line = only_line(event="epoch", epoch=1, tokens_per_second=1968.0, **facts)
    assert line == "epoch 1  4.0 s  1,968 tok/s  176.7 samples/s"


def test_an_epoch_line_has_loss_time_and_throughput():
    assert plain(STARTED, EPOCH)[-1] == (
        "epoch 1/3  loss 1.71 (validation 1.65)  42 s  103,000 tok/s  5.1 samples/s"
    )


def test_an_epoch_without_validation_says_nothing_about_it():
    assert plain(STARTED, EPOCH | {"eval_loss": None, "loss": 0.03117})[-1].startswith(
        "epoch 1/3  loss 0.0312  42 s"
    )


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            {
                "event": "eval",
                "step": 300,
                "loss": 1.65,
                "perplexity": 5.207,
                "token_accuracy": 0.631,
                "seconds": 1.2,
                "best": True,
                "split": "validation",
            },
            "step 300  validation loss 1.6500  perplexity 5.207  token accuracy 63.1 %  1.2 s  "
            "best so far",
        ),
        (
            {"event": "saved", "path": "checkpoints/step-000400", "bytes": 2**30, "seconds": 0.8},
            "saved checkpoints/step-000400  1.0 GiB  0.8 s",
        ),
        ({"event": "compiled", "seconds": 41.0}, "compiled in 41 s"),
        ({"event": "warning", "text": "[bold]slow disk"}, "warning: [bold]slow disk"),
        (
            {"event": "log_failed", "what": "the file cannot be written", "because": "disk full"},
            "warning: the file cannot be written: disk full",
        ),
        (
            {"event": "not_finite", "step": 12, "bins": [4, 17], "policy": "skip"},
            "step 12: not a finite number in sequences 4, 17: skip",
        ),
        (
            {"event": "spike", "step": 340, "loss": 9.5, "median": 1.7, "z": 8.13},
            "step 340: the loss leaps: loss 9.50 (median 1.70, z 8.1)",
        ),
        (
            {"event": "rolled_back", "to_step": 300, "skipped": list(range(12))},
            "rolled back to step 300, skipping 12 (0, 1, 2, …)",
        ),
        ({"event": "rolled_back", "to_step": 300, "skipped": 0}, "rolled back to step 300"),
        ({"event": "skipped", "step": 8, "reason": "overflow"}, "step 8 skipped: overflow"),
        (
            {"event": "stopped", "reason": "Ctrl-C", "exit_code": 130},
            "stopped: Ctrl-C (exit code 130)",
        ),
        ({"event": "stopped", "reason": "no improvement"}, "stopped: no improvement"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_an_event_is_said_in_one_line(event, expected):
    assert plain(event) == [expected]


def test_kernels_are_listed_line_by_line():
    assert plain({"event": "kernels", "lines": ["flash: on", "tf32: on"]}) == [
        "flash: on",
        "tf32: on",
    ]


def test_a_fallback_says_what_failed_and_what_changes_and_why():
    changes = [
        {"path": "batch.rows", "value": 4, "because": "half of the rows fit"},
        {"path": "kernels.compile", "value": False},
    ]
    event = {"event": "fell_back", "failure": "out of memory", "reason": "2 GiB too few"}
    assert plain(event | {"changes": changes}) == [
        "fell back: out of memory: 2 GiB too few",
        "  batch.rows = 4  (half of the rows fit)",
        "  kernels.compile = no",
    ]


def test_the_end_says_how_long_how_good_and_where_it_is():
    finished = {
        "event": "finished",
        "loss": 1.1,
        "eval_loss": 1.2,
        "seconds": 700.0,
        "tokens_per_second": 104_000.0,
        "final": "runs/a/final",
    }
    assert plain(finished) == [
        "finished in 12 min  mean loss 1.1000  best validation loss 1.2000  104,000 tok/s",
        "final: runs/a/final",
    ]


def test_numbers_that_are_not_finite_are_shown_as_such():
    line = only_line(event="step", step=1, loss="nan", eta_seconds="inf", gpu_memory_bytes="nan")
    assert line == "step 1  loss nan  ETA ?"


def test_events_of_a_newer_version_and_empty_ones_are_passed_over():
    assert plain({"event": "levitated", "height": 3}, {}) == []
    known = ("eval", "saved", "fell_back", "not_finite", "spike", "rolled_back", "skipped")
    for name in (*known, "warning", "epoch", "stopped", "finished", "started", "kernels"):
        lines_of({"event": name})  # whatever is missing, nothing is raised


def test_a_run_read_back_from_its_file_looks_like_the_run_itself():
    events = [STARTED, STEP, EPOCH]
    stored = [json.loads(json.dumps(event)) for event in events]
    assert plain(*stored) == plain(*events)


# --- the bar -------------------------------------------------------------------------------------


def test_in_a_terminal_a_step_moves_a_bar_that_fits_a_hundred_columns():
    screen = Screen(terminal=True).show(STARTED, STEP)
    text = screen.console.export_text()
    assert (
        "120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s  GPU 98 %  25.0 GiB  ETA 12 min  epoch 1/3"
        in text
    )
    assert "━" in text
    drawn = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen.file.getvalue()))
    assert max(map(len, drawn)) <= 100


def test_lines_are_printed_above_the_bar_and_brackets_are_not_markup():
    screen = Screen(terminal=True).show(STARTED, STEP, {"event": "warning", "text": "[red]hot"})
    assert "warning: [red]hot" in screen.console.export_text()


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


def test_a_run_that_starts_again_without_an_end_gets_a_new_bar_too():
    screen = Screen(terminal=True)
    with screen.view as view:
        view(STARTED)
        view(STEP)
        view(STARTED)
        assert "\x1b[?25h" in screen.file.getvalue()


def test_the_bar_ends_with_the_run_and_a_resumed_run_gets_a_new_one():
    screen = Screen(terminal=True)
    with screen.view as view:
        view(STARTED)
        view(STEP)
        view({"event": "stopped", "reason": "Ctrl-C"})
        assert "\x1b[?25h" in screen.file.getvalue()  # the cursor is back
        before = len(screen.file.getvalue())
        screen.now = 1.0
        view(STARTED | {"total_steps": 950})
        view(STEP)
    assert "120/950" in screen.file.getvalue()[before:]


def test_leaving_the_view_in_the_middle_gives_the_cursor_back():
    assert "\x1b[?25h" in Screen(terminal=True).show(STARTED, STEP).file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_the_bar_never_takes_more_than_one_line(width):
    parts = step_parts(STEP, total=900, epochs=3)
    assert len(fitting(parts, width - 9)) <= width - 9
    assert fitting(parts, width - 9).startswith("120/900")


def test_in_a_narrow_terminal_the_loss_is_the_last_to_go():
    assert fitting(step_parts(STEP, total=900, epochs=3), 20) == "120/900  loss 1.2345"


@pytest.mark.parametrize(
    ("epoch", "shown"), [(1, "1/3"), (3, "3/3"), (0.2, "1/3"), (2.5, "3/3"), (0, "1/3"), (9, "3/3")]
)
def test_the_epoch_is_counted_from_one_as_a_number_or_as_progress(epoch, shown):
    parts = step_parts(STEP | {"epoch": epoch}, total=900, epochs=3)
    assert parts["epoch"] == f"epoch {shown}"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_left_does_not_end_the_run(terminal):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    console = Console(file=Closed(), force_terminal=terminal, width=100, color_system=None)
    with ProgressView(console) as view:
        view(STARTED)
        view(STEP)
        view(STEP)


@pytest.mark.parametrize(
    ("epochs", "words", "shown"), [(3.0, "3 epochs", "1/3"), (2.5, "2.5 epochs", "1/2.5")]
)
def test_epochs_of_real_runs_are_fractions_and_are_shown_all_the_same(epochs, words, shown):
    assert f", {words}," in plain(STARTED | {"epochs": epochs})[1]
    parts = step_parts(STEP, total=900, epochs=epochs)
    assert parts["epoch"] == f"epoch {shown}"


def test_the_bar_and_the_epochs_of_a_real_run_say_which_epoch_it_is():
    real = STARTED | {"epochs": 3.0}
    bar = Screen(terminal=True).show(real, STEP | {"epoch": 0.4}).console.export_text()
    assert "epoch 1/3" in bar
    assert plain(real, EPOCH)[-1].startswith("epoch 1/3  loss 1.71")


def test_a_run_says_whether_its_tokens_were_there_and_why():
    hit = {"event": "data", "split": "train", "hit": True, "because": "made from the same data"}
    miss = {"event": "data", "split": "test", "hit": False, "because": "the tokenizer changed"}
    assert lines_of(hit) == [("train: tokens were there: made from the same data", "dim")]
    assert lines_of(miss) == [("test: tokens were made: the tokenizer changed", "dim")]


def test_threads_kept_by_a_resumed_run_are_told_where_torch_would_take_others():
    told = {"event": "threads", "threads": 1, "cores": 2, "because": "as the run began"}
    assert plain({**told, "kept": True, "own": 1}) == []
    assert plain({**told, "kept": False, "own": 2}) == []
    assert plain({**told, "kept": True, "own": 2}) == [
        "computing with 1 thread: as the run began  "
        "(OMP_NUM_THREADS=2 takes torch's own number, whose sums round otherwise)"
    ]


def test_threads_are_told_only_where_others_took_cores():
    told = {"event": "threads", "threads": 1, "cores": 2, "because": "other processes use 1.0 of 2"}
    assert plain({**told, "lowered": False}) == []
    assert plain({**told, "lowered": True}) == [
        "computing with 1 thread: other processes use 1.0 of 2  (OMP_NUM_THREADS=2 takes them all)"
    ]
