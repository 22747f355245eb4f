"""The page of a manifest: a form generated from the schema, the plan, and example rows as the model
sees them; and the creation of an expert from an uploaded file. Changes are passed as `--set`; the
manifest itself is not changed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_DOES_NOT_FIT, ExpertError
from expert.core.links import open_plain
from expert.core.process import run_program
from expert.core.text import duration_range, epochs_in_words, gib
from expert.insight.page.environment import plan_section
from expert.insight.record import RunRecord, mapping
from expert.insight.step.anatomy import finite
from expert.jobs.board.actions import ActionRefused, environment, state_folder
from expert.jobs.board.folders import BoardItem
from expert.jobs.board.render import page, part
from expert.jobs.board.views import output_lines
from expert.manifest.explain import KeyHelp, explain
from expert.planning.machine.cards import CARDS
from expert.planning.run_plan import LengthPlan

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
SHOWN_KEYS = ("base_models[0].name", *(f"{CONFIG}{name}" for name in (
    "epochs", "learning_rate", "batch_size", "max_seq_length", "adapter_type", "rank", "packing",
    "optim")))  # fmt: skip
"""Keys shown without opening a group."""
SECTIONS = ("training", "training.config", "training.dataset", "training.decoding")
"""Objects without a field, since each of their keys has one."""
SECONDS = 90.0
MAX_RUNNING = 2
MOST_SET, LONGEST_VALUE, LONGEST_OBJECT = 60, 400, 20_000
MAX_BYTES = 2 * 2**30
IDLE_SECONDS = 20.0
_SHORT = re.compile(r"^(training\.((config|dataset|decoding)\.)?|base_models\[0\]\.)")
_GPU = re.compile(r"[\w. -]{1,60}")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_MODEL = re.compile(r"[A-Za-z0-9][\w./-]{0,120}")
_turns = threading.BoundedSemaphore(MAX_RUNNING)


@cache
def keys() -> dict[str, KeyHelp]:
    """The keys that have a field, by path as in `--set`: all but those of entries of lists and
    objects, which are written as a whole; of several base models the first, which is trained."""
    found = {key.path.replace("base_models[]", "base_models[0]"): key for key in explain()}
    return {
        path: key
        for path, key in found.items()
        if path not in SECTIONS and not re.search(r"\[\]|<name>", path)
        and not key.meaning.startswith("Superseded")
    }  # fmt: skip


def manifest_page(found: BoardItem) -> str:
    """The form; the script requests the plan and the rows."""
    from expert.manifest.reader import read_manifest

    try:
        read = read_manifest(found.path)
        written = read.manifest.model_dump(mode="json", exclude_unset=True)
    except (ExpertError, OSError):  # the plan shows the problem
        written = {}
    fields = {path: _field(path, key, _value(written, path)) for path, key in keys().items()}
    first = [fields.pop(path) for path in SHOWN_KEYS]
    groups = []
    for prefix, title in GROUPS:
        own = [fields.pop(path) for path in list(fields) if path.startswith(prefix)]
        groups += [(title, own)] if own else []
    return page("manifest", found.name, here="start", found=found, first=first, groups=groups,
                cards=CARDS)  # fmt: skip


def _value(written: Any, path: str) -> Any:
    """What the manifest says at this path; None if it says nothing."""
    for key in path.replace("[0]", ".0").split("."):
        if isinstance(written, list):
            written = written[0] if written else None
        else:
            written = mapping(written).get(key)
    return written


def _field(path: str, key: KeyHelp, written: Any) -> dict[str, Any]:
    """What the template needs for the field of a key."""
    is_object = "object" in key.expected
    now = "" if written is None else written if isinstance(written, str) else json.dumps(
        written, indent=2 if is_object else None, ensure_ascii=False)  # fmt: skip
    words = re.findall(r'"([^"]+)"', key.expected)
    if re.search(r"\btrue or false\b|\btrue, false\b", key.expected):
        words = [*words, "true", "false"]
    is_free = re.search(r"number|text|list|path|folder|size", key.expected) or not words
    default = key.default.strip('"')
    return {
        "path": path,
        "short": "model" if path == SHOWN_KEYS[0] else _SHORT.sub("", path),
        "kind": "object" if is_object else "text" if is_free else "choice",
        "words": words,
        "meaning": key.meaning,
        "default": "not set" if default in ("", "null") else default,
        "now": now,
        "rows": min(12, now.count("\n") + 2),
    }


def set_options(given: Mapping[str, Any]) -> list[str]:
    """The `--set` options for the fields changed in the form."""
    changed = given.get("set", {})
    if not isinstance(changed, dict) or len(changed) > MOST_SET:
        raise ActionRefused("settings: expected an object of keys and values")
    words = []
    for path, value in sorted(changed.items()):  # an object before its keys
        key = keys().get(path)
        is_object = key is not None and "object" in key.expected
        most = LONGEST_OBJECT if is_object else LONGEST_VALUE
        if key is None or not isinstance(value, str) or len(value) > most:
            raise ActionRefused(f"{path[:60]}: not a key of the form, or its value is too long")
        empty = "null"
        if is_object:
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
        return {"html": part("log", problems), "wrong": wrong}
    section = plan_section(RunRecord(plan=plan))
    return {"html": part("plan", *_summary(plan), section.html), "wrong": []}


def _summary(plan: dict[str, Any]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Whether the run fits, the tone of that, and the numbers with their notes."""
    memory, length = mapping(plan.get("memory")), mapping(plan.get("length"))
    cards = []
    peak, budget = finite(memory.get("peak_bytes")), finite(memory.get("budget_bytes"))
    if peak is not None:
        cards.append(("Memory", gib(peak), f"of {gib(budget)}" if budget else ""))
    steps = finite(length.get("total_steps"))
    if steps is not None:
        known = LengthPlan.model_validate(length)
        epochs = epochs_in_words(known.epochs, known.epochs_reached)
        cards.append(("Steps", f"{steps:,.0f}", epochs))
    times = length.get("expected_seconds")
    if isinstance(times, list) and len(times) == 2:
        cards.append(("Time", duration_range(*times), "estimate"))
    target, fits = str(plan.get("target") or ""), memory.get("fits")
    if not isinstance(fits, bool):
        return f"Whether it fits {target} is unknown.", "note", cards
    return f"{'Fits' if fits else 'Does not fit'} {target}.", "good" if fits else "error", cards


def rows_html(manifest: Path) -> str:
    """The output of `expert dataset check`: counts, columns, three rows in full."""
    words = ["dataset", "check", "--manifest", str(manifest), "--rows", "3"]
    _, out, errors = run_command(words)
    return part("log", output_lines(out + errors))


def run_command(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a short `expert` command: exit code, output, errors."""
    command = [sys.executable, "-m", "expert", *words]
    with _turns:
        out, errors, code = run_program(command, seconds=SECONDS, env=environment())
    if code is None:
        raise ActionRefused(f"expert {words[0]} took more than {SECONDS:.0f} s")
    return code, out, errors


# --- a new expert --------------------------------------------------------------------------------


async def save_upload(parts: AsyncIterator[bytes], root: Path, name: str) -> Path:
    """Write an uploaded file to a new folder below the board's; ActionRefused if it is too large or
    stalls."""
    folder = state_folder(root) / f"rows-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    file = folder / (re.sub(r"[^\w.-]+", "-", name).strip(".-")[-80:] or "rows.jsonl")
    seen = 0
    try:
        with open(open_plain(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            while True:
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        chunk = await anext(parts, None)
                except TimeoutError:
                    raise ActionRefused("the upload stalled") from None
                if chunk is None:
                    return file
                seen += len(chunk)
                if seen > MAX_BYTES:
                    raise ActionRefused(f"more than {gib(MAX_BYTES)}: use expert new --from FILE")
                await asyncio.to_thread(stream.write, chunk)
    except BaseException:
        remove_upload(file)
        raise


def remove_upload(file: Path) -> None:
    shutil.rmtree(file.parent, ignore_errors=True)


def make_expert(rows: Path, root: Path, name: str, model: str) -> Path:
    """Run `expert new`; returns the manifest, or raises ActionRefused with its error message."""
    if not _NAME.fullmatch(name) or not _MODEL.fullmatch(model) or ".." in model:
        raise ActionRefused("name: letters, digits, dots and dashes; model: a name or a hub id")
    words = ["new", name, "--from", str(rows), "--model", model, "--output", str(root)]
    code, out, errors = run_command(words)
    manifest = root / name / "manifest.json"
    if code != 0 or not manifest.is_file():
        raise ActionRefused("\n".join(output_lines(errors or out)[:30]))
    return manifest
