"""The whole page of a run, in the order a reader asks: verdict, numbers, why, and on what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from expert.core.version import __version__
from expert.insight.findings.finding import Finding, worst_first
from expert.insight.ladder.ladder import Ladder
from expert.insight.ladder.table import headline
from expert.insight.outcome import Outcome
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
from expert.insight.step.bound import Verdict

STATES = {
    "running": "The run is going on; this page shows it as it stood when the page was made.",
    "finished": "The run finished.",
    "stopped": "The run was stopped",
    "failed": "The run failed",
    "gone": "The run ended without a word",
}
ABOUT_LEARNING = ("overfits", "loss-stays", "always-clipped")
"""Findings that say nothing about speed."""
UNFINISHED = {"stopped": "stopped early", "failed": "failed", "gone": "killed"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a page is made of."""

    run: RunFacts
    verdict: Verdict
    learning: Outcome | None = None
    findings: tuple[Finding, ...] = ()
    ladder: Ladder | None = None
    others: tuple[RunFacts, ...] = ()
    made: float = field(default_factory=time.time)


def make_page(report: Report) -> Page:
    """The page of a run, on the same axes with others where there are any."""
    run = report.run
    numbers, *findings = overview(run, report.findings)
    # What it answers, right and wrong, is what a reader came for.
    sections: list[Section] = [numbers, *judged(run), *findings]
    if report.others:
        sections.append(comparison([run, *report.others]))
    sections.append(learning(run))
    sections.extend(speed(run))
    if report.ladder is not None:
        sections.append(ladder_section(report.ladder, run))
    sections.extend(story(run))
    sections.extend(decisions(run))
    sections.extend(prepared(run))
    sections.append(surroundings(run))
    model, device = run.started.get("model"), run.started.get("device")
    where = f"{model} on {device} · " if model and device else ""
    heads = _heads(report)
    behind = [
        f"{name}: {sentence}" if kind == name.lower() else f"{name}: {kind}. {sentence}"
        for name, kind, sentence in heads[1:]
    ]
    return Page(
        title=run.expert,
        subtitle=f"{where}{run.name}",
        kind=heads[0].kind,
        verdict=heads[0].sentence,
        tone=_tone(report),
        reasons=" ".join([*behind, _reasons(report)]),
        sections=tuple(sections),
        footer=footer(report.made),
    )


class _Head(NamedTuple):
    """One answer to "how did it go?"."""

    about: str
    kind: str
    sentence: str


def _heads(report: Report) -> list[_Head]:
    """How it went, what matters most first: its answers, whether it ended, learning, speed."""
    run, learning = report.run, report.learning
    heads = []
    answers = standing(run.record.verdict or {})
    if answers is not None:
        heads.append(_Head("Answers", *answers))
    if run.state in UNFINISHED:
        of = f" of {run.total_steps:,.0f}" if run.total_steps else ""
        done = f"after step {run.updates:,.0f}{of}" if run.updates else "before its first step"
        heads.append(_Head("Ending", UNFINISHED[run.state], f"The run ended {done}."))
    if learning is not None and learning.kind != "unknown":
        heads.append(_Head("Learning", learning.kind, learning.sentence))
    return [*heads, _Head("Speed", str(report.verdict.kind), _sentence(report))]


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
    learning = report.learning
    if learning is not None and learning.kind == "diverged":
        return "error"
    severities = [finding.severity for finding in report.findings]
    if "error" in severities:
        return "error"
    learns = learning is None or learning.is_good or learning.kind == "unknown"
    if "warning" in severities or not learns or report.run.state == "stopped":
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
    of_speed = [one for one in report.findings if one.name not in ABOUT_LEARNING]
    bad = worst_first([one for one in of_speed if one.severity in ("error", "warning")])
    if bad and rest.startswith("Good. "):
        return f"{rest.removeprefix('Good. ')} To fix: {bad[0].title}."
    return rest


def _reasons(report: Report) -> str:
    run, verdict, learning = report.run, report.verdict, report.learning
    state = STATES.get(run.state, run.state)
    if run.state in ("stopped", "failed", "gone"):
        state += f": {run.because}." if run.because else "."
    if run.state == "finished" and run.record.validation is None:
        state += " Nobody judged its answers yet: expert validate does."
    if run.record.outdated:
        state += f" validation.json {run.record.outdated}; expert validate judges them."
    fixes = [learning.fix] if learning is not None and learning.fix else []
    fixes += [verdict.fix] if verdict.fix else []
    fix = f"What to do: {'; '.join(fixes)}." if fixes else ""
    gains = "; ".join(str(gain) for gain in verdict.gains)
    gain = f"To be gained: {gains}." if gains else ""
    return " ".join(text for text in (state, fix, gain) if text)
