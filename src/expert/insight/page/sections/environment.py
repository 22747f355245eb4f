"""What a run used: prepared data, base model, machine, versions, hashes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expert.core.files import open_regular
from expert.core.rundir import relocated_path
from expert.core.stored_json import parse_json, read_object_or_empty
from expert.core.text import count, counted, gib
from expert.insight.event_text import planned_value
from expert.insight.page.blocks import (
    Bar,
    Bars,
    Block,
    Figure,
    Folded,
    Grid,
    PageSection,
    Tile,
    Tiles,
    Words,
)
from expert.insight.page.facts import RunFacts
from expert.insight.record import RunRecord, listed, mapping
from expert.insight.step.anatomy import finite

Fact = tuple[str, str]
FIRST_EDGE = 16
"""First bin of the histogram in statistics.json: at most 16 tokens; each next edge is doubled."""
SHOWN_REJECTS = 5
SHOWN_FILES = 100
_COLUMN = re.compile(r"(\w+)='([^']*)'")
_RECIPE_NAMES = {"learn_prompt": "prompts are trained on", "checks": "row checks"}


def _facts_grid(title: str, facts: tuple[Fact, ...]) -> Folded:
    grid = Grid(columns=("fact", "value"), rows=facts, code=("value",))
    return Folded(title=title, inside=(grid,))


# --- prepared data -------------------------------------------------------------------------------


def data_sections(run: RunFacts) -> list[PageSection]:
    """Every prepared-token folder of the run that still exists."""
    folders: dict[str, dict[str, None]] = {}
    for event in run.record.of("data"):
        if event.get("folder"):
            folders.setdefault(str(event["folder"]), {})[str(event.get("split", "train"))] = None
    if not folders:
        nothing = Words(text="The run recorded no prepared data.", tone="note")
        return [PageSection(name="data", title="Data", inside=(nothing,))]
    return [
        PageSection(
            name=f"data-{place}" if place > 1 else "data",
            title=f"Data: {' and '.join(splits)}",
            inside=tuple(_prepared(run.record, folder, ", ".join(splits), place)),
        )
        for place, (folder, splits) in enumerate(folders.items(), 1)
    ]


def _prepared(record: RunRecord, folder: str, splits: str, place: int) -> Iterator[Block]:
    # The run may have been moved, and a relative path depends on the folder it was started in.
    output = record.planned("watch.output_dir")
    then = output if isinstance(output, str) and output else "runs"
    now = record.folder.resolve().parent
    candidates = (relocated_path(folder, runs_then=then, runs_now=now), now / folder)
    there = next((path for path in candidates if path.is_dir()), None)
    facts = read_object_or_empty(there / "statistics.json") if there is not None else {}
    if there is None or not facts:
        why = "no longer exists" if there is None else "has no readable statistics.json"
        yield Words(text=f"{folder} {why}, so its numbers are unknown.", tone="note")
        return
    yield Tiles(cards=tuple(_data_cards(facts)))
    yield from _histogram(facts, "row-lengths" if place == 1 else f"row-lengths-{place}")
    rows = (("folder", folder), ("used for", splits), *_recipe(there / "recipe.json"))
    yield _facts_grid("Where it is and how it was made", rows)
    rejects = tuple(_rejects(there / "rejects.jsonl"))
    if rejects:
        grid = Grid(columns=("row", "reason"), rows=rejects)
        yield Folded(title="The first rows that were left out", inside=(grid,))


def _recipe(recipe: Path) -> Iterator[Fact]:
    """The settings that determined the tokens."""
    for name, value in read_object_or_empty(recipe).items():
        text = ("yes" if value else "no") if isinstance(value, bool) else value
        if name == "columns":
            # Column names by their role; roles without a column are empty.
            roles = _COLUMN.findall(str(value))
            used = [f"{role}: {own}" for role, own in roles if own and role != "kind"]
            text = ", ".join(used) or value
        if text != "":
            yield _RECIPE_NAMES.get(name, name), str(text)


def _data_cards(facts: Mapping[str, Any]) -> Iterator[Tile]:
    keys = ("rows_in", "documents", "tokens", "trainable_tokens", "longest")
    rows, used, tokens, trained, longest = (finite(facts.get(key)) for key in keys)
    if rows is not None:
        note = f"{used:,.0f} used" if used is not None else ""
        yield Tile(name="Rows", value=f"{rows:,.0f}", note=note)
    if tokens is not None:
        mean = f"{tokens / used:,.0f} per row" if used else ""
        yield Tile(name="Tokens", value=count(round(tokens)), note=mean)
    if trained is not None and tokens:
        share = f"{trained / tokens:.1%} of all"
        yield Tile(name="Tokens trained on", value=count(round(trained)), note=share)
    if longest is not None:
        yield Tile(name="Longest row", value=f"{longest:,.0f}", note="tokens")
    left = {**mapping(facts.get("dropped")), "unreadable": facts.get("bad_rows")}
    out = {name: value for name, given in left.items() if (value := finite(given))}
    if out:
        why = ", ".join(f"{name} {value:,.0f}" for name, value in out.items())
        yield Tile(name="Rows left out", value=f"{sum(out.values()):,.0f}", note=why)


def _histogram(facts: Mapping[str, Any], name: str) -> Iterator[Figure]:
    counts = [finite(value) for value in listed(facts.get("histogram"))]
    if not any(counts) or None in counts or min(value or 0.0 for value in counts) < 0:
        return
    edges = [FIRST_EDGE << power for power in range(len(counts) - 1)]
    short = [f"{edge // 1024}k" if edge >= 1024 else str(edge) for edge in edges]
    labels = [*(f"≤{edge}" for edge in short), f">{short[-1]}" if short else "all"]
    used = [index for index, value in enumerate(counts) if value]
    bars = tuple(
        Bar(name=labels[index], amount=counts[index], words=f"{counts[index] or 0:,.0f}")
        for index in range(used[0], used[-1] + 1)
    )
    yield Figure(name=name, title="Row lengths in tokens", chart=Bars(bars=bars), wide=True)


def _rejects(path: Path) -> Iterator[Fact]:
    """The first unusable rows with their reasons; the file may be long."""
    try:
        with io.TextIOWrapper(open_regular(path), "utf-8", "replace") as stream:
            for _, line in zip(range(SHOWN_REJECTS), stream, strict=False):
                facts = mapping(parse_json(line.encode()))
                where = next((facts[key] for key in ("line", "row", "number") if key in facts), "–")
                rest = (f"{key}: {value}" for key, value in facts.items() if value != where)
                yield str(where), "; ".join(rest)
    except (OSError, ValueError, RecursionError):
        return


# --- environment and hashes ----------------------------------------------------------------------


def environment_section(run: RunFacts) -> PageSection:
    """Facts in groups; anything not recorded is left out."""
    environment, plan = run.record.environment, run.record.plan
    inside: list[Block] = []
    if not environment:
        text = "environment.json is missing or damaged: versions and machine are unknown."
        inside.append(Words(text=text, tone="warning"))
    own = {name: environment.get(name) for name in ("python", "cuda", "platform")}
    versions = {**mapping(environment.get("versions")), **own}
    data = {
        str(event["folder"]): f"{'reused' if event.get('hit') else 'made'}: {event.get('because')}"
        for event in reversed(run.record.of("data"))
        if event.get("folder")
    }
    groups: dict[str, list[Fact]] = {
        "Base model": [
            (key.replace("_", " "), planned_value(f"model.{key}", value))
            for key, value in mapping(plan.get("model")).items()
            if value is not None and not isinstance(value, dict | list)
        ],
        "Machine": list(_machine(mapping(environment.get("machine")))),
        "Versions": [(str(name), str(text)) for name, text in versions.items() if text is not None],
        "Prepared data": list(reversed(data.items())),
    }
    for title, facts in groups.items():
        if facts:
            inside.append(_facts_grid(f"{title}: {facts[0][1]}", tuple(facts)))
    inside.extend(_hashes(run))
    return PageSection(name="environment", title="Environment and hashes", inside=tuple(inside))


def _machine(machine: Mapping[str, Any]) -> Iterator[Fact]:
    if not machine.get("gpus") and machine.get("gpu_note"):
        yield "GPU", f"none: {machine['gpu_note']}"
    keys = ("cpu_model", "cores_available", "cores_logical", "ram_total_bytes", "os")
    facts = [("", key, machine.get(key)) for key in keys]
    for place, gpu in enumerate(listed(machine.get("gpus"))):
        facts += [(f"GPU {place} ", str(key), fact) for key, fact in mapping(gpu).items()]
    for prefix, key, fact in facts:  # which may be recorded with its source
        value = fact.get("value") if isinstance(fact, dict) and "value" in fact else fact
        if value is not None and not isinstance(value, dict):
            name = key.removesuffix("_bytes").replace("_", " ")
            yield f"{prefix}{name}", planned_value(key, value)


def _hashes(run: RunFacts) -> list[Block]:
    """The files of the finished expert as listed in DONE."""
    files = read_object_or_empty(run.record.folder / "final" / "DONE")
    if not files:
        missing = Words(text="final/DONE is missing, so there are no hashes.", tone="note")
        return [missing] if run.state == "finished" else []
    rows = []
    for name, facts in list(files.items())[:SHOWN_FILES]:
        size = finite(mapping(facts).get("size"))
        size_words = gib(size) if size is not None else "–"
        rows.append((str(name), size_words, str(mapping(facts).get("sha256", "–"))))
    columns = ("file", "size", "sha256")
    grid = Grid(columns=columns, rows=tuple(rows), numbers=("size",), code=("sha256",))
    title = f"Final weights: {counted(len(files), 'file')} with their hashes"
    return [Folded(title=title, inside=(grid,))]
