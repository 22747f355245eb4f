"""The job behind `expert find-datasets --consolidate`: copies what manifests name to one place."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expert.core.files import sha256_of
from expert.data.records import DataError
from expert.jobs.datasets.find import DatasetUser
from expert.manifest.migrate.aliases import CORPORA
from expert.planning.plan import folder_name
from expert.planning.survey import local_path, looks_local


@dataclass(frozen=True)
class Copy:
    """A file that was copied, or that already existed with the same content."""

    source: str
    target: str
    size: int
    sha256: str
    done: Literal["copied", "there already"]


@dataclass
class ConsolidatedExpert:
    """What `--consolidate` did for one expert, and the options that use the copies."""

    expert: str
    manifest: str
    copies: list[Copy] = field(default_factory=list)
    set_options: str = ""
    left: list[str] = field(default_factory=list)
    """What was not copied, and why."""


def consolidate(users: Sequence[DatasetUser], destination: Path) -> list[ConsolidatedExpert]:
    """Copy the local data of every manifest into DEST/<expert>/; raises before copying if anything
    conflicts."""
    destination = destination.resolve()
    plans: list[tuple[ConsolidatedExpert, dict[Path, Path]]] = []
    for user in users:
        done = ConsolidatedExpert(user.name, user.source)
        files: dict[Path, Path] = {}
        options = []
        for key, value in user.paths.items():
            found = local_path(value, user.folder)
            if value in CORPORA:
                done.left.append(f"{key}: {value} is a built-in corpus, not a file")
            elif not found.exists():
                why = "is not there"
                if not looks_local(value, user.folder):
                    why = "is in the hub's cache, which HF_HOME moves as a whole"
                done.left.append(f"{key}: {value} {why}")
            else:
                # Below the manifest's folder, a/train.jsonl and b/train.jsonl stay apart.
                own, home = found.resolve(), user.folder.resolve()
                inside = own != home and own.is_relative_to(home)
                within = own.relative_to(home) if inside else Path(own.name)
                target = destination / folder_name(user.name) / within
                every = [found] if found.is_file() else sorted(found.rglob("*"))
                files |= {target / p.relative_to(found): p for p in every if p.is_file()}
                options.append(f"{key}={target}{''.join(value.partition('::')[1:])}")
        done.set_options = " ".join(f"--set {shlex.quote(option)}" for option in options)
        plans.append((done, files))
    digests = _refuse_conflicts(plans, destination)
    for done, files in plans:
        done.copies = [_copy(file, target, digests[target]) for target, file in files.items()]
    return [done for done, _ in plans]


def _refuse_conflicts(
    plans: Sequence[tuple[ConsolidatedExpert, dict[Path, Path]]], destination: Path
) -> dict[Path, str]:
    """The digest of every file by its target; DataError if one differs from what is there."""
    wanted: dict[Path, str] = {}
    problems = []
    for target, source in (pair for _, files in plans for pair in files.items()):
        digest = sha256_of(source)
        if wanted.setdefault(target, digest) != digest:
            problems.append(f"{target}: two manifests name different files for it: {source}")
        elif target.exists() and (not target.is_file() or sha256_of(target) != digest):
            problems.append(f"{target}: exists and differs from {source}")
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise DataError(
            f"{destination}: nothing was copied, no file is ever overwritten\n{shown}\n"
            "  (remove what is old, or name another folder with --consolidate)"
        )
    return wanted


def _copy(source: Path, target: Path, digest: str) -> Copy:
    """Copy under a temporary name, verify the copy, and only then rename it."""
    if target.exists():
        return Copy(str(source), str(target), target.stat().st_size, digest, "there already")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copy2(source, temporary)
        if sha256_of(temporary) != digest:
            raise DataError(
                f"{target}: the copy differs from {source}  (the file changed meanwhile, or the "
                "disk is faulty: copy again)"
            )
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return Copy(str(source), str(target), target.stat().st_size, digest, "copied")
