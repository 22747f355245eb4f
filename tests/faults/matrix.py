"""The plugin behind `make fault-test`: a table of every fault that was made and survived.

A test says with `@pytest.mark.fault(8)` which row of docs/RELIABILITY.md it belongs to; `cases` of
counting.py counts the faults inside of it, else it is one, or one for every row of `@each`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.faults import counting
from tests.faults.counting import Count

ROWS = {
    1: "SIGKILL at a random time",
    2: "SIGKILL inside a save",
    3: "power loss: order of fsync and rename",
    4: "SIGTERM, SIGHUP, SIGUSR1 anywhere",
    5: "Ctrl-C, and a second one",
    6: "full disk in a save, the cache, the result",
    7: "full disk or closed output in logs",
    8: "a flipped bit in a checkpoint, result or event",
    9: "a checkpoint that is truncated, missing or from another run",
    10: "pruning killed halfway",
    11: "which checkpoints are kept",
    12: "exact resume",
    13: "a different micro-batch size or number of workers",
    14: "resume or use of something that changed",
    15: "NaN and infinity",
    16: "loss spikes",
    17: "out of memory",
    18: "data workers killed, stopped, failing",
    19: "a hang, in a step or while loading",
    20: "bad rows",
    21: "nothing to train on",
    22: "several builders of one cache, one killed",
    23: "a damaged or stale cache",
    24: "pickles",
    25: "hostile model folders",
    26: "hostile manifests",
    27: "hostile packages",
    28: "secrets in anything written",
    29: "hostile text in reports and terminals",
    30: "clock jumps, a renamed run folder, two trainers on one run folder",
    31: "damaged or hostile run folders",
}
NO_SUCH_DOOR = {27: "Expert opens no archives"}


class Matrix:
    """What became of every row."""

    def __init__(self) -> None:
        self.counts: dict[int, Count] = defaultdict(Count)
        self.failed: dict[int, int] = defaultdict(int)
        self.skipped: dict[int, str] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """`ROWS=4,5`: of these rows alone."""
        wanted = {int(row) for row in os.environ.get("ROWS", "").split(",") if row}
        others = [item for item in items if wanted and _row_of(item) not in wanted]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        counting.now.tried = counting.now.survived = 0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[assignment]
        row = _row_of(item)
        if row is not None and report.skipped:
            self.skipped[row] = str(report.longrepr[2] if report.longrepr else "")  # type: ignore[index]
        elif row is not None and (report.when == "call" or report.failed):
            self._add(row, item, report)
        return report  # type: ignore[return-value]

    def _add(self, row: int, item: pytest.Item, report: pytest.TestReport) -> None:
        inside = counting.now
        tried = inside.tried or getattr(getattr(item, "function", None), "rows", 1)
        survived = inside.survived if inside.tried else tried
        if report.failed:
            self.failed[row] += 1
            survived = min(survived, tried - 1)  # at least one was not
        self.counts[row].tried += tried
        self.counts[row].survived += survived

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"faults (FAULTS={counting.SCALE:g})")
        for row, what in ROWS.items():
            terminalreporter.write_line(f"row {row:>2}: {self._told(row)}  ({what})")

    def _told(self, row: int) -> str:
        count = self.counts.get(row)
        if count is None:
            why = NO_SUCH_DOOR.get(row) or self.skipped.get(row) or "no test of it was selected"
            return f"not run: {why}"
        told = f"tried {count.tried:,}, survived {count.survived:,}"
        return f"{told}, TESTS FAILED: {self.failed[row]}" if self.failed[row] else told


def _row_of(item: pytest.Item) -> int | None:
    mark = item.get_closest_marker("fault")
    return int(mark.args[0]) if mark is not None else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Matrix(), "matrix")
