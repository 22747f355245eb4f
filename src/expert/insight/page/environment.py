"""What the run was made from: data, base model, machine, versions, hashes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expert.core.recorded_paths import found_again
from expert.core.text import count, gib
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
from expert.insight.page.events import told_value
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


SHOWN_FILES = 100
Fact = tuple[str, str]


def surroundings(run: RunFacts) -> Section:
    """Facts in groups; what was not recorded is left out."""
    environment = run.record.environment
    inside: list[Block] = []
    if not environment:
        text = "environment.json is missing or damaged: versions and machine are not known."
        inside.append(Words(text=text, tone="warning"))
    inside.extend(_group("Base model", list(_base(run))))
    inside.extend(_group("Machine", [*_machine(environment), *_gpus(environment)]))
    inside.extend(_group("Versions", list(_versions(environment))))
    inside.extend(_group("Prepared data", list(_data_keys(run))))
    inside.extend(_results(run))
    return Section(name="environment", title="Environment and hashes", inside=tuple(inside))


def _group(title: str, facts: list[Fact]) -> list[Block]:
    if not facts:
        return []
    grid = Grid(columns=("fact", "value"), rows=tuple(facts), code=("value",))
    return [Folded(title=f"{title}: {facts[0][1]}", inside=(grid,))]


def _base(run: RunFacts) -> Iterator[Fact]:
    for key, value in mapping(run.record.plan.get("model")).items():
        if value is not None and not isinstance(value, dict | list):
            yield key.replace("_", " "), told_value(f"model.{key}", value)


def _value(fact: object) -> object:
    """What a fact of the machine says; each comes with where it was read."""
    return fact.get("value") if isinstance(fact, dict) and "value" in fact else fact


def _machine(environment: Mapping[str, Any]) -> Iterator[Fact]:
    machine = mapping(environment.get("machine"))
    gpus = machine.get("gpus")
    if not gpus and machine.get("gpu_note"):
        yield "GPU", f"none: {machine['gpu_note']}"
    for key in ("cpu_model", "cores_available", "cores_logical", "ram_total_bytes", "os"):
        value = _value(machine.get(key))
        if value is not None:
            yield key.removesuffix("_bytes").replace("_", " "), told_value(key, value)


def _gpus(environment: Mapping[str, Any]) -> Iterator[Fact]:
    gpus = mapping(environment.get("machine")).get("gpus")
    for place, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        for key, fact in mapping(gpu).items():
            value = _value(fact)
            if value is not None and not isinstance(value, dict):
                words = key.removesuffix("_bytes").replace("_", " ")
                yield f"GPU {place} {words}", told_value(key, value)


def _versions(environment: Mapping[str, Any]) -> Iterator[Fact]:
    for name, version in mapping(environment.get("versions")).items():
        if version is not None:
            yield str(name), str(version)
    for name in ("python", "cuda", "platform"):
        if environment.get(name) is not None:
            yield name, str(environment[name])


def _data_keys(run: RunFacts) -> Iterator[Fact]:
    told: set[str] = set()
    for event in run.record.of("data"):
        folder = str(event.get("folder") or "")
        if folder and folder not in told:
            told.add(folder)
            hit = "was there" if event.get("hit") else "was made"
            yield folder, f"{hit}: {event.get('because')}"


def _results(run: RunFacts) -> list[Block]:
    """The files of the finished expert as DONE lists them."""
    files = read_small_json(run.record.folder / "final" / "DONE")
    if not files:
        if run.state == "finished":
            return [Words(text="final/DONE is not there, so no hash can be told.", tone="note")]
        return []
    rows = []
    for name, facts in list(files.items())[:SHOWN_FILES]:
        size = number(mapping(facts).get("size"))
        size_words = gib(size) if size is not None else "–"
        rows.append((str(name), size_words, str(mapping(facts).get("sha256", "–"))))
    grid = Grid(
        columns=("file", "size", "sha256"), rows=tuple(rows), numbers=("size",), code=("sha256",)
    )
    what = "file" if len(files) == 1 else "files"
    return [Folded(title=f"Finished expert: {len(files)} {what} with their hashes", inside=(grid,))]
