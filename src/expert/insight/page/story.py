"""What happened during the run: checkpoints, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from expert.insight.event_text import GAP, lines_without_step
from expert.insight.page.facts import RunFacts
from expert.insight.page.figures import Tone, clock_words
from expert.insight.page.render import PageSection, make_section
from expert.insight.record import listed
from expert.insight.step.anatomy import finite

TONES: dict[str, Tone] = {
    **{"started": "plain", "resumed": "note", "finished": "good", "stopped": "warning"},
    **{"failed": "error", "compiled": "note", "eval": "plain", "saved": "plain"},
    **{"took_best": "good", "rejected": "error", "fell_back": "warning", "rolled_back": "error"},
    **{"not_finite": "error", "spike": "error", "high_loss": "warning", "warning": "warning"},
    "log_failed": "warning",
}
"""The events that are listed, with their tone."""
ROUTINE = ("eval", "saved", "started", "compiled")
"""Listed in a folded table."""
SHOWN = 200
"""Events listed in a table; the rest are only counted."""

Row = tuple[str, str, str, str]
"""Time since the start without pauses, step, kind and details."""


def event_sections(run: RunFacts) -> list[PageSection]:
    """The tables of events, and the kernel report."""
    notable: list[tuple[Row, Tone]] = []
    routine: list[tuple[Row, Tone]] = []
    for event, at in zip(run.record.events, run.clock, strict=True):
        kind, step = str(event["event"]), finite(event.get("step"))
        if kind in TONES:
            details = " – ".join(text.strip() for text, _ in lines_without_step(event))
            details = details.replace(f"{GAP}(", " (").replace(GAP, ", ")
            words = f"{step:,.0f}" if step is not None else "–"
            row = (clock_words(at), words, kind.replace("_", " "), details)
            (routine if kind in ROUTINE else notable).append((row, TONES[kind]))
    sections = []
    if notable or routine:
        changed = bool(run.record.of("fell_back") or run.record.of("rolled_back"))
        title = "What happened"
        sections.append(make_section("story", title, notable, routine, changed, SHOWN))
    reports = run.record.of("kernels")
    if reports and (lines := listed(reports[-1].get("lines"))):
        tones: dict[str, Tone] = {"✓": "good", "–": "note", "✗": "note"}
        marked = [(tones.get(str(one)[:1], "plain"), str(one).lstrip("✓–✗ ")) for one in lines]
        sections.append(make_section("kernels", "Kernels", marked))
    return sections
