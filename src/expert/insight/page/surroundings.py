"""On what the run was made, from what, and what came out: versions, machine, hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expert.core.text import gib
from expert.insight.page.blocks import Block, Folded, Grid, Section, Words
from expert.insight.page.facts import RunFacts, mapping, number
from expert.insight.page.prepared import read_small_json
from expert.insight.page.story import told_value

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
    inside.extend(_group("Machine", [*_machine(environment), *_cards(environment)]))
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


def _cards(environment: Mapping[str, Any]) -> Iterator[Fact]:
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
