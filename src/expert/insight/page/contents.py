"""The whole page of a run: verdict, numbers, reasons, environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from expert.core.text import times
from expert.insight.advice import learning_advice
from expert.insight.ladder import (
    COLUMNS,
    KEPT_STATUSES,
    MARKS,
    Ladder,
    SettingResult,
    headline,
    how_measured,
    table_rows,
)
from expert.insight.page.comparison import comparison_section
from expert.insight.page.curves import learning_sections, loss_figures, speed_sections
from expert.insight.page.environment import data_sections, environment_section, plan_section
from expert.insight.page.facts import RunFacts
from expert.insight.page.figures import Tone
from expert.insight.page.improvement import improvement_section
from expert.insight.page.numbers import manifest_change, numbers_section
from expert.insight.page.render import Page, PageSection, make_section
from expert.insight.page.story import event_sections
from expert.insight.page.validation import Validated

STATES = {
    "running": "The run is still running; this page shows it as of when the page was made.",
    "finished": "The run finished.",
    "stopped": "The run was stopped",
    "failed": "The run failed",
    "gone": "The run ended without a message",
}
ENDED_EARLY = {"stopped": "stopped early", "failed": "failed", "gone": "killed"}


def make_page(
    run: RunFacts, *, ladder: Ladder | None = None, others: Sequence[RunFacts] = ()
) -> Page:
    """The page of a run, with other runs on the same axes if there are any."""
    (_, kind, sentence), *heads = _heads(run)
    model, device = run.started.get("model"), run.started.get("device")
    more = [
        f"{name}: {text}" if word == name.lower() else f"{name}: {word}. {text}"
        for name, word, text in heads
    ]
    sections = [comparison_section([run, *others])] if others else []
    figures, record = loss_figures(run), run.record
    nothing = "" if figures else "No step was logged, so there is nothing to draw."
    sections.append(make_section("loss", "Loss", figures, nothing, layout="curves"))
    if record.validation is not None:
        title = "Validation, out of date" if record.outdated else "Validation"
        validated = Validated(record.validation)
        sections.append(make_section("validation", title, validated, record))
    if record.improvement:
        sections.append(improvement_section(record))
    if run.findings:  # worst first, each with its fix as manifest lines
        found = [(finding, manifest_change(finding.overrides)) for finding in run.findings]
        sections.append(make_section("findings", "Findings", found))
    sections.append(numbers_section(run))
    rest = [
        *learning_sections(run),
        *speed_sections(run),
        *([ladder_section(ladder, run)] if ladder is not None else []),
        *event_sections(run),
        plan_section(run.record),
        *data_sections(run),
        environment_section(run),
    ]
    sections += [replace(section, folded=True) for section in rest]
    return Page(
        title=str(run.started.get("expert") or run.record.plan.get("expert") or run.name),
        subtitle=f"{model} on {device} · {run.name}" if model and device else run.name,
        kind=kind,
        verdict=sentence,
        tone=_tone(run),
        reasons=" ".join([*more, _reasons(run)]),
        sections=tuple(sections),
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
           if one.severity in ("error", "warning")]  # fmt: skip
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
    answers = Validated(run.record.verdict or {})
    if answers.gate is False or answers.undecided:
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
    verdict = run.record.verdict or {}
    failed = Validated(verdict).gate is False
    about_learning = learning_advice(run, verdict) if failed else [run.learning.fix]
    fixes = [fix.rstrip(".") for fix in (*about_learning, run.verdict.fix) if fix]
    fix = f"What to do: {'; '.join(fixes)}." if fixes else ""
    gain = run.verdict.gain
    gained = f"Expected gain: up to {times(gain)}." if gain is not None else ""
    return " ".join(text for text in (state, fix, gained) if text)


# --- the result of a benchmark -------------------------------------------------------------------


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


def ladder_section(ladder: Ladder, run: RunFacts | None = None) -> PageSection:
    """Every setting as a bar; left-out settings are grey, with the reason."""
    by_gain = ladder.is_compared_with_baseline
    title = f"{'Speed relative to the baseline' if by_gain else 'Tokens per second'}, by setting"
    bars = [_bar(setting, by_gain=by_gain) for setting in ladder.rungs]
    how = [line.replace("`", "") for line in how_measured(ladder)]
    # A page about the benchmark alone already starts with the headline.
    head = f"{headline(ladder)}." if run is not None else ""
    step = run.anatomy.step if run is not None else None
    rate = step.tokens_per_second if step is not None else None
    own = f"This run: {rate:,.0f} tokens/s." if rate is not None else ""
    rows = table_rows(ladder)
    return make_section("ladder", "Benchmark", head, own, title, bars, COLUMNS, rows, how)


def _bar(setting: SettingResult, *, by_gain: bool) -> tuple[str, float | None, str, str, int]:
    """Name, length, words, note and colour, grey if left out. The length is the speed relative to
    the baseline: rates were measured at different times, and a busy host makes a better setting
    look slower."""
    is_kept, seen = setting.status in KEPT_STATUSES, setting.measured
    if seen is None:
        word = MARKS[setting.status][1]
        return setting.name, None, word, setting.because or word, 7
    rate = seen.tokens_per_second
    amount = setting.cumulative if by_gain else rate
    note = f"{rate:,.0f} tokens/s" if by_gain else ""
    words = f"{amount:.2f}×" if by_gain else f"{rate:,.0f}"
    return setting.name, amount, words, note if is_kept else setting.because, 1 if is_kept else 7
