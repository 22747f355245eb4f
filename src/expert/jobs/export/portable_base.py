"""How other machines find the base of an export; never a local path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from expert.core.text import visible
from expert.model.base_folder import base_reference, built_in_folder
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import basename, is_hub_id
from expert.planning.run_plan import ModelPlan

BASE_COPY = "base"
"""Folder in an export with a copy of a base that is not on the hub."""


class PortableBase(NamedTuple):
    """How code and people on other machines find a base."""

    name: str
    """For people: a hub id, or the name of the folder."""
    hub_id: str | None = None
    """None: not on the hub, or unknown."""
    line: str = ""
    """A line of Python that sets `base`."""
    note: str = ""
    """A remark for the model card."""
    arguments: str = "base"
    """Arguments for from_pretrained."""


def portable_base(model: ModelPlan) -> PortableBase:
    """How to get the base of a run."""
    is_id = model.place != "folder" and is_hub_id(model.name)
    short = model.name if is_id else basename(model.name)
    # Written into a line of code, as a comment.
    name = visible(" ".join(short.replace("`", "'").split()), keep="")
    if model.place == "built-in":
        line = f'base = f"{{folder}}/{BASE_COPY}"  # {name} comes with Expert; this is a copy'
        note = f"The base, `{name}`, comes with Expert, not from the Hub; `{BASE_COPY}/` is a copy."
        return PortableBase(name, line=line, note=note)
    hub_id, revision = hub_reference(model)
    if hub_id is not None:
        pinned = f"base, revision={json.dumps(revision)}" if revision else "base"
        return PortableBase(hub_id, hub_id, f"base = {json.dumps(hub_id)}", arguments=pinned)
    note = (
        f"The base, `{name}`, was a folder whose origin the run does not know. Replace "
        "`PATH/TO/THE/BASE` with that folder; other weights give different answers."
    )
    return PortableBase(name, line=f'base = "PATH/TO/THE/BASE"  # {name}', note=note)


def hub_reference(model: ModelPlan) -> tuple[str | None, str | None]:
    """The hub id of a base and its pinned commit; None if unknown."""
    if model.place in ("hub", "hf cache"):
        return base_reference(model)
    if model.place != "models folder":
        return None, None
    if is_hub_id(model.name):
        return model.name, model.revision
    known = find_known_model(model.name)  # also matches variants of the same shape
    exact = known is not None and basename(known.hub_id).lower() == basename(model.name).lower()
    return (known.hub_id if known is not None and exact else None), None


def copy_base(model: ModelPlan, target: Path) -> None:
    """Copy a built-in base into the export of its adapter."""
    source = built_in_folder(model.name)
    if model.place != "built-in" or source is None:
        return
    place = target / BASE_COPY
    place.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, place / path.name)
