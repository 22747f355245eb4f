"""The whole page of a run: verdict, numbers, reasons, environment."""

from __future__ import annotations

from collections.abc import Sequence

from expert.insight.ladder.ladder import Ladder
from expert.insight.ladder.table import headline
from expert.insight.page.blocks import Page, Tone
from expert.insight.page.facts import RunFacts
from expert.insight.page.sections.comparison import comparison_section
from expert.insight.page.sections.curves import learning_section, speed_sections
from expert.insight.page.sections.environment import data_sections, environment_section
from expert.insight.page.sections.events import event_sections
from expert.insight.page.sections.ladder import ladder_section
from expert.insight.page.sections.overview import finding_sections, numbers_section
from expert.insight.page.sections.plan import plan_section
from expert.insight.page.sections.validation import Validated, validation_sections

STATES = {
    "running": "The run is still running; this page shows it as of when the page was made.",
    "finished": "The run finished.",
    "stopped": "The run was stopped",
    "failed": "The run failed",
    "gone": "The run ended without a message",
}
ABOUT_LEARNING = ("overfits", "loss-stays", "always-clipped")
"""Findings that are not about speed."""
ENDED_EARLY = {"stopped": "stopped early", "failed": "failed", "gone": "killed"}


def make_page(
    run: RunFacts, *, ladder: Ladder | None = None, others: Sequence[RunFacts] = ()
) -> Page:
    """The page of a run, with other runs on the same axes if there are any."""
    (_, kind, sentence), *rest = _heads(run)
    model, device = run.started.get("model"), run.started.get("device")
    more = [
        f"{name}: {text}" if word == name.lower() else f"{name}: {word}. {text}"
        for name, word, text in rest
    ]
    sections = [
        numbers_section(run),
        *validation_sections(run),  # first, as readers look for the answers
        *finding_sections(run.findings),
        *([comparison_section([run, *others])] if others else []),
        learning_section(run),
        *speed_sections(run),
        *([ladder_section(ladder, run)] if ladder is not None else []),
        *event_sections(run),
        plan_section(run.record),
        *data_sections(run),
        environment_section(run),
    ]
    return Page(
        title=str(run.started.get("expert") or run.record.plan.get("expert") or run.name),
        subtitle=f"{model} on {device} · {run.name}" if model and device else run.name,
        kind=kind,
        verdict=sentence,
        tone=_tone(run),
        reasons=" ".join([*more, _reasons(run)]),
        sections=tuple(sections),
    )


def ladder_page(ladder: Ladder) -> Page:
    tone: Tone = "warning" if ladder.doubts else "good"
    return Page(
        title=ladder.name,
        subtitle=f"{ladder.model} on {ladder.card} · {ladder.date}",
        kind="",
        verdict=f"{headline(ladder)}.",
        tone="error" if ladder.winner is None else tone,
        reasons="",
        sections=(ladder_section(ladder),),
    )


def _heads(run: RunFacts) -> list[tuple[str, str, str]]:
    """How it went: about what, in a word, in a sentence; the most important first."""
    heads = []
    answers = Validated(run.record.verdict or {}).sentence()
    if answers is not None:
        heads.append(("Answers", *answers))
    if run.state in ENDED_EARLY:
        of = f" of {run.total_steps:,.0f}" if run.total_steps else ""
        done = f"after step {run.updates:,.0f}{of}" if run.updates else "before its first step"
        heads.append(("Ending", ENDED_EARLY[run.state], f"The run ended {done}."))
    if run.learning.kind != "unknown":
        heads.append(("Learning", run.learning.kind, run.learning.sentence))
    # The kind is shown above the sentence. With warnings it does not start with "Good." but names
    # what to fix.
    speed = run.verdict.sentence.removeprefix(run.verdict.kind).lstrip(":, ")
    speed = speed[:1].upper() + speed[1:]
    bad = [one for one in run.findings
           if one.name not in ABOUT_LEARNING and one.severity in ("error", "warning")]  # fmt: skip
    if bad and speed.startswith("Good. "):
        speed = f"{speed.removeprefix('Good. ')} To fix: {bad[0].title}."
    return [*heads, ("Speed", str(run.verdict.kind), speed)]


def _tone(run: RunFacts) -> Tone:
    """The colour of the header: by how the run ended, else by the worst finding."""
    learning = run.learning
    severities = [finding.severity for finding in run.findings]
    if run.state in ("failed", "gone") or learning.kind == "diverged" or "error" in severities:
        return "error"
    learns = learning.is_good or learning.kind == "unknown"
    if "warning" in severities or not learns or run.state == "stopped":
        return "warning"
    if Validated(run.record.verdict or {}).gate is False:
        return "warning"
    if run.verdict.kind == "unknown":
        return "note"
    if run.verdict.kind != "compute-bound":
        return "warning"
    return "good" if run.verdict.sentence.startswith("compute-bound: good.") else "note"


def _reasons(run: RunFacts) -> str:
    """How it ended, what to do, and the expected gain."""
    state = STATES.get(run.state, run.state)
    if run.state in ENDED_EARLY:
        state += f": {run.because}." if run.because else "."
    if run.state == "finished" and run.record.validation is None:
        state += " It is not validated yet: run expert validate."
    if run.record.outdated:
        state += f" validation.json {run.record.outdated}; run expert validate again."
    fixes = [fix for fix in (run.learning.fix, run.verdict.fix) if fix]
    fix = f"What to do: {'; '.join(fixes)}." if fixes else ""
    gains = "; ".join(str(gain) for gain in run.verdict.gains)
    gain = f"Expected gain: {gains}." if gains else ""
    return " ".join(text for text in (state, fix, gain) if text)
