"""The job behind `expert dataset check`: reads rows as preparing does and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.data.records import DataNotFound
from expert.run.open import Opened, open_run

if TYPE_CHECKING:
    from expert.data.inspect.check_rows import DatasetReport
    from expert.data.inspect.shown_rows import RowsToShow, ShownRow
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


def first_row_of(opened: Opened, *, most_tokens: int | None) -> tuple[ShownRow | None, str]:
    """The first good training row under a plan; None and the reason if it is not available."""
    from expert.data.inspect.shown_rows import FIRST, show_row
    from expert.data.pipeline import open_pipeline, reader_for

    plan = opened.plan
    if plan.model.place == "hub":
        return None, f"the tokenizer of {plan.model.name} is not on this machine"
    try:
        source = opened.named.sources.trains[0]
        if source.kind == "hub" or (
            source.kind == "corpus" and not source.files and not source.is_stdlib
        ):
            return None, f"the rows of {source.name} are not fetched for it"
        line = open_pipeline(plan, opened.read, opened.named, writes=False)
        for row, segments in reader_for(line, line.sources_of("train")[0]).formatted():
            if isinstance(segments, list):
                return show_row(line, row, segments, "train", FIRST, most_tokens=most_tokens), ""
        return None, "no row can be used"
    except (ExpertError, OSError) as error:  # the next reader of the rows raises it again
        return None, str(error)
