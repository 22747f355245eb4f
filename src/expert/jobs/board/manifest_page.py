"""One manifest: a form made from the schema, the plan for a card beside it, rows as the model sees
them. What is typed is `--set` of the command line; the manifest itself is not changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_DOES_NOT_FIT, ExpertError
from expert.core.text import counted, duration_range, gib
from expert.insight.page.blocks import PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts, mapping, number
from expert.insight.page.html import block_html
from expert.insight.page.markup import Markup, joined, tag
from expert.insight.page.plan import plan_section
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import Anatomy, RunTimes
from expert.jobs.board.actions import Jobs, NotDone, environment
from expert.jobs.board.job_pages import log_html, output_lines
from expert.jobs.board.layout import button, page
from expert.jobs.board.places import Found
from expert.manifest.explain import KeyHelp, explain
from expert.planning.machine.card_table import CARDS

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
"""Keys by how their paths begin; the first that fits."""
FIRST = ("epochs", "learning_rate", "batch_size", "max_seq_length", "adapter_type", "rank",
         "packing", "optim")  # fmt: skip
"""Shown without a click."""
SECONDS = 90.0
MOST_AT_ONCE = 2
MOST_SET, LONGEST_VALUE, LONGEST_OBJECT = 60, 400, 20_000
SECTIONS = ("training", "training.config", "training.dataset", "training.decoding")
"""Objects whose every key has a field of its own."""
_SHORT = re.compile(r"^(training\.((config|dataset|decoding)\.)?|base_models\[0\]\.)")
_ENTRY = r"[^.\[\]=]{1,80}"
_GPU = re.compile(r"[\w. -]{1,60}")
_turns = threading.BoundedSemaphore(MOST_AT_ONCE)


@cache
def keys() -> list[tuple[re.Pattern[str], KeyHelp]]:
    """Every key of the schema, each with the paths under which `--set` takes it in a manifest:
    entries of lists by their number, those of objects by their name."""
    found = []
    for one in explain():
        if one.path not in SECTIONS:
            path = re.escape(one.path).replace(r"\[\]", r"\[\d{1,3}\]")
            found.append((re.compile(path.replace("<name>", _ENTRY)), one))
    return found


def manifest_page(found: Found, written: Mapping[str, Any]) -> str:
    """The form; the script asks for the plan and the rows."""
    fields = dict(_fields(written))
    first = [fields.pop(f"{CONFIG}{name}") for name in FIRST]
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
        "form", tag("label", "Plan for the card", gpu), *first, *groups, id="settings",
        data_manifest=found.id, class_="card fields", aria_label="training settings",
    )  # fmt: skip
    note = "Values here are for the run that you start; the manifest stays as it is."
    return page(
        found.name,
        tag("p", tag("a", "Start", href="/start"), f" / {found.where}", class_="crumbs"),
        tag("div", tag("h1", found.name), tag("div", start, class_="row"), class_="title"),
        tag("p", note, class_="soft"),
        tag("div", form, tag("div", "Planning…", id="plan", aria_live="polite"), class_="beside"),
        tag("h2", "Rows as the model sees them"),
        tag("div", "Reading rows…", id="rows"),
        here="start",
    )


def _fields(written: Mapping[str, Any]) -> Iterator[tuple[str, Markup]]:
    """A field for every key, by its path; those of entries for as many as the manifest has."""
    for _, one in keys():
        for path, now in _places(one.path, written):
            yield path, _field(path, one, now)


def _places(path: str, written: Any) -> Iterator[tuple[str, Any]]:
    """Where a key of the schema is in a manifest, and what that says. Of several base models it is
    the first: that is the one which is trained."""
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
        for below, now in _places(rest[1:], inside):
            yield f"{head}{entry}.{below}", now


def _field(path: str, one: KeyHelp, written: Any) -> Markup:
    whole = _is_object(one)
    now = "" if written is None else written if isinstance(written, str) else json.dumps(
        written, indent=2 if whole else None, ensure_ascii=False)  # fmt: skip
    words = re.findall(r'"([^"]+)"', one.expected)
    if re.search(r"\btrue or false\b|\btrue, false\b", one.expected):
        words = [*words, "true", "false"]
    is_choice = not re.search(r"number|text|list|path|folder|size", one.expected) and words
    default = one.default.strip('"')
    default = "not set" if default in ("", "null") else default
    about = {"name": path, "title": one.meaning, "data_was": now}
    if whole:
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
    return tag("label", name, field, tag("small", one.meaning))


def _is_object(one: KeyHelp) -> bool:
    return "object" in one.expected


def settings_in(given: Mapping[str, Any]) -> list[str]:
    """What a page sent as `--set` words; only keys that the form has."""
    told = given.get("set", {})
    if not isinstance(told, dict) or len(told) > MOST_SET:
        raise NotDone("settings: expected an object of keys and values")
    words = []
    for path, value in sorted(told.items()):  # an object before its own keys
        one = next((one for places, one in keys() if places.fullmatch(path)), None)
        most = LONGEST_OBJECT if one and _is_object(one) else LONGEST_VALUE
        if one is None or not isinstance(value, str) or len(value) > most:
            raise NotDone(f"{path[:60]}: not a key of the form, or too long a value")
        nothing = "null"
        if _is_object(one):
            if "list of" not in one.expected:  # what is left out of an object is gone, too
                words += ["--set", f"{path}=null"]
            if "null" not in one.expected:
                nothing = "[]" if "list" in one.expected else "{}"
        elif one.expected.startswith("text") and (value or one.expected == "text"):
            value = json.dumps(value)  # whatever it looks like
        words += ["--set", f"{path}={value or nothing}"]
    return words


def plan_told(manifest: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of `expert plan --json` with these settings; or its problems, and which of the
    settings they are about."""
    gpu = given.get("gpu") or ""
    if not isinstance(gpu, str) or (gpu and not _GPU.fullmatch(gpu)):
        raise NotDone("gpu: expected the name of a card")
    more = ["--gpu", gpu] if gpu else []
    words = ["plan", "--manifest", str(manifest), "--json", *more, *settings_in(given)]
    code, out, said = run_command(words)
    try:
        plan = json.loads(out) if code in (0, EXIT_DOES_NOT_FIT) else None
    except ValueError:
        plan = None
    if not isinstance(plan, dict):
        problems = output_lines(said or out)[:40]
        told = re.compile(r"(?:--set |^ +- (?!--set))([^\s=:]+)", re.MULTILINE)
        about = "\n".join(told.findall("\n".join(problems)))
        wrong = [path for path in given.get("set", {})
                 if re.search(rf"^{re.escape(path)}([.\[]|$)", about, re.MULTILINE)]  # fmt: skip
        return {"html": log_html(problems, name=None), "wrong": wrong}
    html = joined(*map(block_html, _summary(plan)), *map(block_html, _plan(plan).inside))
    return {"html": html, "wrong": []}


def _summary(plan: dict[str, Any]) -> list[Tiles | Words]:
    memory, length = mapping(plan.get("memory")), mapping(plan.get("length"))
    cards = []
    peak, budget = number(memory.get("peak_bytes")), number(memory.get("budget_bytes"))
    if peak is not None:
        note = f"of {gib(budget)}" if budget else ""
        cards.append(Tile(name="Memory", value=gib(peak), note=note))
    steps = number(length.get("total_steps"))
    if steps is not None:
        cards.append(
            Tile(name="Steps", value=f"{steps:,.0f}", note=f"{length.get('epochs')} epochs")
        )
    times = length.get("expected_seconds")
    if isinstance(times, list) and len(times) == 2:
        cards.append(Tile(name="Time", value=duration_range(*times), note="estimate"))
    target = str(plan.get("target") or "")
    fits = memory.get("fits")
    words = Words(text=f"Fits {target}.", tone="good")
    if fits is False:
        words = Words(text=f"Does not fit {target}.", tone="error")
    return [words, Tiles(cards=tuple(cards))]


def _plan(plan: dict[str, Any]) -> PageSection:
    record = RunRecord(folder=Path(), manifest={}, plan=plan, environment={}, events=(),
                       damaged_lines=0, validation=None)  # fmt: skip
    anatomy = Anatomy(run=RunTimes(), step=None)
    return plan_section(RunFacts(record=record, anatomy=anatomy, state=""))


def rows_html(manifest: Path) -> Markup:
    """What `expert dataset check` prints of the rows: counts, columns, three rows in full."""
    words = ["dataset", "check", "--manifest", str(manifest), "--rows", "3"]
    _, out, said = run_command(words)
    return log_html(output_lines(out + said), name=None)


def run_command(words: Sequence[str]) -> tuple[int, str, str]:
    """A short command of the command line to its end: exit code, output, errors."""
    with _turns:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "expert", *words], capture_output=True, text=True,
                errors="replace", stdin=subprocess.DEVNULL, timeout=SECONDS, check=False,
                env=environment(),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotDone(f"expert {words[0]} took more than {SECONDS:.0f} s") from None
    return done.returncode, done.stdout, done.stderr


def written_in(manifest: Path) -> dict[str, Any]:
    """What the manifest says, as the newest layout has it; nothing where it cannot be read."""
    from expert.manifest.reader import read_manifest

    try:
        return read_manifest(manifest).manifest.model_dump(mode="json", exclude_unset=True)
    except (ExpertError, OSError):  # the plan beside the form says what is wrong
        return {}


def start_with(jobs: Jobs, found: Found, given: Mapping[str, Any]) -> str:
    """Start the training of a manifest with the settings of the form; the address to go to."""
    words = ["train", "--manifest", str(found.path), *settings_in(given)]
    job = jobs.start("train", words, root=found.root, about=found.name, subject=found.id)
    return f"/job/{job.id}"
