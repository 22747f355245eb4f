"""What happened during the run: checkpoints, evaluations, fallbacks, rollbacks, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from expert.core.events import Event
from expert.core.text import gib
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
from expert.insight.page.plan import planned_value
from expert.insight.page.scales import clock_words

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
    "warning": ("warnings", "warning"),
    "log_failed": ("warnings", "warning"),
}
"""In which lane an event is drawn, and how."""
ROUTINE = ("eval", "saved", "started", "compiled")
"""Drawn, but listed in a folded table."""
SHOWN = 200
"""Events listed in a table; the rest are counted."""
MARKS_A_LANE = 400
"""Marks drawn in one lane; of more, every n-th."""

Told = list[tuple[Event, float]]


def event_sections(run: RunFacts) -> list[Section]:
    """The timeline with its tables, and what the kernels reported."""
    told = [
        (event, at)
        for event, at in zip(run.record.events, run.clock, strict=True)
        if str(event.get("event")) in LANES
    ]
    if not told:
        return _kernels(run)
    inside: list[Block] = [_time_line(told)]
    notable = [(event, at) for event, at in told if event["event"] not in ROUTINE]
    routine = [(event, at) for event, at in told if event["event"] in ROUTINE]
    if notable:
        inside.append(_table(notable))
    if not any(event["event"] in ("fell_back", "rolled_back") for event, _ in told):
        inside.append(Words(text="No fallback or rollback was needed.", tone="good"))
    if routine:
        title = "Evaluations, checkpoints and starts"
        inside.append(Folded(title=title, inside=(_table(routine),)))
    return [Section(name="story", title="What happened", inside=tuple(inside)), *_kernels(run)]


def _time_line(told: Told) -> Figure:
    count = Counter(LANES[event["event"]][0] for event, _ in told)
    seen: Counter[str] = Counter()
    marks = []
    for event, at in told:
        lane, tone = LANES[event["event"]]
        seen[lane] += 1
        if seen[lane] % (1 + count[lane] // MARKS_A_LANE) and tone == "plain":
            continue
        step = number(event.get("step"))
        where = f"step {step:,.0f}: " if step is not None else ""
        words = f"{clock_words(at)}, {where}{in_words(event)}"
        marks.append(Mark(lane=lane, at=at, words=words, tone=tone))
    lanes = tuple(dict.fromkeys(lane for lane, _ in LANES.values() if count[lane]))
    end = max(at for _, at in told)
    chart = Marks(lanes=lanes, marks=tuple(marks), end=end, counts=tuple(count[n] for n in lanes))
    return Figure(name="story", title="Timeline", chart=chart, wide=True)


def _table(told: Told) -> Grid:
    rows, tones = [], []
    for event, at in told[:SHOWN]:
        step, kind = number(event.get("step")), str(event["event"])
        at_step = f"{step:,.0f}" if step is not None else "–"
        rows.append((clock_words(at), at_step, kind.replace("_", " "), in_words(event)))
        tones.append(LANES[kind][1])
    if len(told) > SHOWN:
        rows.append(("…", "…", "", f"{len(told) - SHOWN:,} more in events.jsonl"))
        tones.append("plain")
    columns = ("after", "step", "event", "details")
    return Grid(columns=columns, rows=tuple(rows), numbers=columns[:2], tones=tuple(tones))


def in_words(event: Event) -> str:
    """The details of an event."""
    writer = _WRITERS.get(str(event.get("event")))
    if writer is not None:
        return writer(event)
    texts = (event.get(key) for key in ("text", "reason", "error", "what", "because", "path"))
    return ": ".join(str(text) for text in texts if text)


def _rolled_back(event: Event) -> str:
    factor = number(event.get("rate_factor"))
    rate = f"; the learning rate is {factor:g} of the planned one" if factor else ""
    return f"from step {event.get('from_step')} back to {event.get('to_step')}{rate}"


def _not_finite(event: Event) -> str:
    rows = ", ".join(map(str, listed(event.get("rows"))[:20]))
    return "a loss or gradient was not finite" + (f"; rows {rows} were in it" if rows else "")


def _spike(event: Event) -> str:
    return f"loss spike: {_short(event.get('loss'))}, median {_short(event.get('median'))}"


def _eval(event: Event) -> str:
    accuracy = number(event.get("token_accuracy"))
    right = f", token accuracy {accuracy:.1%}" if accuracy is not None else ""
    best = ", best so far" if event.get("best") else ""
    return f"{event.get('split', 'validation')} loss {_short(event.get('loss'))}{right}{best}"


def _saved(event: Event) -> str:
    size = number(event.get("bytes"))
    return f"{event.get('path')}" + (f", {gib(size)}" if size is not None else "")


def _finished(event: Event) -> str:
    return f"the run finished{' early' if event.get('early') else ''}"


def _compiled(event: Event) -> str:
    seconds = number(event.get("seconds"))
    return f"the step that compiled took {seconds:.1f} s" if seconds is not None else ""


def _resumed(event: Event) -> str:
    changed = "; ".join(map(str, listed(event.get("changed"))))
    return f"from {event.get('path')}" + (f"; changed: {changed}" if changed else "")


def _started(event: Event) -> str:
    return f"{event.get('model')} on {event.get('device')}"


def _fell_back(event: Event) -> str:
    changes = []
    for change in map(mapping, listed(event.get("changes"))):
        path = str(change.get("path"))
        changes.append(f"{path} = {planned_value(path, change.get('value'))}")
    words = (str(event.get("failure") or "failure"), event.get("reason"), "; ".join(changes))
    return " – ".join(str(word) for word in words if word)


_WRITERS: dict[str, Callable[[Event], str]] = {
    "fell_back": _fell_back,
    "rolled_back": _rolled_back,
    "not_finite": _not_finite,
    "spike": _spike,
    "eval": _eval,
    "saved": _saved,
    "finished": _finished,
    "compiled": _compiled,
    "resumed": _resumed,
    "started": _started,
}


def _short(value: object) -> str:
    found = number(value)
    return f"{found:.4g}" if found is not None else str(value)


def _kernels(run: RunFacts) -> list[Section]:
    """What was enabled and what was not, at the last start."""
    reports = run.record.of("kernels")
    lines = [str(line) for line in listed(reports[-1].get("lines"))] if reports else []
    tones: dict[str, Tone] = {"✓": "good", "✗": "note"}
    marked = tuple((tones.get(line[:1], "plain"), line.lstrip("✓✗ ")) for line in lines)
    return [Section(name="kernels", title="Kernels", inside=(Lines(lines=marked),))] * bool(lines)
