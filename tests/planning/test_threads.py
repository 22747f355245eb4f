"""How many threads a run on a CPU uses."""

from __future__ import annotations

from pathlib import Path

from expert.planning.machine.threads import Threads, choose_threads, resumed_threads
from tests.each import each


def chosen(
    busy: float, said: str = "", *, own: int = 2, granted: int | None = None, cores: int = 2
) -> Threads:
    allowed = cores if granted is None else granted
    environ = {said: "2"} if said else {}
    return choose_threads(own=own, granted=allowed, cores=cores, busy=busy, environ=environ)


@each(
    ("cores", "busy", "count"),
    [(2, 0.0, 2), (2, 0.25, 2), (2, 0.5, 1), (2, 1.0, 1), (2, 2.0, 1), (8, 3.4, 4), (8, 0.3, 8)],
)
def test_a_run_takes_the_cores_that_nobody_else_uses(cores, busy, count):
    assert chosen(busy, own=cores, cores=cores).count == count


def test_the_reason_names_the_neighbours_the_quota_or_what_the_user_says():
    assert chosen(1.0) == Threads(1, "other processes use 1.0 of 2 cores", lowered=True)
    assert chosen(0.0) == Threads(2, "torch's own number")
    assert chosen(0.0, own=4, cores=8).count == 4  # never raised
    troubles = Path(__file__).parents[2].joinpath("docs/TROUBLESHOOTING.md").read_text("utf-8")
    assert "OMP_NUM_THREADS" in troubles
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        assert chosen(1.9, name) == Threads(2, f"{name} is set")
    found = chosen(10.0, own=64, granted=4, cores=64)
    assert (found.count, found.lowered) == (4, False)
    assert found.because == "this process may use 4 of 64 cores"


def before(threads: object, began_on: int | None, *, granted: int, cores: int) -> Threads | None:
    told = {"threads": threads, "cores": began_on}
    return resumed_threads(told, granted=granted, cores=cores)


def test_a_resumed_run_keeps_its_threads_on_as_many_cores_and_else_chooses_again():
    assert before(1, 2, granted=2, cores=2) == Threads(1, "as the run began", kept=True)
    fewer = Threads(4, "the run began with 64, this process may use 4 of 64 cores", kept=True)
    assert before(64, 64, granted=4, cores=64) == fewer
    for threads, began_on in ((64, 64), (1, 1), (2, None), (None, 2), (0, 2)):
        assert before(threads, began_on, granted=2, cores=2) is None
