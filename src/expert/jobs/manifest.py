"""The jobs of `expert manifest check` and `expert manifest upgrade`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from expert.core.errors import ExpertError, ManifestError
from expert.core.files import write_text_atomically
from expert.manifest.reader import ReadManifest, interpret_document, read_manifest
from expert.manifest.schema.types import AUTO
from expert.manifest.text.document import Document, read_document
from expert.manifest.text.item import Notice
from expert.manifest.text.yaml_text import to_yaml
from expert.run.missing import find_missing


@dataclass(frozen=True)
class CheckedManifest:
    """A manifest that was read, or its problems."""

    source: str
    read: ReadManifest | None
    error: ManifestError | None
    doubts: tuple[Notice, ...] = ()
    """Missing things that it names."""


def check_manifests(
    paths: Sequence[Path], *, overrides: Sequence[str] = (), strict: bool = False
) -> Iterator[CheckedManifest]:
    """Check every file, whatever is wrong with the others."""
    for path in paths:
        try:
            read = read_manifest(path, overrides=overrides, strict=strict)
        except ManifestError as error:
            yield CheckedManifest(str(path), None, error)
        else:
            missing, problems = find_missing(read)
            if problems:
                yield CheckedManifest(str(path), None, ManifestError(str(path), problems))
                continue
            doubts = [Notice("warning", each.path, each.text) for each in missing]
            yield CheckedManifest(str(path), read, None, tuple(doubts))


# Written out so that users see what they can set. Not pretokenized_cache: its null means a folder
# keyed by content.
PERFORMANCE_KEYS = (
    *("bf16", "fp16", "use_tf32", "attention", "torch_compile", "gradient_checkpointing", "optim"),
    *("packing", "micro_batch_size", "eval_batch_size", "fused_loss", "dataloader_num_workers"),
    *("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_pin_memory"),
)
FIRST_KEYS = (
    *("schema_version", "name", "version", "description", "author"),
    *("base_models", "soft_prompts", "training"),
)


def upgrade(document: Document) -> tuple[str, list[Notice]]:
    """The 2.0 text in the format of the file, and notices; ManifestError on a broken file."""
    notices = list(interpret_document(document).notices)
    data = document.root.plain()
    config = data["training"].setdefault("config", {})
    absent = [key for key in PERFORMANCE_KEYS if key not in config]
    config.update(dict.fromkeys(absent, AUTO))
    if absent:
        text = f"written out as auto: {', '.join(absent)}"
        notices.append(Notice("note", "training.config", text))
    data = {**{key: data[key] for key in FIRST_KEYS if key in data}, **data}
    data["base_models"] = [{"name": model["name"], **model} for model in data["base_models"]]
    if document.format == "json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n", notices
    return to_yaml(data), notices


@dataclass(frozen=True)
class Upgraded:
    """Where the 2.0 manifest was written, with the notices of the reader."""

    path: Path
    backup: Path | None
    notices: tuple[Notice, ...]


def upgrade_file(path: Path, *, output: Path | None = None, in_place: bool = False) -> Upgraded:
    """Write the 2.0 manifest next to the old one, to `output`, or in place with a backup."""
    if in_place and output:
        raise ExpertError("--in-place and --output: choose one")
    text, notices = upgrade(read_document(path))
    target = path if in_place else output or path.with_name(f"{path.stem}-2.0{path.suffix}")
    backup = None
    if in_place:
        backup = path.with_name(path.name + ".bak")
        _refuse_overwriting(backup, "remove it")
        shutil.copy2(path, backup)
    else:
        _refuse_overwriting(target, "remove it, or choose another name with --output")
    write_text_atomically(target, text)
    return Upgraded(target, backup, tuple(notices))


def _refuse_overwriting(path: Path, fix: str) -> None:
    if os.path.lexists(path):  # also a dangling link
        raise ExpertError(f"{path} exists  ({fix})")
