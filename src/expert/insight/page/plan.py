"""The plan: what was decided, by whom and why."""

from __future__ import annotations

from typing import Any

from expert.insight.page.blocks import Block, Folded, Grid, Section, Tone, Words
from expert.insight.page.events import told_value
from expert.insight.page.facts import RunFacts, listed, mapping

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
    "optim": "Optimiser",
    "length": "Length",
    "watch": "Saving and watching",
    "stability": "Stability",
    "memory": "Memory",
    "disk": "Disk",
}
OPEN = ("kernels", "batch")
"""What decides about speed lies open, and whatever a fallback changed."""
REMARKS: dict[str, Tone] = {"warning": "warning", "advice": "note", "superseded": "plain"}
COLUMNS = ("path", "value", "because", "source")


def decisions(run: RunFacts) -> list[Section]:
    """Every settled value with its reason; what is at its default is folded away."""
    taken = [mapping(one) for one in listed(run.record.plan.get("decisions"))]
    taken = [one for one in taken if one.get("path") and one["path"] not in NOT_SHOWN]
    if not taken:
        why = "plan.json is missing or damaged, so nothing is known of what was decided."
        return [Section(name="plan", title="The plan", inside=(Words(text=why, tone="warning"),))]
    told = [one for one in taken if _matters(one)]
    rest = [one for one in taken if not _matters(one)]
    inside: list[Block] = [*_remarks(run)]
    for name, title in GROUPS.items():
        rows = [one for one in told if _group(one) == name]
        if rows:
            shown = name in OPEN or any(one.get("source") == "fallback" for one in rows)
            title = f"{title}: {_brief(rows)}"
            inside.append(Folded(title=title, inside=(_grid(rows),), shown=shown))
    odd = [one for one in told if _group(one) not in GROUPS]
    if odd:
        inside.append(Folded(title="More", inside=(_grid(odd),)))
    if rest:
        title = f"{len(rest)} at their defaults or without meaning here"
        inside.append(Folded(title=title, inside=(_grid(rest),)))
    return [Section(name="plan", title="The plan and its reasons", inside=tuple(inside))]


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


def _group(one: dict[str, Any]) -> str:
    return str(one["path"]).partition(".")[0]


def _brief(rows: list[dict[str, Any]]) -> str:
    """The first values of a group, so that it need not be opened to be known."""
    words = []
    for one in [one for one in rows if not isinstance(one.get("value"), dict)][:3]:
        leaf = str(one["path"]).rpartition(".")[2].removesuffix("_bytes").replace("_", " ")
        text = _value(one)
        words.append(f"{leaf} {text if len(text) <= 30 else text[:29] + '…'}")
    return ", ".join(words)


def _value(one: dict[str, Any]) -> str:
    if one.get("value") is None and str(one.get("because")).startswith("unknown"):
        return "unknown"
    return told_value(str(one["path"]), one.get("value"))


def _grid(rows: list[dict[str, Any]]) -> Grid:
    shown = [
        (str(one["path"]), _value(one), str(one.get("because", "")), str(one.get("source", "")))
        for one in rows
    ]
    return Grid(columns=COLUMNS, rows=tuple(shown), code=("path",))
