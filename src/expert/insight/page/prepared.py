"""The prepared data of a run: rows, tokens and how long the rows are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expert.core.recorded_paths import found_again
from expert.core.text import count
from expert.insight.page.blocks import (
    Block,
    Card,
    Cards,
    Figure,
    Folded,
    Grid,
    Histogram,
    Section,
    Words,
)
from expert.insight.page.facts import RunFacts, listed, mapping, number
from expert.insight.record import RunRecord

FIRST_EDGE = 16
"""Of the histogram in statistics.json: at most 16 tokens, then each edge twice the one before."""
_COLUMN = re.compile(r"(\w+)='([^']*)'")
MAX_BYTES = 1_000_000
"""Of a statistics file; a larger one is none."""
SHOWN_REJECTS = 5


def prepared(run: RunFacts) -> list[Section]:
    """Every prepared folder that the run names, as far as it is still there."""
    sections = []
    for place, (folder, splits) in enumerate(_folders(run.record).items()):
        named = " and ".join(splits)
        name = f"data-{place + 1}" if place else "data"
        inside = tuple(_one(run.record, folder, ", ".join(splits), place))
        sections.append(Section(name=name, title=f"Data: {named}", inside=inside))
    nothing = Words(text="The run names no prepared data.", tone="note")
    return sections or [Section(name="data", title="Data", inside=(nothing,))]


def _folders(record: RunRecord) -> dict[str, list[str]]:
    """The folders with the parts of the data that lie in each."""
    found: dict[str, list[str]] = {}
    for event in record.of("data"):
        if event.get("folder"):
            splits = found.setdefault(str(event["folder"]), [])
            split = str(event.get("split", "train"))
            splits.extend([split] if split not in splits else [])
    return found


def _one(record: RunRecord, folder: str, splits: str, place: int) -> Iterator[Block]:
    there = next((path for path in candidates(record, folder) if path.is_dir()), None)
    if there is None:
        yield Words(text=f"{folder} is no longer there, so its numbers are not known.", tone="note")
        return
    facts = read_small_json(there / "statistics.json")
    if not facts:
        yield Words(text=f"{folder} holds no readable statistics.json.", tone="note")
        return
    yield Cards(cards=tuple(_cards(facts)))
    figure = _histogram(facts, place)
    if figure is not None:
        yield figure
    rows = (("folder", folder), ("used for", splits), *_origin(there / "recipe.json"))
    yield Folded(
        title="Where it lies and what it was made from",
        inside=(Grid(columns=("fact", "value"), rows=rows, code=("value",)),),
    )
    rejects = list(_rejects(there / "rejects.jsonl"))
    if rejects:
        grid = Grid(columns=("row", "why it was left out"), rows=tuple(rejects))
        yield Folded(title="The first rows that were left out", inside=(grid,))


def _origin(recipe: Path) -> Iterator[tuple[str, str]]:
    """What decided the tokens, as a person reads it."""
    names = {"learn_prompt": "prompts are learnt", "checks": "checks of the rows"}
    for name, value in read_small_json(recipe).items():
        text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
        if name == "columns":
            # The names of the columns by what they are for; those that are not there are empty.
            found = [
                (key, own) for key, own in _COLUMN.findall(str(value)) if own and key != "kind"
            ]
            text = ", ".join(f"{key}: {own}" for key, own in found) or value
        if text != "":
            yield names.get(name, name), str(text)


def candidates(record: RunRecord, folder: str) -> list[Path]:
    """Where the folder may lie: the run may have been moved, and a relative one was named where it
    was started."""
    output = record.planned("watch.output_dir")
    then = output if isinstance(output, str) and output else "runs"
    now = record.folder.resolve().parent
    return [found_again(folder, runs_then=then, runs_now=now), now / folder]


def read_small_json(path: Path) -> Mapping[str, Any]:
    """An object of a small file; empty where it is missing, damaged or too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        return mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


def _cards(facts: Mapping[str, Any]) -> Iterator[Card]:
    rows, documents = number(facts.get("rows_in")), number(facts.get("documents"))
    tokens, learnt = number(facts.get("tokens")), number(facts.get("trainable_tokens"))
    longest, bad = number(facts.get("longest")), number(facts.get("bad_rows"))
    if rows is not None:
        used = f"{documents:,.0f} are used" if documents is not None else ""
        yield Card(name="Rows", value=f"{rows:,.0f}", note=used)
    if tokens is not None:
        mean = f"{tokens / documents:,.0f} a row" if documents else ""
        yield Card(name="Tokens", value=count(round(tokens)), note=mean)
    if learnt is not None and tokens:
        share = f"{learnt / tokens:.1%} of all"
        yield Card(name="Tokens that are learnt", value=count(round(learnt)), note=share)
    if longest is not None:
        yield Card(name="Longest row", value=f"{longest:,.0f}", note="tokens")
    left = {name: number(value) for name, value in mapping(facts.get("dropped")).items()}
    left["unreadable"] = bad
    out = {name: value for name, value in left.items() if value}
    if out:
        why = ", ".join(f"{name} {value:,.0f}" for name, value in out.items())
        yield Card(name="Rows left out", value=f"{sum(out.values()):,.0f}", note=why)


def _histogram(facts: Mapping[str, Any], place: int) -> Figure | None:
    counts = [number(value) for value in listed(facts.get("histogram"))]
    if not counts or None in counts or not any(counts) or min(c or 0.0 for c in counts) < 0:
        return None
    edges = [FIRST_EDGE << power for power in range(len(counts) - 1)]
    labels = [f"≤{_short(edge)}" for edge in edges]
    labels.append(f">{_short(edges[-1])}" if edges else "all")
    used = [index for index, value in enumerate(counts) if value]
    first, last = used[0], used[-1] + 1
    chart = Histogram(
        labels=tuple(labels[first:last]),
        counts=tuple(round(value or 0) for value in counts[first:last]),
        what="rows",
    )
    name = "row-lengths" if place == 0 else f"row-lengths-{place + 1}"
    return Figure(name=name, title="How long the rows are, in tokens", chart=chart, wide=True)


def _short(edge: int) -> str:
    return f"{edge // 1024}k" if edge >= 1024 else str(edge)


def _rejects(path: Path) -> Iterator[tuple[str, str]]:
    """The first rows that could not be used, with the reasons; the file may be long."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            for _, line in zip(range(SHOWN_REJECTS), stream, strict=False):
                facts = mapping(json.loads(line))
                where = next((facts[key] for key in ("line", "row", "number") if key in facts), "–")
                yield (
                    str(where),
                    "; ".join(f"{key}: {value}" for key, value in facts.items() if value != where),
                )
    except (OSError, ValueError, RecursionError):
        return
