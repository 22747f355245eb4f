"""Events as lines of plain text."""

from __future__ import annotations

import json
from typing import Any

from expert.insight.event_text import lines_of
from tests.cli.screens import EPOCH, PLAIN_STEP, STARTED, STEP, plain
from tests.each import each

GIB = 2**30
CARD = {"event": "step", "step": 1, "gpu_memory_bytes": 3 * GIB}
UNKNOWN = (
    *("gpu_utilization", "data_wait", "eta_seconds", "steps_per_second"),
    *("peak_reserved_bytes", "gpu_memory_bytes"),
)
WARMED_UP = {"event": "epoch", "epoch": 1, "seconds": 4.0, "tokens": 7871}
WARMED_UP |= {"samples_per_second": 176.7}
THREADS = {"event": "threads", "threads": 1, "cores": 2}
RESUMED = {**THREADS, "because": "as the run began"}
CUT = STARTED | {"total_steps": 40, "ends_by": "max_steps"}


@each(
    ("event", "expected"),
    [
        # steps
        ([STARTED, STEP], PLAIN_STEP),
        (
            [STARTED, STEP | dict.fromkeys(UNKNOWN)],
            "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s",
        ),
        ({"event": "step", "step": 9, "steps_per_second": 99.96}, "step 9  100 it/s"),
        (
            {"event": "step", "step": 9, "loss": 0.0, "data_wait": 0.0, "eta_seconds": 0},
            "step 9  loss 0.00  data wait 0.0 %  ETA 0.0 s",
        ),
        (
            {"event": "step", "step": 1, "loss": "nan", "eta_seconds": "inf"}
            | {"gpu_memory_bytes": "nan"},
            "step 1  loss nan  ETA ?",
        ),
        ({"event": "step", "step": 7, "loss": 2.0}, "step 7  loss 2.0000"),
        ({"event": "step", "step": 9, "loss": 0.000234}, "step 9  loss 0.000234"),
        (CARD, "step 1  3.0 GiB"),  # in use on the card, by all processes
        (CARD | {"peak_reserved_bytes": 2 * GIB}, "step 1  peak 2.0 GiB"),
        (
            {"event": "step", "step": 1, "cpu_peak_memory_bytes": 1.5 * GIB},
            "step 1  peak 1.5 GiB RAM",
        ),
        *(
            ({"event": "step", "step": 1, "steps_per_second": rate}, f"step 1  {words} it/s")
            for rate, words in ((0.0123, "0.0123"), (0.5, "0.500"), (12.34, "12.3"))
        ),
        ({"event": "step", "step": 1, "steps_per_second": 1234.5}, "step 1  1,234 it/s"),
        # epochs
        (
            [STARTED, EPOCH],
            "epoch 1/3  loss 1.71 (validation 1.65)  42 s  103,000 tok/s  5.1 samples/s",
        ),
        (
            [STARTED, EPOCH | {"eval_loss": None, "loss": 0.03117}],
            "epoch 1/3  loss 0.0312  42 s  103,000 tok/s  5.1 samples/s",
        ),
        (
            WARMED_UP | {"tokens_per_second": 3931.0},
            "epoch 1  4.0 s  3,931 tok/s  176.7 samples/s after warm-up",
        ),
        (
            WARMED_UP | {"tokens_per_second": 1968.0},
            "epoch 1  4.0 s  1,968 tok/s  176.7 samples/s",
        ),
        # others
        (
            {"event": "eval", "step": 300, "loss": 1.65, "perplexity": 5.207, "seconds": 1.2}
            | {"token_accuracy": 0.631, "best": True, "split": "validation"},
            (
                "step 300  validation loss 1.6500  perplexity 5.207  token accuracy 63.1 %  "
                "1.2 s  best so far"
            ),
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
            "step 12: loss is not finite in sequences 4, 17: skip",
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
        # threads, if not torch's default
        ({**RESUMED, "own": 2}, "computing with 1 thread: as the run began"),
        # the end: elapsed time, training time, validation loss
        *(
            (
                {
                    "event": "finished",
                    "seconds": seconds,
                    "wall_seconds": wall,
                    "earlier_seconds": earlier,
                },
                words,
            )
            for seconds, wall, earlier, words in (
                (6.7, 102.0, 0.0, "finished in 2 min (6.7 s of it training)"),
                (700.0, 701.0, None, "finished in 12 min"),
                (
                    300.0,
                    30.0,
                    None,
                    "finished in 30 s (5 min of training including earlier sessions)",
                ),
                (11.0, 15.0, 8.0, "finished in 15 s (11 s of training including earlier sessions)"),
            )
        ),
        *(
            ({"event": "finished", "eval_loss": best, "last_eval_loss": last}, words)
            for best, last, words in (
                (1.2, 1.9, "finished  best validation loss 1.2000, last 1.9000"),
                (1.2, 1.2, "finished  best validation loss 1.2000"),
                (None, 1.9, "finished  last validation loss 1.9000"),
            )
        ),
        (
            {"event": "finished", "loss": 0.1438, "eval_loss": 2.1e-05},
            "finished  mean loss 0.1438  best validation loss 2.10e-05",
        ),
        # several lines
        (
            STARTED,
            [
                "expert-json: Qwen/Qwen3-0.6B on NVIDIA H200",
                "900 steps, 3 epochs, 1.2 M tokens per epoch, 4.6 M trainable parameters",
                "run folder: runs/a",
            ],
        ),
        ({"event": "kernels", "lines": ["flash: on", "tf32: on"]}, ["flash: on", "tf32: on"]),
        (
            {
                "event": "fell_back",
                "failure": "out of memory",
                "reason": "2 GiB too few",
                "changes": [
                    {"path": "batch.rows", "value": 4, "because": "half of the rows fit"},
                    {"path": "kernels.compile", "value": False},
                ],
            },
            [
                "fell back: out of memory: 2 GiB too few",
                "  batch.rows = 4  (half of the rows fit)",
                "  kernels.compile = no",
            ],
        ),
        (
            {"event": "finished", "loss": 1.1, "eval_loss": 1.2, "seconds": 700.0}
            | {"tokens_per_second": 104_000.0, "final": "runs/a/final"},
            [
                "finished in 12 min  mean loss 1.1000  best validation loss 1.2000  104,000 tok/s",
                "final: runs/a/final",
            ],
        ),
        ({**RESUMED, "own": 1}, []),
        ({"event": "levitated", "height": 3}, []),  # from a newer version
        ({}, []),
    ],
)
def test_an_event_is_shown_in_a_line_or_as_many_as_it_needs(event: Any, expected: Any):
    before, own = (event[:1], event[1]) if isinstance(event, list) else ([], event)
    lines = expected if isinstance(expected, list) else [expected]
    assert plain(*before, own)[len(plain(*before)) :] == lines


@each(
    ("event", "words"),
    [
        (STARTED | {"epochs": 1}, ", 1 epoch,"),
        (STARTED | {"epochs": 3.0}, ", 3 epochs,"),
        (STARTED | {"epochs": 2.5}, ", 2.5 epochs,"),
        (CUT | {"epochs_to_come": 0.01422}, "40 steps, 0.014 of 3 epochs (max_steps), "),
        (
            CUT | {"epochs_to_come": 0.01422, "epochs": 1.0},
            "40 steps, 0.014 of 1 epoch (max_steps), ",
        ),
        (CUT, "40 steps, at most 3 epochs, "),  # a stream of unknown length
    ],
)
def test_a_start_shows_how_many_epochs_the_run_makes(event: dict[str, Any], words: str):
    assert words in plain(event)[1]


def test_whatever_an_event_lacks_nothing_is_raised_and_its_file_reads_like_the_run():
    known = ("eval", "saved", "fell_back", "not_finite", "spike", "rolled_back", "skipped")
    for name in (*known, "warning", "epoch", "stopped", "finished", "started", "kernels"):
        lines_of({"event": name})
    events = [STARTED, STEP, EPOCH]
    assert plain(*(json.loads(json.dumps(event)) for event in events)) == plain(*events)


def test_a_run_shows_whether_its_tokens_were_there_and_why():
    hit = {"event": "data", "split": "train", "hit": True, "because": "made from the same data"}
    miss = {"event": "data", "split": "test", "hit": False, "because": "the tokenizer changed"}
    assert lines_of(hit) == [("train: cache hit: made from the same data", "dim")]
    assert lines_of(miss) == [("test: rows tokenised: the tokenizer changed", "dim")]
