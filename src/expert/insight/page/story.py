"""What happened during the run: checkpoints, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from expert.insight.event_text import GAP, lines_without_step
from expert.insight.page.facts import RunFacts
from expert.insight.page.figures import Tone, clock_words
from expert.insight.page.render import PageSection, make_section
from expert.insight.record import listed
from expert.insight.step.anatomy import finite

LANES: dict[str, tuple[str, Tone]] = {
    "started": ("start and end", "plain"),
    "resumed": ("start and end", "note"),
    "finished": ("start and end", "good"),
    "stopped": ("start and end", "warning"),
    "failed": ("start and end", "error"),
    "compiled": ("compiled", "note"),
    "eval": ("evaluations", "plain"),
    "saved": ("checkpoints", "plain"),
    "took_best": ("checkpoints", "good"),
    "rejected": ("checkpoints", "error"),
    "fell_back": ("fallbacks", "warning"),
    "rolled_back": ("rollbacks", "error"),
    "not_finite": ("not finite, spikes", "error"),
    "spike": ("not finite, spikes", "error"),
    "high_loss": ("not finite, spikes", "warning"),
    "warning": ("warnings", "warning"),
    "log_failed": ("warnings", "warning"),
}
"""The lane an event is drawn in, and its tone."""
ROUTINE = ("eval", "saved", "started", "compiled")
"""Drawn, but listed in a folded table."""
SHOWN = 200
"""Events listed in a table; the rest are only counted."""
MARKS_A_LANE = 400
"""Marks drawn in one lane; if there are more, every n-th."""


@dataclass(frozen=True)
class Happened:
    """An event with its place on the timeline."""

    at: float
    """Seconds since the run started, without pauses."""
    step: str
    kind: str
    details: str

    @property
    def lane(self) -> str:
        return LANES[self.kind][0]

    @property
    def tone(self) -> Tone:
        return LANES[self.kind][1]

    @property
    def cells(self) -> tuple[str, ...]:
        return clock_words(self.at), self.step, self.kind.replace("_", " "), self.details


def event_sections(run: RunFacts) -> list[PageSection]:
    """The timeline with its tables, and the kernel report."""
    happened = []
    for event, at in zip(run.record.events, run.clock, strict=True):
        if event["event"] in LANES:
            step = finite(event.get("step"))
            details = " – ".join(text.strip() for text, _ in lines_without_step(event))
            details = details.replace(f"{GAP}(", " (").replace(GAP, ", ")
            words = f"{step:,.0f}" if step is not None else "–"
            happened.append(Happened(at, words, str(event["event"]), details))
    sections = []
    if happened:
        notable = [one for one in happened if one.kind not in ROUTINE]
        routine = [one for one in happened if one.kind in ROUTINE]
        end = max(one.at for one in happened)
        sections.append(
            make_section("story", "What happened", _lanes(happened), end, notable, routine, SHOWN)
        )
    reports = run.record.of("kernels")
    if reports and (lines := listed(reports[-1].get("lines"))):
        tones: dict[str, Tone] = {"✓": "good", "–": "note", "✗": "note"}
        marked = [(tones.get(str(one)[:1], "plain"), str(one).lstrip("✓–✗ ")) for one in lines]
        sections.append(make_section("kernels", "Kernels", marked))
    return sections


def _lanes(happened: list[Happened]) -> list[tuple[str, int, list[Happened]]]:
    """The name of a lane, the number of its events, and those that are drawn."""
    count = Counter(one.lane for one in happened)
    drawn: dict[str, list[Happened]] = {lane: [] for lane, _ in LANES.values() if count[lane]}
    seen: Counter[str] = Counter()
    for one in happened:
        seen[one.lane] += 1
        if one.tone != "plain" or seen[one.lane] % (1 + count[one.lane] // MARKS_A_LANE) == 0:
            drawn[one.lane].append(one)
    return [(lane, count[lane], marks) for lane, marks in drawn.items()]
