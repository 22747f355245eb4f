"""The plan: every decision with its source and reason."""

from __future__ import annotations

from typing import Any

from expert.insight.event_text import planned_value
from expert.insight.page.blocks import Block, Folded, Grid, PageSection, Tone, Words
from expert.insight.page.facts import RunFacts
from expert.insight.record import listed, mapping

DEFAULT = "the default"
NOT_SHOWN = ("memory.parts", "decoding", "data.dataset")
"""Objects too large for a cell; plan.json has them."""
GROUPS = {
    "model": "Model",
    "adapter": "Adapter",
    "kernels": "Kernels",
    "data": "Data",
    "batch": "Batch",
    "loader": "Loader",
    "optim": "Optimizer",
    "length": "Length",
    "watch": "Checkpoints and logging",
    "stability": "Stability",
    "memory": "Memory",
    "disk": "Disk",
}
OPEN = ("kernels", "batch")
"""Open by default: what decides speed, and anything a fallback changed."""
REMARKS: dict[str, Tone] = {"warning": "warning", "advice": "note", "superseded": "plain"}


def plan_section(run: RunFacts) -> PageSection:
    """Every decided value with its reason; defaults are folded."""
    taken = [mapping(one) for one in listed(run.record.plan.get("decisions"))]
    taken = [one for one in taken if one.get("path") and one["path"] not in NOT_SHOWN]
    if not taken:
        why = "plan.json is missing or damaged, so its decisions are unknown."
        return PageSection(name="plan", title="Plan", inside=(Words(text=why, tone="warning"),))
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in (*GROUPS, "more", "rest")}
    for one in taken:
        name = str(one["path"]).partition(".")[0]
        groups["rest" if not _matters(one) else name if name in GROUPS else "more"].append(one)
    inside: list[Block] = [*_remarks(run)]
    for name, rows in groups.items():
        shown = name in OPEN or any(one.get("source") == "fallback" for one in rows)
        title = f"{GROUPS.get(name)}: {_brief(rows)}" if name in GROUPS else "More"
        if name == "rest":
            shown, title = False, f"{len(rows)} at their defaults or not used here"
        if rows:
            inside.append(Folded(title=title, inside=(_grid(rows),), shown=shown))
    return PageSection(name="plan", title="Plan and reasons", inside=tuple(inside))


def _remarks(run: RunFacts) -> list[Block]:
    found = [mapping(one) for one in listed(run.record.plan.get("remarks"))]
    return [
        Words(
            text=f"{one.get('path')}: {one.get('text')}",
            tone=REMARKS.get(str(one.get("kind")), "plain"),
        )
        for one in found
        if one.get("text")
    ]


def _matters(one: dict[str, Any]) -> bool:
    if str(one.get("because")).startswith("unknown"):
        return True
    return one.get("because") != DEFAULT and one.get("value") not in (None, [], {})


def _brief(rows: list[dict[str, Any]]) -> str:
    """The first values of a group, so that it need not be opened."""
    words = []
    for one in [one for one in rows if not isinstance(one.get("value"), dict)][:3]:
        leaf = str(one["path"]).rpartition(".")[2].removesuffix("_bytes").replace("_", " ")
        text = _value(one)
        words.append(f"{leaf} {text if len(text) <= 30 else text[:29] + '…'}")
    return ", ".join(words)


def _value(one: dict[str, Any]) -> str:
    if one.get("value") is None and str(one.get("because")).startswith("unknown"):
        return "unknown"
    return planned_value(str(one["path"]), one.get("value"))


def _grid(rows: list[dict[str, Any]]) -> Grid:
    shown = []
    for one in rows:
        because = str(one.get("because", "")).removeprefix("unknown: ")
        shown.append((str(one["path"]), _value(one), because, str(one.get("source", ""))))
    return Grid(columns=("key", "value", "because", "source"), rows=tuple(shown), code=("key",))
