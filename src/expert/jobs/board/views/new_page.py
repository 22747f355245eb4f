"""The page that creates an expert from an uploaded data file, with `expert new`."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from expert.core.links import open_plain, refuse_links
from expert.core.text import gib
from expert.insight.page.markup import tag
from expert.jobs.board.actions import FOLDER, ActionRefused
from expert.jobs.board.views.job_pages import output_lines
from expert.jobs.board.views.layout import page, title_row
from expert.jobs.board.views.manifest_page import run_command

MAX_BYTES = 2 * 2**30
IDLE_SECONDS = 20.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_MODEL = re.compile(r"[A-Za-z0-9][\w./-]{0,120}")


def new_page(roots: Sequence[Path]) -> str:
    """The form; the script uploads the file."""
    places = [tag("option", root.name or str(root), value=str(place))
              for place, root in enumerate(roots)]  # fmt: skip
    where = tag("label", "Folder", tag("select", *places, name="root"))
    form = tag(
        "form",
        tag("label", tag("b", "Drop a data file here"), tag("small", "JSONL, CSV, Parquet, "
            "Excel or text; or click to choose one"), tag("input", type="file", name="file",
            required=""), class_="drop"),
        tag("label", "Name of the expert", tag("input", name="name", required="",
            pattern="[A-Za-z0-9][A-Za-z0-9_.\\-]*", autocomplete="off")),
        tag("label", "Base model", tag("input", name="model", value="tiny", autocomplete="off"),
            tag("small", "a hub id such as Qwen/Qwen3-0.6B, or a model folder; tiny is built in, "
                "for trying things out")),
        where if len(roots) > 1 else None,
        tag("button", "Create the expert", class_="primary"),
        tag("pre", "", id="said", hidden="", role="status"),
        data_upload="/upload/rows", class_="card fields new",
    )  # fmt: skip
    return page("New", title_row("New expert"), form, here="new")


async def save_upload(parts: AsyncIterator[bytes], root: Path, name: str) -> Path:
    """Write an uploaded file to a new folder below the board's; ActionRefused if it is too large or
    stalls."""
    folder = root / FOLDER / f"rows-{secrets.token_hex(6)}"
    refuse_links(folder, below=root)
    folder.mkdir(parents=True)
    file = folder / (re.sub(r"[^\w.-]+", "-", name).strip(".-")[-80:] or "rows.jsonl")
    seen = 0
    try:
        with open(open_plain(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            while True:
                try:
                    async with asyncio.timeout(IDLE_SECONDS):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise ActionRefused("the upload stalled") from None
                if part is None:
                    return file
                seen += len(part)
                if seen > MAX_BYTES:
                    raise ActionRefused(
                        f"uploads are limited to {gib(MAX_BYTES)}; use expert new --from FILE"
                    )
                await asyncio.to_thread(stream.write, part)
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
