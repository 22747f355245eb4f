"""What happened during the run: checkpoints, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from collections import Counter

from expert.core.events import Event
from expert.insight.event_text import GAP, lines_without_step
from expert.insight.page.blocks import (
    Block,
    EventTimeline,
    Figure,
    Folded,
    Grid,
    Lines,
    Mark,
    PageSection,
    Tone,
    Words,
)
from expert.insight.page.facts import RunFacts
from expert.insight.page.series import clock_words
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

Timed = tuple[str, str, str, str, float]
"""After, step, kind and details in words; and the seconds since the start."""


def event_sections(run: RunFacts) -> list[PageSection]:
    """The timeline with its tables, and the kernel report."""
    timed = [
        _timed(event, at)
        for event, at in zip(run.record.events, run.clock, strict=True)
        if event["event"] in LANES
    ]
    reports = run.record.of("kernels")
    lines = [str(line) for line in listed(reports[-1].get("lines"))] if reports else []
    kernels = []
    if lines:
        tones: dict[str, Tone] = {"✓": "good", "–": "note", "✗": "note"}
        marked = tuple((tones.get(line[:1], "plain"), line.lstrip("✓–✗ ")) for line in lines)
        kernels = [PageSection(name="kernels", title="Kernels", inside=(Lines(lines=marked),))]
    if not timed:
        return kernels
    inside: list[Block] = [_time_line(timed)]
    notable = [one for one in timed if one[2] not in ROUTINE]
    routine = [one for one in timed if one[2] in ROUTINE]
    if notable:
        inside.append(_table(notable))
    if not any(kind in ("fell_back", "rolled_back") for _, _, kind, _, _ in timed):
        inside.append(Words(text="No fallback or rollback was needed.", tone="good"))
    if routine:
        title = "Evaluations, checkpoints and starts"
        inside.append(Folded(title=title, inside=(_table(routine),)))
    return [PageSection(name="story", title="What happened", inside=tuple(inside)), *kernels]


def _timed(event: Event, at: float) -> Timed:
    step = finite(event.get("step"))
    details = " – ".join(text.strip() for text, _ in lines_without_step(event))
    details = details.replace(f"{GAP}(", " (").replace(GAP, ", ")
    at_step = f"{step:,.0f}" if step is not None else "–"
    return clock_words(at), at_step, str(event["event"]), details, at


def _time_line(timed: list[Timed]) -> Figure:
    count = Counter(LANES[kind][0] for _, _, kind, _, _ in timed)
    marks: dict[str, list[Mark]] = {lane: [] for lane, _ in LANES.values() if count[lane]}
    seen: Counter[str] = Counter()
    for after, step, kind, details, at in timed:
        lane, tone = LANES[kind]
        seen[lane] += 1
        if seen[lane] % (1 + count[lane] // MARKS_A_LANE) and tone == "plain":
            continue
        where = f"step {step}: " if step != "–" else ""
        marks[lane].append(Mark(at=at, words=f"{after}, {where}{details}", tone=tone))
    lanes = tuple((lane, count[lane], tuple(found)) for lane, found in marks.items())
    chart = EventTimeline(lanes=lanes, end=max(one[4] for one in timed))
    return Figure(name="story", title="Timeline", chart=chart, wide=True)


def _table(timed: list[Timed]) -> Grid:
    rows = [(after, step, kind.replace("_", " "), details)
            for after, step, kind, details, _ in timed[:SHOWN]]  # fmt: skip
    tones = [LANES[one[2]][1] for one in timed[:SHOWN]]
    if len(timed) > SHOWN:
        rows.append(("…", "…", "", f"{len(timed) - SHOWN:,} more in events.jsonl"))
        tones.append("plain")
    columns = ("after", "step", "event", "details")
    return Grid(columns=columns, rows=tuple(rows), numbers=columns[:2], tones=tuple(tones))
