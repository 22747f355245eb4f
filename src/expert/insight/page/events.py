"""What happened along the run: saves, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from collections import Counter

from expert.core.events import Event
from expert.core.text import gib, value_in_words
from expert.insight.page.blocks import (
    Block,
    Figure,
    Folded,
    Grid,
    Lines,
    Mark,
    Marks,
    Section,
    Tone,
    Words,
)
from expert.insight.page.facts import RunFacts, listed, mapping, number
from expert.insight.page.scales import clock_words

LANES: dict[str, tuple[str, Tone]] = {
    "started": ("start and end", "plain"),
    "resumed": ("start and end", "note"),
    "finished": ("start and end", "good"),
    "stopped": ("start and end", "warning"),
    "failed": ("start and end", "error"),
    "compiled": ("compiled", "note"),
    "eval": ("evaluations", "plain"),
    "saved": ("saves", "plain"),
    "took_best": ("saves", "good"),
    "rejected": ("saves", "error"),
    "fell_back": ("fallbacks", "warning"),
    "rolled_back": ("rollbacks", "error"),
    "not_finite": ("not finite, spikes", "error"),
    "spike": ("not finite, spikes", "error"),
    "warning": ("warnings", "warning"),
    "log_failed": ("warnings", "warning"),
}
"""In which lane an event is drawn, and how."""
ROUTINE = ("eval", "saved", "started", "compiled")
"""Drawn, but told in words only where somebody looks for them."""
SHOWN = 200
"""Events told in words; more are counted."""
MARKS_A_LANE = 400
"""Marks drawn of one kind; of more every so many-th."""


def story(run: RunFacts) -> list[Section]:
    """The time line with its words, and what the kernels reported."""
    told = [
        (event, at)
        for event, at in zip(run.record.events, run.clock, strict=True)
        if str(event.get("event")) in LANES
    ]
    if not told:
        return _kernels(run)
    inside: list[Block] = [_time_line(told)]
    notable = [(event, at) for event, at in told if event["event"] not in ROUTINE]
    if notable:
        inside.append(_table(notable))
    if not any(event["event"] in ("fell_back", "rolled_back") for event, _ in told):
        inside.append(Words(text="No fallback and no rollback was needed.", tone="good"))
    routine = [(event, at) for event, at in told if event["event"] in ROUTINE]
    if routine:
        title = "Evaluations, saves and starts"
        inside.append(Folded(title=title, inside=(_table(routine),)))
    return [Section(name="story", title="What happened", inside=tuple(inside)), *_kernels(run)]


def _time_line(told: list[tuple[Event, float]]) -> Figure:
    count = Counter(LANES[event["event"]][0] for event, _ in told)
    seen: Counter[str] = Counter()
    marks = []
    for event, at in told:
        lane, tone = LANES[event["event"]]
        seen[lane] += 1
        if seen[lane] % (1 + count[lane] // MARKS_A_LANE) and tone == "plain":
            continue
        words = f"{clock_words(at)}, {_step(event)}{in_words(event)}"
        marks.append(Mark(lane=lane, at=at, words=words, tone=tone))
    lanes = tuple(dict.fromkeys(lane for lane, _ in LANES.values() if count[lane]))
    end = max(at for _, at in told)
    chart = Marks(lanes=lanes, marks=tuple(marks), end=end, counts=tuple(count[n] for n in lanes))
    return Figure(name="story", title="Time line", chart=chart, wide=True)


def _step(event: Event) -> str:
    step = number(event.get("step"))
    return f"step {step:,.0f}: " if step is not None else ""


def _table(told: list[tuple[Event, float]]) -> Grid:
    rows, tones = [], []
    for event, at in told[:SHOWN]:
        step = number(event.get("step"))
        rows.append(
            (
                clock_words(at),
                f"{step:,.0f}" if step is not None else "–",
                str(event["event"]).replace("_", " "),
                in_words(event),
            )
        )
        tones.append(LANES[event["event"]][1])
    if len(told) > SHOWN:
        rows.append(("…", "…", "", f"{len(told) - SHOWN:,} more are in events.jsonl"))
        tones.append("plain")
    columns = ("after", "step", "event", "what")
    return Grid(columns=columns, rows=tuple(rows), numbers=columns[:2], tones=tuple(tones))


def in_words(event: Event) -> str:
    """What an event says, for a person."""
    kind = event.get("event")
    if kind == "fell_back":
        return _fallback(event)
    if kind == "rolled_back":
        back = f"from step {event.get('from_step')} back to {event.get('to_step')}"
        factor = number(event.get("rate_factor"))
        return back + (f"; the rate is {factor:g} of the planned one" if factor else "")
    if kind == "not_finite":
        rows = ", ".join(map(str, listed(event.get("rows"))[:20]))
        return "a loss or gradient was not finite" + (f"; rows {rows} were in it" if rows else "")
    if kind == "spike":
        return f"the loss leapt to {_short(event.get('loss'))} from {_short(event.get('median'))}"
    if kind == "eval":
        loss, accuracy = _short(event.get("loss")), number(event.get("token_accuracy"))
        best = ", best so far" if event.get("best") else ""
        right = f", {accuracy:.1%} of tokens right" if accuracy is not None else ""
        return f"{event.get('split', 'validation')} loss {loss}{right}{best}"
    return _plain_words(event)


def _plain_words(event: Event) -> str:
    kind, size = event.get("event"), number(event.get("bytes"))
    if kind == "saved":
        return f"{event.get('path')}" + (f", {gib(size)}" if size is not None else "")
    if kind == "finished":
        early = " early" if event.get("early") else ""
        return f"the run finished{early}"
    if kind == "compiled":
        seconds = number(event.get("seconds"))
        return f"the update that compiled took {seconds:.1f} s" if seconds is not None else ""
    if kind == "resumed":
        changed = "; ".join(map(str, listed(event.get("changed"))))
        return f"from {event.get('path')}" + (f"; changed: {changed}" if changed else "")
    if kind == "started":
        return f"{event.get('model')} on {event.get('device')}"
    texts = (event.get(key) for key in ("text", "reason", "error", "what", "because", "path"))
    return ": ".join(str(text) for text in texts if text)


def _fallback(event: Event) -> str:
    changes = []
    for change in map(mapping, listed(event.get("changes"))):
        path = str(change.get("path"))
        changes.append(f"{path} = {told_value(path, change.get('value'))}")
    words = [str(event.get("failure") or "trouble"), str(event.get("reason") or "")]
    words += ["; ".join(changes)] if changes else []
    return " – ".join(word for word in words if word)


def told_value(path: str, value: object) -> str:
    """A value of a plan in words; one that is not of the kind its path promises as it stands."""
    try:
        return value_in_words(path, value)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return str(value)


def _short(value: object) -> str:
    found = number(value)
    return f"{found:.4g}" if found is not None else str(value)


def _kernels(run: RunFacts) -> list[Section]:
    """What was switched on and what was not, of the newest start."""
    reports = run.record.of("kernels")
    lines = [str(line) for line in listed(reports[-1].get("lines"))] if reports else []
    if not lines:
        return []
    marked: list[tuple[Tone, str]] = []
    for line in lines:
        tone: Tone = "good" if line.startswith("✓") else "note" if line.startswith("✗") else "plain"
        marked.append((tone, line.lstrip("✓✗ ")))
    inside: tuple[Block, ...] = (Lines(lines=tuple(marked)),)
    return [Section(name="kernels", title="Kernels", inside=inside)]
