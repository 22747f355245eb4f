"""The job behind `expert report`: reads run folders and writes the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expert.core.errors import ExpertError
from expert.core.files import write_text_atomically
from expert.core.links import refuse_links
from expert.core.resources import disk_full_message
from expert.insight.findings.finding import Finding
from expert.insight.findings.verdict import Verdict
from expert.insight.ladder import FILE, Ladder, read_ladder
from expert.insight.outcome import Outcome
from expert.insight.page.contents import make_page
from expert.insight.page.render import page_html
from expert.insight.record import RunRecord
from expert.jobs.diagnose.diagnose import diagnose_run

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
    html = page_html(make_page(found, ladder=ladder_for(found.record, ladder), others=others))
    where = found.record.folder if to is None else to
    file = where if where.suffix.lower() == ".html" and not where.is_dir() else where / HTML
    try:
        refuse_links(file, below=file.parent)
        write_text_atomically(file, html)
    except OSError as error:
        if disk_full_message(error):
            raise
        what = f"cannot write a report: {error.strerror}"
        raise ExpertError(f"{where}: {what}  (give another place with --to)") from error
    return WrittenReport(
        run=found.record.folder,
        html=file,
        html_bytes=len(html.encode("utf-8")),
        state=found.state,
        verdict=found.verdict,
        learning=found.learning,
        findings=found.findings,
        figures=tuple(re.findall(r'<figure id="figure-([\w-]+)"', html)),
        compared=tuple(other.record.folder for other in others),
    )


def ladder_for(record: RunRecord, named: Path | None) -> Ladder | None:
    """The given benchmark result, or the one in the run folder."""
    own = record.folder / FILE
    if named is None and not own.is_file():
        return None
    return read_ladder(named or own)
