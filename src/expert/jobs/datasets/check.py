"""The job behind `expert dataset check`: reads rows as preparing does and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from expert.data.records import DataNotFound
from expert.run.open import open_run

if TYPE_CHECKING:
    from expert.data.inspect.check_rows import DatasetReport
    from expert.data.inspect.shown_rows import RowsToShow
    from expert.data.pipeline import Tell


def check_dataset(
    manifest: str | Path,
    *,
    model: str | None = None,
    overrides: tuple[str, ...] = (),
    show: RowsToShow | None = None,
    tell: Tell = lambda name, rows, tokens: None,
) -> DatasetReport:
    """Read every row as preparing would, and report its contents; nothing is written.

    `show`: which rows to return as the model sees them; none by default. `tell` gets the rows and
    tokens of a split that were read so far.
    """
    from expert.data.inspect.check_rows import DatasetReport, check_rows
    from expert.data.inspect.shown_rows import RowsToShow
    from expert.data.pipeline import open_pipeline

    opened = open_run(manifest, data="unread", model=model, overrides=overrides)
    read, plan, named = opened.read, opened.plan, opened.named
    show = show or RowsToShow(count=0)
    try:
        line = open_pipeline(plan, read, named, writes=False)
    except DataNotFound as error:
        if plan.model.place != "hub":
            raise
        report = DatasetReport(read.manifest.name, "unknown", plan.data.max_seq_length)
        report.problems.append(str(error))
    else:
        report = check_rows(line, read.manifest.name, show, tell)
    report.doubts[:0] = read.warnings
    return report
