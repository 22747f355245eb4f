"""One manifest: a form made from the schema, the plan for a card beside it, rows as the model sees
them. What is typed is `--set` of the command line; the manifest itself is not changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_DOES_NOT_FIT, ExpertError
from expert.core.text import duration_range, gib
from expert.insight.page.blocks import PageSection, Tile, Tiles, Words
from expert.insight.page.facts import RunFacts, mapping, number
from expert.insight.page.html import block_html
from expert.insight.page.markup import Markup, escape, joined, tag
from expert.insight.page.plan import plan_section
from expert.insight.record import RunRecord
from expert.insight.step.anatomy import Anatomy, RunTimes
from expert.jobs.board.actions import Jobs, NotDone, environment
from expert.jobs.board.job_pages import output_lines
from expert.jobs.board.layout import button, page
from expert.jobs.board.places import Found
from expert.manifest.explain import KeyHelp, explain
from expert.planning.machine.card_table import CARDS

CONFIG = "training.config."
FIRST = ("epochs", "learning_rate", "batch_size", "max_seq_length", "adapter_type", "rank",
         "packing", "optim")  # fmt: skip
"""Shown without a click."""
SECONDS = 90.0
MOST_AT_ONCE = 2
MOST_SET, LONGEST_VALUE = 60, 400
_GPU = re.compile(r"[\w. -]{1,60}")
_turns = threading.BoundedSemaphore(MOST_AT_ONCE)


@cache
def keys() -> dict[str, KeyHelp]:
    """Keys of training.config that one value sets, by their last name."""
    found = [one for one in explain() if one.path.startswith(CONFIG)]
    return {
        one.path.removeprefix(CONFIG): one
        for one in found
        if "." not in one.path.removeprefix(CONFIG) and "object" not in one.expected
    }


def manifest_page(found: Found, written: Mapping[str, Any]) -> str:
    """The form; the script asks for the plan and the rows."""
    fields = {name: _field(one, written.get(name)) for name, one in keys().items()}
    first = [fields[name] for name in FIRST if name in fields]
    rest = [field for name, field in fields.items() if name not in FIRST]
    cards = [tag("option", card.name, value=card.slug) for card in CARDS]
    gpu = tag("select", tag("option", "this machine", value=""), *cards, name="gpu")
    more = tag("details", tag("summary", f"{len(rest)} more keys"), tag("div", *rest,
               class_="fields"))  # fmt: skip
    start = button("Start training", f"/manifest/{found.id}/train", class_="primary", id="start")
    form = tag(
        "form", tag("label", "Plan for the card", gpu), *first, more, id="settings",
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


def _field(one: KeyHelp, written: Any) -> Markup:
    name = one.path.removeprefix(CONFIG)
    now = "" if written is None else written if isinstance(written, str) else json.dumps(written)
    words = re.findall(r'"([^"]+)"', one.expected)
    if re.search(r"\btrue or false\b|\btrue, false\b", one.expected):
        words = [*words, "true", "false"]
    is_choice = not re.search(r"number|text|list|path|folder", one.expected) and words
    default = one.default.strip('"') or "not set"
    about = {"name": name, "title": one.meaning, "data_was": now}
    if is_choice:
        options = [tag("option", f"default: {default}", value="")]
        options += [tag("option", word, value=word, selected="" if word == now else None)
                    for word in words]  # fmt: skip
        field = tag("select", *options, **about)
    else:
        field = tag("input", value=now, placeholder=default, autocomplete="off", **about)
    return tag("label", tag("span", name, class_="code"), field, tag("small", one.meaning))


def settings_in(given: Mapping[str, Any]) -> list[str]:
    """What a page sent as `--set` words; only keys that the form has."""
    told = given.get("set", {})
    if not isinstance(told, dict) or len(told) > MOST_SET:
        raise NotDone("settings: expected an object of keys and values")
    words = []
    for name, value in told.items():
        if name not in keys() or not isinstance(value, str) or len(value) > LONGEST_VALUE:
            raise NotDone(f"{name[:60]}: not a key of the form, or too long a value")
        words += ["--set", f"{CONFIG}{name}={value or 'null'}"]
    return words


def plan_html(manifest: Path, given: Mapping[str, Any]) -> Markup:
    """The plan of `expert plan --json` with these settings, or its problems."""
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
        return _text(output_lines(said or out)[:40])
    return joined(*map(block_html, _summary(plan)), *map(block_html, _plan(plan).inside))


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
    return _text(output_lines(out + said))


def _text(lines: Sequence[str]) -> Markup:
    return tag("pre", Markup("\n".join(map(escape, lines))), class_="log", tabindex="0")


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


def written_config(manifest: Path) -> dict[str, Any]:
    """What the manifest says of training.config; nothing where it cannot be read."""
    from expert.manifest.reader import read_manifest

    try:
        config = read_manifest(manifest).manifest.training.config
    except (ExpertError, OSError):  # the plan beside the form says what is wrong
        return {}
    return config.model_dump(mode="json", exclude_unset=True)


def start_with(jobs: Jobs, found: Found, given: Mapping[str, Any]) -> str:
    """Start the training of a manifest with the settings of the form; the address to go to."""
    words = ["train", "--manifest", str(found.path), *settings_in(given)]
    job = jobs.start("train", words, root=found.root, about=found.name, subject=found.id)
    return f"/job/{job.id}"
