"""The whole page of a run, in the order a reader asks: verdict, numbers, why, and on what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from expert import __version__
from expert.insight.bound import Verdict
from expert.insight.finding import Finding, worst_first
from expert.insight.ladder import Ladder
from expert.insight.ladder_table import headline
from expert.insight.page.blocks import MADE_BY, Page, Section, Tone
from expert.insight.page.climb import ladder_section
from expert.insight.page.comparison import comparison
from expert.insight.page.decisions import decisions
from expert.insight.page.facts import RunFacts, mapping
from expert.insight.page.judged import judged, standing
from expert.insight.page.learning import learning
from expert.insight.page.overview import overview
from expert.insight.page.prepared import prepared
from expert.insight.page.speed import speed
from expert.insight.page.story import story
from expert.insight.page.surroundings import surroundings

STATES = {
    "running": "The run is going on; this page shows it as it stood when the page was made.",
    "finished": "The run finished.",
    "stopped": "The run was stopped",
    "failed": "The run failed",
    "gone": "The run ended without a word",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a page is made of."""

    run: RunFacts
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    ladder: Ladder | None = None
    others: tuple[RunFacts, ...] = ()
    made: float = field(default_factory=time.time)


def make_page(report: Report) -> Page:
    """The page of a run, on the same axes with others where there are any."""
    run, verdict = report.run, report.verdict
    sections: list[Section] = overview(run, report.findings)
    if report.others:
        sections.append(comparison([run, *report.others]))
    sections.append(learning(run))
    sections.extend(speed(run))
    if report.ladder is not None:
        sections.append(ladder_section(report.ladder, run))
    sections.extend(story(run))
    sections.extend(decisions(run))
    sections.extend(prepared(run))
    sections.extend(judged(run))
    sections.append(surroundings(run))
    model, device = run.started.get("model"), run.started.get("device")
    where = f"{model} on {device} · " if model and device else ""
    head, reasons = (str(verdict.kind), _sentence(report)), _reasons(run, verdict)
    good = standing(run.record.verdict or {})
    if good is not None:  # whether it answers well comes before how fast it was trained
        reasons = f"Speed: {head[0]}. {head[1]} {reasons}"
        head = good
    return Page(
        title=run.expert,
        subtitle=f"{where}{run.name}",
        kind=head[0],
        verdict=head[1],
        tone=_tone(report),
        reasons=reasons,
        sections=tuple(sections),
        footer=footer(report.made),
    )


def ladder_page(ladder: Ladder, *, made: float | None = None) -> Page:
    """A benchmark alone as a page."""
    return Page(
        title=ladder.name,
        subtitle=f"{ladder.model} on {ladder.card} · {ladder.date}",
        kind="",
        verdict=f"{headline(ladder)}.",
        tone=_ladder_tone(ladder),
        reasons="",
        sections=(ladder_section(ladder),),
        footer=footer(time.time() if made is None else made),
    )


def _ladder_tone(ladder: Ladder) -> Tone:
    if ladder.winner is None:
        return "error"
    return "warning" if ladder.doubts else "good"


def footer(made: float) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M", time.localtime(made))
    return f"{MADE_BY}{__version__} on {stamp}. It needs no network and runs no script."


def _tone(report: Report) -> Tone:
    """How the head of the page looks: by how the run ended, else by the worst finding."""
    if report.run.state in ("failed", "gone"):
        return "error"
    severities = [finding.severity for finding in report.findings]
    if "error" in severities:
        return "error"
    if "warning" in severities:
        return "warning"
    if mapping((report.run.record.verdict or {}).get("gate")).get("passed") is False:
        return "warning"
    if report.verdict.kind == "unknown":
        return "note"
    return "good" if report.verdict.kind == "compute-bound" else "warning"


def _sentence(report: Report) -> str:
    """The sentence without the word that stands above it; nothing is called good in a head that
    warns, which then says of what."""
    rest = report.verdict.sentence.removeprefix(f"{report.verdict.kind}: ")
    rest = rest[:1].upper() + rest[1:]
    bad = worst_first([one for one in report.findings if one.severity in ("error", "warning")])
    if bad and rest.startswith("Good. "):
        return f"{rest.removeprefix('Good. ')} To be mended: {bad[0].title}."
    return rest


def _reasons(run: RunFacts, verdict: Verdict) -> str:
    state = STATES.get(run.state, run.state)
    if run.state in ("stopped", "failed", "gone"):
        state += f": {run.because}." if run.because else "."
    if run.state == "finished" and run.record.validation is None:
        state += " Nobody judged its answers yet: expert validate does."
    if run.record.outdated:
        state += f" validation.json {run.record.outdated}; expert validate judges them."
    fix = f"What mends it: {verdict.fix}." if verdict.fix else ""
    gains = "; ".join(str(gain) for gain in verdict.gains)
    gain = f"To be gained: {gains}." if gains else ""
    return " ".join(text for text in (state, fix, gain) if text)
