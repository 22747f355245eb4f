"""The plan: every decision with its source and reason."""

from __future__ import annotations

from typing import Any

from expert.insight.event_text import planned_value
from expert.insight.page.render import PageSection, make_section
from expert.insight.record import RunRecord, listed, mapping

DEFAULT = "the default"
NOT_SHOWN = ("memory.parts", "decoding", "data.dataset")
"""Objects too large for a cell; plan.json has them."""
GROUPS = {"model": "Model", "adapter": "Adapter", "kernels": "Kernels", "data": "Data",
          "batch": "Batch", "loader": "Loader", "optim": "Optimizer", "length": "Length",
          "watch": "Checkpoints and logging", "stability": "Stability", "memory": "Memory",
          "disk": "Disk"}  # fmt: skip
OPEN = ("kernels", "batch")
"""Open by default: what decides speed, and anything a fallback changed."""
COLUMNS = ("key", "value", "because", "source")


def plan_section(record: RunRecord) -> PageSection:
    """Every decided value with its reason; defaults are folded."""
    taken = [mapping(one) for one in listed(record.plan.get("decisions"))]
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in (*GROUPS, "more", "rest")}
    for one in taken:
        path, because = str(one.get("path") or ""), str(one.get("because", ""))
        if not path or path in NOT_SHOWN:
            continue
        is_unknown = because.startswith("unknown")
        matters = is_unknown or (because != DEFAULT and one.get("value") not in (None, [], {}))
        value = planned_value(path, one.get("value"))
        if is_unknown and one.get("value") is None:
            value, because = "unknown", because.removeprefix("unknown: ")
        group = path.partition(".")[0]
        groups["rest" if not matters else group if group in GROUPS else "more"].append(
            {**one, "cells": (path, value, because, str(one.get("source", "")))}
        )
    folds = []
    for name, rows in groups.items():
        title = f"{GROUPS.get(name, 'More')}: {len(rows)}"
        if name == "rest":
            title = f"{len(rows)} at their defaults or not used here"
        is_open = name in OPEN or any(one.get("source") == "fallback" for one in rows)
        if rows:
            cells = [one["cells"] for one in rows]
            folds.append((title, is_open and name != "rest", cells))
    remarks = [mapping(one) for one in listed(record.plan.get("remarks"))]
    return make_section("plan", "Plan and reasons", remarks, folds, COLUMNS)
