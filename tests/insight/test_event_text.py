"""What is said of an event, in plain lines."""

from __future__ import annotations

import json

import pytest

from expert.insight.event_text import lines_of, step_parts
from tests.cli.screens import EPOCH, PLAIN_STEP, STARTED, STEP, only_line, plain
from tests.each import each
from tests.wording import wording


def test_outside_a_terminal_a_step_is_one_plain_line():
    assert plain(STARTED, STEP)[-1] == PLAIN_STEP


def test_a_start_shows_what_is_trained_where():
    assert plain(STARTED) == [
        "expert-json: Qwen/Qwen3-0.6B on NVIDIA H200",
        wording("steps-epochs-m-tokens"),
        "run folder: runs/a",
    ]
    assert ", 1 epoch," in plain(STARTED | {"epochs": 1})[1]


def test_values_that_are_not_known_are_left_out_of_a_step():
    unknown = dict.fromkeys(("gpu_utilization", "data_wait", "eta_seconds", "steps_per_second"))
    unknown |= dict.fromkeys(("peak_reserved_bytes", "gpu_memory_bytes"))
    assert plain(STARTED, STEP | unknown)[-1] == (
        "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s"
    )


def test_a_value_of_zero_is_a_value():
    line = only_line(event="step", step=9, loss=0.0, data_wait=0.0, eta_seconds=0)
    assert line == "step 9  loss 0.00  data wait 0.0 %  ETA 0.0 s"


def test_memory_is_the_peak_of_the_run_on_the_card_or_of_the_process_without_one():
    gib = 2**30
    card = {"event": "step", "step": 1, "gpu_memory_bytes": 3 * gib}
    assert only_line(**card) == "step 1  3.0 GiB"  # in use on the card, by whomever
    assert only_line(**card, peak_reserved_bytes=2 * gib) == "step 1  peak 2.0 GiB"
    host = {"event": "step", "step": 1, "cpu_peak_memory_bytes": 1.5 * gib}
    assert only_line(**host) == "step 1  peak 1.5 GiB RAM"


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.0123, "0.0123 it/s"), (0.5, "0.500 it/s"), (12.34, "12.3 it/s"), (1234.5, "1,234 it/s")],
)
def test_steps_a_second_have_three_digits(rate, words):
    assert only_line(event="step", step=1, steps_per_second=rate) == f"step 1  {words}"


def test_a_step_without_a_start_has_no_total():
    assert only_line(event="step", step=7, loss=2.0) == "step 7  loss 2.0000"


def test_small_losses_keep_their_digits():
    told = {"event": "finished", "loss": 0.1438, "eval_loss": 2.1e-05}
    assert plain(told) == [wording("finished-mean-loss-best")]
    assert only_line(event="step", step=9, loss=0.000234) == "step 9  loss 0.000234"


def test_rates_that_leave_the_warm_up_out_show_it():
    facts = {"seconds": 4.0, "tokens": 7871, "samples_per_second": 176.7}
    line = only_line(event="epoch", epoch=1, tokens_per_second=3931.0, **facts)
    assert line == "epoch 1  4.0 s  3,931 tok/s  176.7 samples/s after warm-up"
    line = only_line(event="epoch", epoch=1, tokens_per_second=1968.0, **facts)
    assert line == "epoch 1  4.0 s  1,968 tok/s  176.7 samples/s"


def test_an_epoch_line_has_loss_time_and_throughput():
    assert plain(STARTED, EPOCH)[-1] == (
        "epoch 1/3  loss 1.71 (validation 1.65)  42 s  103,000 tok/s  5.1 samples/s"
    )


def test_an_epoch_without_validation_shows_nothing_about_it():
    assert plain(STARTED, EPOCH | {"eval_loss": None, "loss": 0.03117})[-1].startswith(
        "epoch 1/3  loss 0.0312  42 s"
    )


@each(
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
            wording("step-validation-loss-perplexity"),
        ),
        (
            {"event": "saved", "path": "checkpoints/step-000400", "bytes": 2**30, "seconds": 0.8},
            "saved checkpoints/step-000400  1.0 GiB  0.8 s",
        ),
        ({"event": "compiled", "seconds": 41.0}, "compiled in 41 s"),
        ({"event": "warning", "text": "[bold]slow disk"}, "warning: [bold]slow disk"),
        (
            {"event": "log_failed", "what": "the file cannot be written", "because": "disk full"},
            wording("warning-file-cannot-written"),
        ),
        (
            {"event": "not_finite", "step": 12, "bins": [4, 17], "policy": "skip"},
            wording("step-not-finite-number"),
        ),
        (
            {"event": "spike", "step": 340, "loss": 9.5, "median": 1.7, "z": 8.13},
            "step 340: loss spike: 9.50 (median 1.70, z 8.1)",
        ),
        (
            {"event": "high_loss", "step": 341, "loss": 9.5, "median": 1.7, "z": 12.1, "stays": 5},
            "step 341: high loss: 9.50 (median 1.70, z 12.1); counts as a spike after 5 steps in a "
            "row",
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
def test_an_event_is_shown_in_one_line(event, expected):
    assert plain(event) == [expected]


def test_kernels_are_listed_line_by_line():
    assert plain({"event": "kernels", "lines": ["flash: on", "tf32: on"]}) == [
        "flash: on",
        "tf32: on",
    ]


def test_a_fallback_shows_what_failed_and_what_changes_and_why():
    changes = [
        {"path": "batch.rows", "value": 4, "because": "half of the rows fit"},
        {"path": "kernels.compile", "value": False},
    ]
    event = {"event": "fell_back", "failure": "out of memory", "reason": "2 GiB too few"}
    assert plain(event | {"changes": changes}) == [
        wording("fell-back-out-memory"),
        wording("half-rows-fit"),
        "  kernels.compile = no",
    ]


def test_the_end_shows_how_long_how_good_and_where_it_is():
    finished = {
        "event": "finished",
        "loss": 1.1,
        "eval_loss": 1.2,
        "seconds": 700.0,
        "tokens_per_second": 104_000.0,
        "final": "runs/a/final",
    }
    assert plain(finished) == [wording("finished-in-min-mean"), "final: runs/a/final"]


def test_the_end_of_a_run_names_the_last_validation_loss_where_it_rose_again():
    told = {"event": "finished", "eval_loss": 1.2, "last_eval_loss": 1.9}
    assert plain(told) == [wording("finished-best-validation-loss")]
    assert plain({**told, "last_eval_loss": 1.2}) == [wording("finished-best-validation")]
    assert plain({**told, "eval_loss": None}) == [wording("finished-last-validation-loss")]


def test_numbers_that_are_not_finite_are_shown_as_such():
    line = only_line(event="step", step=1, loss="nan", eta_seconds="inf", gpu_memory_bytes="nan")
    assert line == "step 1  loss nan  ETA ?"


def test_events_of_a_newer_version_and_empty_ones_are_ignored():
    assert plain({"event": "levitated", "height": 3}, {}) == []
    known = ("eval", "saved", "fell_back", "not_finite", "spike", "rolled_back", "skipped")
    for name in (*known, "warning", "epoch", "stopped", "finished", "started", "kernels"):
        lines_of({"event": name})  # whatever is missing, nothing is raised


def test_a_run_read_back_from_its_file_looks_like_the_run_itself():
    events = [STARTED, STEP, EPOCH]
    stored = [json.loads(json.dumps(event)) for event in events]
    assert plain(*stored) == plain(*events)


@pytest.mark.parametrize(
    ("epochs", "words", "shown"), [(3.0, "3 epochs", "1/3"), (2.5, "2.5 epochs", "1/2.5")]
)
def test_epochs_of_real_runs_are_fractions_and_are_shown_all_the_same(epochs, words, shown):
    assert f", {words}," in plain(STARTED | {"epochs": epochs})[1]
    parts = step_parts(STEP, total=900, epochs=epochs)
    assert parts["epoch"] == f"epoch {shown}"


def test_a_run_shows_whether_its_tokens_were_there_and_why():
    hit = {"event": "data", "split": "train", "hit": True, "because": "made from the same data"}
    miss = {"event": "data", "split": "test", "hit": False, "because": "the tokenizer changed"}
    assert lines_of(hit) == [(wording("train-tokens-made-from"), "dim")]
    assert lines_of(miss) == [("test: rows tokenised: the tokenizer changed", "dim")]


def test_threads_kept_by_a_resumed_run_are_reported_where_torch_would_take_others():
    told = {"event": "threads", "threads": 1, "cores": 2, "because": "as the run began"}
    assert plain({**told, "kept": True, "own": 1}) == []
    assert plain({**told, "kept": False, "own": 2}) == []
    assert plain({**told, "kept": True, "own": 2}) == [wording("computing-with-thread-run")]


def test_threads_are_reported_only_where_others_took_cores():
    told = {"event": "threads", "threads": 1, "cores": 2, "because": "other processes use 1.0 of 2"}
    assert plain({**told, "lowered": False}) == []
    assert plain({**told, "lowered": True}) == [wording("computing-with-thread-other")]


@pytest.mark.parametrize(
    ("seconds", "wall", "words"),
    [
        (6.7, 102.0, wording("finished-in-min-s")),
        (700.0, 701.0, "finished in 12 min"),
        (300.0, 30.0, wording("finished-in-s-min")),
    ],
)
def test_the_end_shows_the_time_that_was_waited_and_the_time_of_training_apart(
    seconds, wall, words
):
    assert only_line(event="finished", seconds=seconds, wall_seconds=wall) == words


def test_a_run_that_max_steps_ends_shows_how_many_epochs_it_makes_of_those_asked_for():
    cut = {"total_steps": 40, "ends_by": "max_steps", "epochs_to_come": 0.01422}
    assert plain(STARTED | cut)[1].startswith("40 steps, 0.014 of 3 epochs (max_steps), ")
    one = STARTED | cut | {"epochs": 1.0}
    assert "40 steps, 0.014 of 1 epoch (max_steps), " in plain(one)[1]


def test_a_stream_that_max_steps_ends_makes_at_most_its_epochs():
    line = plain(STARTED | {"total_steps": 40, "ends_by": "max_steps"})[1]
    assert line.startswith("40 steps, at most 3 epochs, ")
