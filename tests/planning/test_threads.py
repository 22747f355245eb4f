from __future__ import annotations

from expert.planning.machine.threads import NAMES, choose_threads
from tests.each import each


@each(
    ("granted", "recorded", "environ", "chosen"),
    [
        (2, {}, {}, (2, "torch's own number")),
        (1, {}, {}, (1, "this process may use 1 cores")),
        (2, {"threads": 1}, {}, (1, "as the run began")),
        (2, {"threads": 64}, {}, (2, "torch's own number")),
        (1, {"threads": 1}, {NAMES[0]: "2"}, (2, f"{NAMES[0]} is set")),
    ],
)
def test_threads_depend_on_the_machine_and_the_run_and_not_on_how_busy_it_is(
    granted, recorded, environ, chosen
):
    assert choose_threads(own=2, granted=granted, recorded=recorded, environ=environ) == chosen
