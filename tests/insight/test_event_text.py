"""Events as lines of plain text."""

from __future__ import annotations

from typing import Any

from expert.insight.event_text import lines_of
from tests.cli.screens import EPOCH, PLAIN_STEP, STARTED, STEP, plain
from tests.each import each

GIB = 2**30
CARD = {"event": "step", "step": 1, "gpu_memory_bytes": 3 * GIB}
UNKNOWN = ("gpu_utilization", "data_wait", "eta_seconds", "steps_per_second",
           "peak_reserved_bytes", "gpu_memory_bytes")  # fmt: skip
WARMED_UP = {"event": "epoch", "epoch": 1, "seconds": 4.0, "tokens": 7871}
WARMED_UP |= {"samples_per_second": 176.7}
RESUMED = {"event": "threads", "threads": 1, "cores": 2, "because": "as the run began"}
CUT = STARTED | {"total_steps": 40, "ends_by": "max_steps"}
SPIKE = {"step": 340, "loss": 9.5, "median": 1.7, "z": 8.13}
EVAL = {"event": "eval", "step": 300, "loss": 1.65, "perplexity": 5.207, "seconds": 1.2}
FELL = {"event": "fell_back", "failure": "out of memory", "reason": "2 GiB too few"}
CHANGES = [{"path": "batch.rows", "value": 4, "because": "half of the rows fit"},
           {"path": "kernels.compile", "value": False}]  # fmt: skip
END = {"event": "finished"}


@each(("event", "expected"), [
    # steps
    ([STARTED, STEP], PLAIN_STEP),
    ([STARTED, STEP | dict.fromkeys(UNKNOWN)],
     "step 120/900  loss 1.2345  lr 1.9e-04  104,233 tok/s"),
    ({"event": "step", "step": 9, "steps_per_second": 99.96}, "step 9  100 it/s"),
    ({"event": "step", "step": 9, "steps_per_second": 0.0123}, "step 9  0.0123 it/s"),
    ({"event": "step", "step": 9, "loss": 0.0, "data_wait": 0.0, "eta_seconds": 0},
     "step 9  loss 0.00  data wait 0.0 %  ETA 0.0 s"),
    ({"event": "step", "step": 1, "loss": "nan", "eta_seconds": "inf", "gpu_memory_bytes": "nan"},
     "step 1  loss nan  ETA ?"),
    ({"event": "step", "step": 9, "loss": 0.000234}, "step 9  loss 0.000234"),
    (CARD, "step 1  3.0 GiB"),  # in use on the card, by all processes
    (CARD | {"peak_reserved_bytes": 2 * GIB}, "step 1  peak 2.0 GiB"),
    ({"event": "step", "step": 1, "cpu_peak_memory_bytes": 1.5 * GIB}, "step 1  peak 1.5 GiB RAM"),
    # epochs
    ([STARTED, EPOCH],
     "epoch 1/3  loss 1.71 (validation 1.65)  42 s  103,000 tok/s  5.1 samples/s"),
    (WARMED_UP | {"tokens_per_second": 3931.0},
     "epoch 1  4.0 s  3,931 tok/s  176.7 samples/s"),
    (WARMED_UP | {"tokens_per_second": 1968.0}, "epoch 1  4.0 s  1,968 tok/s  176.7 samples/s"),
    # others
    (EVAL | {"best": True, "split": "validation"},
     "step 300  validation loss 1.6500  perplexity 5.207  1.2 s  best so far"),
    ({"event": "saved", "path": "checkpoints/step-000400", "bytes": 2**30, "seconds": 0.8},
     "saved checkpoints/step-000400  1.0 GiB  0.8 s"),
    ({"event": "compiled", "seconds": 41.0}, "compiled in 41 s"),
    ({"event": "warning", "text": "[bold]slow disk"}, "warning: [bold]slow disk"),
    ({"event": "log_failed", "what": "the file cannot be written", "because": "disk full"},
     "warning: the file cannot be written: disk full"),
    ({"event": "not_finite", "step": 12, "bins": [4, 17], "policy": "skip"},
     "step 12: loss is not finite in sequences 4, 17: skip"),
    ({"event": "spike", **SPIKE}, "step 340: loss spike: 9.50 (median 1.70, z 8.1)"),
    ({"event": "high_loss", **SPIKE, "stays": 5},
     "step 340: high loss: 9.50 (median 1.70, z 8.1); counts as a spike after 5 steps in a row"),
    ({"event": "rolled_back", "to_step": 300, "skipped": list(range(12))},
     "rolled back to step 300, skipping 12 (0, 1, 2, …)"),
    ({"event": "skipped", "step": 8, "reason": "overflow"}, "step 8 skipped: overflow"),
    ({"event": "stopped", "reason": "SIGTERM", "exit_code": 143},
     "stopped: SIGTERM (exit code 143)"),
    ({"event": "stopped", "reason": "", "exit_code": 130}, "stopped (exit code 130)"),
    ({"event": "data", "split": "train", "hit": True, "because": "same data"},
     "train: cache hit: same data"),
    # threads, if not torch's default
    ({**RESUMED, "own": 2}, "computing with 1 thread: as the run began"),
    ({**RESUMED, "own": 1}, []),
    # the end: elapsed time, training time, validation loss
    (END | {"seconds": 6.7, "wall_seconds": 102.0, "earlier_seconds": 0.0},
     "finished in 2 min (6.7 s of it training)"),
    (END | {"seconds": 700.0, "wall_seconds": 701.0}, "finished in 12 min"),
    (END | {"seconds": 11.0, "wall_seconds": 15.0, "earlier_seconds": 8.0},
     "finished in 15 s (11 s of training including earlier sessions)"),
    (END | {"eval_loss": 1.2, "last_eval_loss": 1.9},
     "finished  best validation loss 1.2000, last 1.9000"),
    (END | {"last_eval_loss": 1.9}, "finished  last validation loss 1.9000"),
    # several lines
    (STARTED, ["expert-json: Qwen/Qwen3-0.6B on NVIDIA H200",
               "900 steps, 3 epochs, 1.2 M tokens per epoch, 4.6 M trainable parameters",
               "run folder: runs/a"]),
    (FELL | {"changes": CHANGES}, ["fell back: out of memory: 2 GiB too few",
                                   "  batch.rows = 4  (half of the rows fit)",
                                   "  kernels.compile = no"]),
    (END | {"smoothed_loss": 1.1, "eval_loss": 1.2, "seconds": 700.0, "loss": 1.7,
            "median_tokens_per_second": 104_000.0, "tokens_per_second": 9.0,
            "final": "runs/a/final"},
     ["finished in 12 min  loss 1.1000  best validation loss 1.2000  104,000 tok/s",
      "final: runs/a/final"]),
    ({"event": "levitated", "height": 3}, []),  # from a newer version
    ({}, []),
])  # fmt: skip
def test_an_event_is_shown_in_a_line_or_as_many_as_it_needs(event: Any, expected: Any):
    before, own = (event[:1], event[1]) if isinstance(event, list) else ([], event)
    lines = expected if isinstance(expected, list) else [expected]
    assert plain(*before, own)[len(plain(*before)) :] == lines


@each(("event", "words"), [
    (STARTED | {"epochs": 1}, ", 1 epoch,"),
    (STARTED | {"epochs": 2.5}, ", 2.5 epochs,"),
    (CUT | {"epochs_to_come": 0.01422}, "40 steps, 0.014 of 3 epochs (max_steps), "),
    (CUT, "40 steps, at most 3 epochs, "),  # a stream of unknown length
])  # fmt: skip
def test_a_start_shows_how_many_epochs_the_run_makes(event: dict[str, Any], words: str):
    assert words in plain(event)[1]


def test_whatever_an_event_lacks_nothing_is_raised():
    known = ("eval", "saved", "fell_back", "not_finite", "spike", "rolled_back", "skipped")
    for name in (*known, "warning", "epoch", "stopped", "finished", "started", "kernels"):
        lines_of({"event": name})
