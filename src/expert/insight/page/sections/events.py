"""What happened during the run: checkpoints, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from collections import Counter

from expert.core.events import Event
from expert.insight.event_text import GAP, lines_without_step
from expert.insight.page.blocks import (
    Block,
    Figure,
    Folded,
    Grid,
    Lines,
    Mark,
    PageSection,
    Timeline,
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

Timed = list[tuple[Event, float]]


def event_sections(run: RunFacts) -> list[PageSection]:
    """The timeline with its tables, and the kernel report."""
    timed = [
        (event, at)
        for event, at in zip(run.record.events, run.clock, strict=True)
        if event["event"] in LANES
    ]
    if not timed:
        return _kernels(run)
    inside: list[Block] = [_time_line(timed)]
    notable = [(event, at) for event, at in timed if event["event"] not in ROUTINE]
    routine = [(event, at) for event, at in timed if event["event"] in ROUTINE]
    if notable:
        inside.append(_table(notable))
    if not any(event["event"] in ("fell_back", "rolled_back") for event, _ in timed):
        inside.append(Words(text="No fallback or rollback was needed.", tone="good"))
    if routine:
        title = "Evaluations, checkpoints and starts"
        inside.append(Folded(title=title, inside=(_table(routine),)))
    return [PageSection(name="story", title="What happened", inside=tuple(inside)), *_kernels(run)]


def _time_line(timed: Timed) -> Figure:
    count = Counter(LANES[event["event"]][0] for event, _ in timed)
    marks: dict[str, list[Mark]] = {lane: [] for lane, _ in LANES.values() if count[lane]}
    seen: Counter[str] = Counter()
    for event, at in timed:
        lane, tone = LANES[event["event"]]
        seen[lane] += 1
        if seen[lane] % (1 + count[lane] // MARKS_A_LANE) and tone == "plain":
            continue
        step = finite(event.get("step"))
        where = f"step {step:,.0f}: " if step is not None else ""
        words = f"{clock_words(at)}, {where}{in_words(event)}"
        marks[lane].append(Mark(at=at, words=words, tone=tone))
    lanes = tuple((lane, count[lane], tuple(found)) for lane, found in marks.items())
    chart = Timeline(lanes=lanes, end=max(at for _, at in timed))
    return Figure(name="story", title="Timeline", chart=chart, wide=True)


def _table(timed: Timed) -> Grid:
    rows, tones = [], []
    for event, at in timed[:SHOWN]:
        step, kind = finite(event.get("step")), str(event["event"])
        at_step = f"{step:,.0f}" if step is not None else "–"
        rows.append((clock_words(at), at_step, kind.replace("_", " "), in_words(event)))
        tones.append(LANES[kind][1])
    if len(timed) > SHOWN:
        rows.append(("…", "…", "", f"{len(timed) - SHOWN:,} more in events.jsonl"))
        tones.append("plain")
    columns = ("after", "step", "event", "details")
    return Grid(columns=columns, rows=tuple(rows), numbers=columns[:2], tones=tuple(tones))


def in_words(event: Event) -> str:
    """An event in one line, without its step."""
    text = " – ".join(text.strip() for text, _ in lines_without_step(event))
    return text.replace(f"{GAP}(", " (").replace(GAP, ", ")


def _kernels(run: RunFacts) -> list[PageSection]:
    """What was enabled and what was not, at the last start."""
    reports = run.record.of("kernels")
    lines = [str(line) for line in listed(reports[-1].get("lines"))] if reports else []
    if not lines:
        return []
    tones: dict[str, Tone] = {"✓": "good", "–": "note", "✗": "note"}
    marked = tuple((tones.get(line[:1], "plain"), line.lstrip("✓–✗ ")) for line in lines)
    return [PageSection(name="kernels", title="Kernels", inside=(Lines(lines=marked),))]
