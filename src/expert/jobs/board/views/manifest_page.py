"""The page of a manifest: a form generated from the schema, the plan, and example rows as the model
sees them. Changes are passed as `--set`; the manifest itself is not changed."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_DOES_NOT_FIT, ExpertError
from expert.core.process import run_program
from expert.core.text import counted, duration_range, gib
from expert.insight.page.blocks import PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts
from expert.insight.page.html import block_html
from expert.insight.page.markup import Markup, joined, tag
from expert.insight.page.sections.plan import plan_section
from expert.insight.record import RunRecord, mapping
from expert.insight.step.anatomy import Anatomy, finite
from expert.jobs.board.actions import ActionRefused, environment
from expert.jobs.board.folders import BoardItem
from expert.jobs.board.views.job_pages import log_html, output_lines
from expert.jobs.board.views.layout import button, page, title_row
from expert.manifest.explain import KeyHelp, explain
from expert.planning.machine.cards import CARDS

CONFIG = "training.config."
GROUPS = (
    (CONFIG, "Training"),
    ("training.dataset.", "Data"),
    ("base_models", "Base model"),
    ("soft_prompts", "Soft prompts"),
    ("training.decoding.", "Answers and validation"),
    ("training.", "Packaging"),
    ("", "About the expert"),
)
"""Groups of keys by prefix; the first match counts."""
SHOWN_KEYS = ("epochs", "learning_rate", "batch_size", "max_seq_length", "adapter_type", "rank",
         "packing", "optim")  # fmt: skip
"""Keys shown without opening a group."""
SECONDS = 90.0
MAX_RUNNING = 2
MOST_SET, LONGEST_VALUE, LONGEST_OBJECT = 60, 400, 20_000
SECTIONS = ("training", "training.config", "training.dataset", "training.decoding")
"""Objects without a field, since each of their keys has one."""
_SHORT = re.compile(r"^(training\.((config|dataset|decoding)\.)?|base_models\[0\]\.)")
_ENTRY = r"[^.\[\]=]{1,80}"
_GPU = re.compile(r"[\w. -]{1,60}")
_turns = threading.BoundedSemaphore(MAX_RUNNING)


@cache
def keys() -> list[tuple[re.Pattern[str], KeyHelp]]:
    """All keys of the schema with a pattern of their paths in `--set`: entries of lists by number,
    those of objects by name."""
    patterns = []
    for key in explain():
        if key.path not in SECTIONS:
            path = re.escape(key.path).replace(r"\[\]", r"\[\d{1,3}\]")
            patterns.append((re.compile(path.replace("<name>", _ENTRY)), key))
    return patterns


def manifest_page(found: BoardItem, written: Mapping[str, Any]) -> str:
    """The form; the script requests the plan and the rows."""
    fields = dict(_fields(written))
    first = [fields.pop(f"{CONFIG}{name}") for name in SHOWN_KEYS]
    groups = []
    for prefix, title in GROUPS:
        own = [fields.pop(path) for path in list(fields) if path.startswith(prefix)]
        if own:
            head = tag("summary", title, " ", tag("small", counted(len(own), "key")))
            groups.append(tag("details", head, tag("div", *own, class_="fields")))
    cards = [tag("option", card.name, value=card.slug) for card in CARDS]
    gpu = tag("select", tag("option", "this machine", value=""), *cards, name="gpu")
    start = button("Start training", f"/manifest/{found.id}/train", class_="primary", id="start")
    form = tag(
        "form", tag("label", "Plan for the GPU", gpu), *first, *groups, id="settings",
        data_manifest=found.id, class_="card fields", aria_label="training settings",
    )  # fmt: skip
    note = "Changes apply to the run you start; the manifest is not changed."
    return page(
        found.name,
        tag("p", tag("a", "Start", href="/start"), f" / {found.where}", class_="crumbs"),
        title_row(found.name, start),
        tag("p", note, class_="soft"),
        tag("div", form, tag("div", "Planning…", id="plan", aria_live="polite"), class_="beside"),
        tag("h2", "Rows as the model sees them"),
        tag("div", "Reading rows…", id="rows"),
        here="start",
    )


def _fields(written: Mapping[str, Any]) -> Iterator[tuple[str, Markup]]:
    """A field for every key by its path; keys of entries once per entry of the manifest."""
    for _, key in keys():
        for path, value in _places(key.path, written):
            yield path, _field(path, key, value)


def _places(path: str, written: Any) -> Iterator[tuple[str, Any]]:
    """The paths and values of a key in a manifest; of several base models, only the first, which is
    trained."""
    head, mark, rest = re.split(r"(\[\]|\.<name>|$)", path, maxsplit=1)
    for key in head.split("."):
        written = written.get(key) if isinstance(written, Mapping) else None
    if not mark:
        yield path, written
        return
    if mark == "[]":
        entries = {f"[{number}]": entry for number, entry in enumerate(written or ())}
    else:
        entries = {f".{name}": entry for name, entry in (written or {}).items()}
    if head == "base_models":
        entries = {"[0]": entries.get("[0]")}
    for entry, inside in entries.items():
        for below, value in _places(rest[1:], inside):
            yield f"{head}{entry}.{below}", value


def _field(path: str, key: KeyHelp, written: Any) -> Markup:
    is_object = _is_object(key)
    now = "" if written is None else written if isinstance(written, str) else json.dumps(
        written, indent=2 if is_object else None, ensure_ascii=False)  # fmt: skip
    words = re.findall(r'"([^"]+)"', key.expected)
    if re.search(r"\btrue or false\b|\btrue, false\b", key.expected):
        words = [*words, "true", "false"]
    is_choice = not re.search(r"number|text|list|path|folder|size", key.expected) and words
    default = key.default.strip('"')
    default = "not set" if default in ("", "null") else default
    about = {"name": path, "title": key.meaning, "data_was": now}
    if is_object:
        lines = str(min(12, now.count("\n") + 2))
        about |= {"placeholder": f"JSON or YAML; default: {default}", "spellcheck": "false"}
        field = tag("textarea", now, rows=lines, class_="code", autocomplete="off", **about)
    elif is_choice:
        options = [tag("option", f"default: {default}", value="")]
        options += [tag("option", word, value=word, selected="" if word == now else None)
                    for word in words]  # fmt: skip
        field = tag("select", *options, **about)
    else:
        field = tag("input", value=now, placeholder=default, autocomplete="off", **about)
    name = tag("span", _SHORT.sub("", path), class_="code")
    return tag("label", name, field, tag("small", key.meaning))


def _is_object(key: KeyHelp) -> bool:
    return "object" in key.expected


def set_options(given: Mapping[str, Any]) -> list[str]:
    """The `--set` options for the fields changed in the form."""
    changed = given.get("set", {})
    if not isinstance(changed, dict) or len(changed) > MOST_SET:
        raise ActionRefused("settings: expected an object of keys and values")
    words = []
    for path, value in sorted(changed.items()):  # an object before its keys
        key = next((key for pattern, key in keys() if pattern.fullmatch(path)), None)
        most = LONGEST_OBJECT if key and _is_object(key) else LONGEST_VALUE
        if key is None or not isinstance(value, str) or len(value) > most:
            raise ActionRefused(f"{path[:60]}: not a key of the form, or its value is too long")
        empty = "null"
        if _is_object(key):
            if "list of" not in key.expected:  # clear it: --set would keep keys that were removed
                words += ["--set", f"{path}=null"]
            if "null" not in key.expected:
                empty = "[]" if "list" in key.expected else "{}"
        elif key.expected.startswith("text") and (value or key.expected == "text"):
            value = json.dumps(value)  # text, even if it looks like a number
        words += ["--set", f"{path}={value or empty}"]
    return words


def plan_html(manifest: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of `expert plan --json` with these settings as HTML; or its problems, and which
    settings are wrong."""
    gpu = given.get("gpu") or ""
    if not isinstance(gpu, str) or (gpu and not _GPU.fullmatch(gpu)):
        raise ActionRefused("gpu: expected the name of a GPU")
    more = ["--gpu", gpu] if gpu else []
    words = ["plan", "--manifest", str(manifest), "--json", *more, *set_options(given)]
    code, out, errors = run_command(words)
    try:
        plan = json.loads(out) if code in (0, EXIT_DOES_NOT_FIT) else None
    except ValueError:
        plan = None
    if not isinstance(plan, dict):
        problems = output_lines(errors or out)[:40]
        keys_named = re.compile(r"(?:--set |^ +- (?!--set))([^\s=:]+)", re.MULTILINE)
        about = "\n".join(keys_named.findall("\n".join(problems)))
        wrong = [path for path in given.get("set", {})
                 if re.search(rf"^{re.escape(path)}([.\[]|$)", about, re.MULTILINE)]  # fmt: skip
        return {"html": log_html(problems, name=None), "wrong": wrong}
    html = joined(*map(block_html, _summary(plan)), *map(block_html, _plan(plan).inside))
    return {"html": html, "wrong": []}


def _summary(plan: dict[str, Any]) -> list[Tiles | Words]:
    memory, length = mapping(plan.get("memory")), mapping(plan.get("length"))
    cards = []
    peak, budget = finite(memory.get("peak_bytes")), finite(memory.get("budget_bytes"))
    if peak is not None:
        note = f"of {gib(budget)}" if budget else ""
        cards.append(Tile(name="Memory", value=gib(peak), note=note))
    steps = finite(length.get("total_steps"))
    if steps is not None:
        cards.append(
            Tile(name="Steps", value=f"{steps:,.0f}", note=f"{length.get('epochs')} epochs")
        )
    times = length.get("expected_seconds")
    if isinstance(times, list) and len(times) == 2:
        cards.append(Tile(name="Time", value=duration_range(*times), note="estimate"))
    target = str(plan.get("target") or "")
    words = Words(text=f"Whether it fits {target} is unknown.", tone="note")
    if memory.get("fits") is True:
        words = Words(text=f"Fits {target}.", tone="good")
    elif memory.get("fits") is False:
        words = Words(text=f"Does not fit {target}.", tone="error")
    return [words, Tiles(cards=tuple(cards))]


def _plan(plan: dict[str, Any]) -> PageSection:
    return plan_section(RunFacts(record=RunRecord(plan=plan), anatomy=Anatomy(), state=""))


def rows_html(manifest: Path) -> Markup:
    """The output of `expert dataset check`: counts, columns, three rows in full."""
    words = ["dataset", "check", "--manifest", str(manifest), "--rows", "3"]
    _, out, errors = run_command(words)
    return log_html(output_lines(out + errors), name=None)


def run_command(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a short `expert` command: exit code, output, errors."""
    command = [sys.executable, "-m", "expert", *words]
    with _turns:
        out, errors, code = run_program(command, seconds=SECONDS, env=environment())
    if code is None:
        raise ActionRefused(f"expert {words[0]} took more than {SECONDS:.0f} s")
    return code, out, errors


def manifest_values(manifest: Path) -> dict[str, Any]:
    """The manifest in the newest format; empty if it cannot be read."""
    from expert.manifest.reader import read_manifest

    try:
        return read_manifest(manifest).manifest.model_dump(mode="json", exclude_unset=True)
    except (ExpertError, OSError):  # the plan shows the problem
        return {}
