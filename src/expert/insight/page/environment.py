"""What a run used: its plan, prepared data, base model, machine, versions, hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expert.core.rundir import relocated_path
from expert.core.stored_json import read_object_or_empty
from expert.core.text import count, gib
from expert.insight.event_text import planned_value
from expert.insight.page.facts import RunFacts
from expert.insight.page.render import PageSection, make_section
from expert.insight.record import RunRecord, listed, mapping
from expert.insight.step.anatomy import finite

Fact = tuple[str, str]
SHOWN_FILES = 100
DEFAULT = "the default"
NOT_SHOWN = ("memory.parts", "decoding", "data.dataset")
"""Objects too large for a cell; plan.json has them."""
OPEN = ("kernels", "batch")
"""Open by default: what decides speed, and anything a fallback changed."""
PLAN_COLUMNS = ("key", "value", "because", "source")


# --- the plan ------------------------------------------------------------------------------------


def plan_section(record: RunRecord) -> PageSection:
    """Every decided value with its reason; defaults are folded."""
    taken = [mapping(one) for one in listed(record.plan.get("decisions"))]
    groups: dict[str, list[tuple[bool, tuple[str, ...]]]] = {}
    for one in taken:
        path, because = str(one.get("path") or ""), str(one.get("because", ""))
        if not path or path in NOT_SHOWN:
            continue
        is_unknown = because.startswith("unknown")
        matters = is_unknown or (because != DEFAULT and one.get("value") not in (None, [], {}))
        value = planned_value(path, one.get("value"))
        if is_unknown and one.get("value") is None:
            value, because = "unknown", because.removeprefix("unknown: ")
        cells = (path, value, because, str(one.get("source", "")))
        group = path.partition(".")[0] if matters else ""
        groups.setdefault(group, []).append((one.get("source") == "fallback", cells))
    rest = groups.pop("", [])
    folds = [
        (
            f"{name.capitalize()}: {len(rows)}",
            name in OPEN or any(fell_back for fell_back, _ in rows),
            [cells for _, cells in rows],
        )
        for name, rows in groups.items()
    ]
    if rest:
        title = f"{len(rest)} at their defaults or not used here"
        folds.append((title, False, [cells for _, cells in rest]))
    remarks = [mapping(one) for one in listed(record.plan.get("remarks"))]
    return make_section("plan", "Plan and reasons", remarks, folds, PLAN_COLUMNS)


# --- prepared data -------------------------------------------------------------------------------


def data_sections(run: RunFacts) -> list[PageSection]:
    """Every prepared-token folder of the run that still exists."""
    folders: dict[str, dict[str, None]] = {}
    for event in run.record.of("data"):
        if event.get("folder"):
            folders.setdefault(str(event["folder"]), {})[str(event.get("split", "train"))] = None
    if not folders:
        return [make_section("data", "Data", problem="The run recorded no prepared data.")]
    sections = []
    for place, (folder, splits) in enumerate(folders.items(), 1):
        suffix, title = f"-{place}" if place > 1 else "", f"Data: {' and '.join(splits)}"
        facts = {"suffix": suffix, **_prepared(run.record, folder)}
        sections.append(make_section(f"data{suffix}", title, layout="data", **facts))
    return sections


def statistics_of(record: RunRecord, folder: str) -> tuple[Path | None, dict[str, Any]]:
    """Where a prepared-token folder is now, and its counts and lengths of rows."""
    # The run may have been moved, and a relative path depends on the folder it was started in.
    output = record.planned("watch.output_dir")
    then = output if isinstance(output, str) and output else "runs"
    now = record.folder.resolve().parent
    candidates = (relocated_path(folder, runs_then=then, runs_now=now), now / folder)
    there = next((path for path in candidates if path.is_dir()), None)
    return there, read_object_or_empty(there / "statistics.json") if there is not None else {}


def _prepared(record: RunRecord, folder: str) -> dict[str, Any]:
    """What is known of a prepared-token folder, or why nothing is."""
    there, facts = statistics_of(record, folder)
    if there is None or not facts:
        why = "no longer exists" if there is None else "has no readable statistics.json"
        return {"problem": f"{folder} {why}, so its numbers are unknown."}
    return {
        "tiles": list(_data_tiles(facts)),
        "folder": folder,
    }


def _data_tiles(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    keys = ("rows_in", "documents", "tokens", "trainable_tokens", "longest")
    rows, used, tokens, trained, longest = (finite(facts.get(key)) for key in keys)
    if rows is not None:
        yield "Rows", f"{rows:,.0f}", f"{used:,.0f} used" if used is not None else ""
    if tokens is not None:
        mean = f"{tokens / used:,.0f} per row" if used else ""
        yield "Tokens", count(round(tokens)), mean
    if trained is not None and tokens:
        yield "Tokens trained on", count(round(trained)), f"{trained / tokens:.1%} of all"
    if longest is not None:
        yield "Longest row", f"{longest:,.0f}", "tokens"
    left = {**mapping(facts.get("dropped")), "unreadable": facts.get("bad_rows")}
    out = {name: value for name, given in left.items() if (value := finite(given))}
    if out:
        why = ", ".join(f"{name} {value:,.0f}" for name, value in out.items())
        yield "Rows left out", f"{sum(out.values()):,.0f}", why


# --- environment and hashes ----------------------------------------------------------------------


def environment_section(run: RunFacts) -> PageSection:
    """Facts in groups, and the files of the finished expert as listed in DONE; anything not
    recorded is left out."""
    environment = run.record.environment
    own = {name: environment.get(name) for name in ("python", "cuda", "platform")}
    versions = {**mapping(environment.get("versions")), **own}
    model = mapping(run.record.plan.get("model"))
    groups: dict[str, list[Fact]] = {
        "Base model": [
            (key.replace("_", " "), planned_value(f"model.{key}", value))
            for key, value in model.items()
            if value is not None and not isinstance(value, dict | list)
        ],
        "Machine": list(_machine(mapping(environment.get("machine")))),
        "Versions": [(str(name), str(text)) for name, text in versions.items() if text is not None],
    }
    files = read_object_or_empty(run.record.folder / "final" / "DONE")
    hashes = []
    for name, facts in list(files.items())[:SHOWN_FILES]:
        size = finite(mapping(facts).get("size"))
        words = gib(size) if size is not None else "–"
        hashes.append((str(name), words, str(mapping(facts).get("sha256", "–"))))
    missing = run.state == "finished" and not files
    return make_section(
        "environment", "Environment and hashes", bool(environment), groups, hashes, missing
    )


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
