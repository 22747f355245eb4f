"""The job behind `expert report`: reads run folders and writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links
from expert.core.resources import disk_full_message
from expert.insight.ladder.ladder import FILE, Ladder, read_ladder
from expert.insight.page.blocks import Figure
from expert.insight.page.contents import make_page
from expert.insight.page.facts import RunFacts
from expert.insight.page.render import page_html
from expert.jobs.diagnose.diagnose import Diagnosis, diagnose_run

if TYPE_CHECKING:
    from expert.insight.findings.finding import Finding
    from expert.insight.findings.verdict import Verdict
    from expert.insight.outcome import Outcome
    from expert.insight.record import RunRecord

HTML = "report.html"


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """A report that was written, and its verdict."""

    run: Path
    html: Path
    html_bytes: int
    state: str
    verdict: Verdict
    learning: Outcome
    findings: tuple[Finding, ...]
    figures: tuple[str, ...]
    """Names of the figures, as in their ids."""
    compared: tuple[Path, ...]


def report(
    place: Path | None,
    *,
    compare: Sequence[Path] = (),
    ladder: Path | None = None,
    to: Path | None = None,
) -> WrittenReport:
    """Write report.html into the run folder, or into the folder `to`; if it ends in .html, it is
    the page itself."""
    found = diagnose_run(place)
    others = [diagnose_run(other) for other in compare]
    page = make_page(
        facts_of(found), ladder=ladder_for(found.run, ladder), others=[*map(facts_of, others)]
    )
    html = page_html(page)
    where = found.folder if to is None else to
    file = where if where.suffix.lower() == ".html" and not where.is_dir() else where / HTML
    try:
        refuse_links(file, below=file.parent)
        write_text_atomically(file, html)
    except OSError as error:
        if disk_full_message(error):
            raise
        raise ExpertError(
            f"{where}: cannot write a report: {error.strerror}  (give another place with --to)"
        ) from error
    blocks = (block for section in page.sections for block in section.inside)
    return WrittenReport(
        run=found.folder,
        html=file,
        html_bytes=len(html.encode("utf-8")),
        state=found.state,
        verdict=found.verdict,
        learning=found.learning,
        findings=found.findings,
        figures=tuple(block.name for block in blocks if isinstance(block, Figure)),
        compared=tuple(other.folder for other in others),
    )


def facts_of(found: Diagnosis) -> RunFacts:
    """What a page shows of a diagnosed run."""
    return RunFacts(
        record=found.run,
        anatomy=found.anatomy,
        state=found.state,
        because=found.because,
        verdict=found.verdict,
        learning=found.learning,
        findings=found.findings,
    )


def ladder_for(record: RunRecord, named: Path | None) -> Ladder | None:
    """The given benchmark result, or the one in the run folder."""
    own = record.folder / FILE
    if named is None and not own.is_file():
        return None
    return read_ladder(named or own)
