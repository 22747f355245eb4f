"""Threads of real runs on a CPU, with and without a neighbour."""

from __future__ import annotations

from expert.run.session.start import choose_threads
from tests.each import each


@each(
    ("granted", "recorded", "threads", "because"),
    [
        (2, {}, 2, "torch's own number"),
        (1, {}, 1, "this process may use 1 cores"),
        (2, {"threads": 1}, 1, "as the run began"),
        (2, {"threads": 64}, 2, "torch's own number"),
    ],
)
def test_threads_depend_on_the_machine_and_the_run_and_not_on_how_busy_it_is(
    granted, recorded, threads, because, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    assert choose_threads(2, granted=granted, recorded=recorded) == (threads, because)
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    assert choose_threads(2, granted=granted, recorded=recorded)[0] == 2
