"""The job behind `expert verify`: compares every file below a folder with its stored hash."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expert.core.errors import ExpertError
from expert.core.events import is_as_written
from expert.core.files import open_regular
from expert.core.hashed import SUFFIX, file_integrity, hash_file
from expert.core.publish import DONE, faults
from expert.core.rundir import checkpoint_step

State = Literal["whole", "damaged", "no hash"]
_TOKENS = re.compile(r"tokens-[0-9a-f]{16}")
_SET_ASIDE = re.compile(r"\.(tmp|bad|old)-.+|.+\.bad(-\d+)?")
_RUN_FILES = re.compile(r"(plan|manifest|environment|validation|vocabulary)\.json|index-.+\.arrow")
_MADE_AGAIN = "the next run puts it aside and makes it again"


@dataclass(frozen=True, kw_only=True)
class VerifiedPlace:
    """A published folder or a single file, and what is wrong with it."""

    path: Path
    state: State
    faults: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Everything found below a folder."""

    folder: Path
    checked: tuple[VerifiedPlace, ...]

    def of(self, state: State) -> list[VerifiedPlace]:
        return [each for each in self.checked if each.state == state]


def verify(folder: Path) -> Verified:
    """Hash every file that Expert wrote below a folder: runs, checkpoints, finished and exported
    experts, prepared caches. Nothing is changed."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "there is no such folder"
        raise ExpertError(f"{folder}: {what}  (name a run, a checkpoint, an export or a cache)")
    checked = tuple(_below(folder))
    if not checked:
        what = f"nothing in it has a hash: no {DONE}, no file of a run or of a cache"
        fix = "name a run, a checkpoint, final/, an exported folder or a prepared cache"
        raise ExpertError(f"{folder}: {what}  ({fix})")
    return Verified(folder=folder, checked=checked)


def _below(folder: Path) -> Iterator[VerifiedPlace]:
    for here, inner, files in os.walk(folder):
        place = Path(here)
        if DONE in files or (_is_published(place) and (inner or files)):
            inner.clear()
            yield _published(place)
            continue
        inner[:] = sorted(name for name in inner if not _SET_ASIDE.fullmatch(name))
        hashed = {name for name in files if hash_file(place / name).is_file()}
        of_run = "events.jsonl" in files or "plan.json" in files or ".plan.json.sha256" in files
        of_cache = any(_is_tokens(name) for name in inner)
        own = {name for name in files if (of_run or of_cache) and _RUN_FILES.fullmatch(name)}
        gone = {name[1 : -len(SUFFIX)] for name in files if re.fullmatch(rf"\..+{SUFFIX}", name)}
        gone -= {name.lstrip(".") for name in files}
        for name in sorted(hashed | own | gone):
            yield _file(place / name)
        if of_run and (place / "events.jsonl").is_file():  # neither a pipe nor a device
            yield _events(place / "events.jsonl")


def _is_tokens(name: str) -> bool:
    return _TOKENS.fullmatch(name) is not None


def _is_published(place: Path) -> bool:
    """Whether its name is that of a folder which is complete only with DONE."""
    beside = (place.parent / "plan.json", place.parent / "events.jsonl")
    is_final = place.name == "final" and any(file.is_file() for file in beside)
    return is_final or checkpoint_step(place.name) is not None or _is_tokens(place.name)


def _published(place: Path) -> VerifiedPlace:
    tokens = _is_tokens(place.name) or (place / "recipe.json").is_file()
    found = faults(place, more_files=tokens)  # other tools keep files next to tokens
    advice = "remove files that do not belong there, or export, download or train it again"
    if tokens:
        advice = _MADE_AGAIN
    elif checkpoint_step(place.name) is not None:
        advice = "--resume puts it aside and takes the one before"
    elif place.name == "final":
        advice = "take a checkpoint with --checkpoint, or train again"
    return _checked(place, found, advice)


def _file(path: Path) -> VerifiedPlace:
    state = file_integrity(path)
    if state == "unknown":
        return VerifiedPlace(path=path, state="no hash")
    said = {"missing": ["it is missing"], "damaged": ["it changed after it was written"]}
    derived = path.suffix != ".json" or path.name.startswith(".")
    advice = f"remove {hash_file(path).name} if you changed it yourself"
    return _checked(path, said.get(state, []), _MADE_AGAIN if derived else advice)


def _events(path: Path) -> VerifiedPlace:
    """Events have no hash, as they grow; but each line ends with its checksum. A kill may truncate
    the last one."""
    with open_regular(path) as stream:
        lines = [(number, line) for number, line in enumerate(stream, 1) if not is_as_written(line)]
    if lines and not lines[-1][1].endswith(b"\n"):
        lines.pop()
    wrong = [f"line {number} does not match its checksum" for number, _ in lines]
    return _checked(path, wrong, "reports and watch leave such lines out")


def _checked(path: Path, found: list[str], advice: str) -> VerifiedPlace:
    if not found:
        return VerifiedPlace(path=path, state="whole")
    return VerifiedPlace(path=path, state="damaged", faults=tuple(found), advice=advice)
