"""The plan: every decision with its source and reason."""

from __future__ import annotations

from typing import Any

from expert.insight.event_text import planned_value
from expert.insight.page.blocks import Block, Folded, Grid, PageSection, Tone, Words
from expert.insight.record import RunRecord, listed, mapping

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
REMARKS: dict[str, Tone] = {"warning": "warning", "advice": "note"}


def plan_section(record: RunRecord) -> PageSection:
    """Every decided value with its reason; defaults are folded."""
    taken = [mapping(one) for one in listed(record.plan.get("decisions"))]
    taken = [one for one in taken if one.get("path") and one["path"] not in NOT_SHOWN]
    if not taken:
        why = "plan.json is missing or damaged, so its decisions are unknown."
        return PageSection(name="plan", title="Plan", inside=(Words(text=why, tone="warning"),))
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in (*GROUPS, "more", "rest")}
    for one in taken:
        name, because = str(one["path"]).partition(".")[0], one.get("because")
        is_set = because != DEFAULT and one.get("value") not in (None, [], {})
        matters = is_set or str(because).startswith("unknown")
        groups["rest" if not matters else name if name in GROUPS else "more"].append(one)
    inside: list[Block] = [
        Words(
            text=f"{one.get('path')}: {one.get('text')}",
            tone=REMARKS.get(str(one.get("kind")), "plain"),
        )
        for one in map(mapping, listed(record.plan.get("remarks")))
        if one.get("text")
    ]
    for name, rows in groups.items():
        if not rows:
            continue
        shown = name in OPEN or any(one.get("source") == "fallback" for one in rows)
        title = f"{GROUPS.get(name)}: {_brief(rows)}" if name in GROUPS else "More"
        if name == "rest":
            shown, title = False, f"{len(rows)} at their defaults or not used here"
        cells = tuple(
            (str(one["path"]), _value(one), str(one.get("because", "")).removeprefix("unknown: "),
             str(one.get("source", "")))
            for one in rows
        )  # fmt: skip
        grid = Grid(columns=("key", "value", "because", "source"), rows=cells, code=("key",))
        inside.append(Folded(title=title, inside=(grid,), shown=shown))
    return PageSection(name="plan", title="Plan and reasons", inside=tuple(inside))


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
