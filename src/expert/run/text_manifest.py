"""The manifest of the character GPT for a text given without a manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from expert.core.errors import ExpertError, ManifestError
from expert.manifest.reader import ReadManifest, interpret_document
from expert.manifest.schema.manifest import CHAR_GPT
from expert.manifest.text.document import parse_document, read_document
from expert.manifest.text.item import Item


def character_manifest(dataset: str, overrides: Sequence[str] = ()) -> ReadManifest:
    """The manifest of the character GPT for a text given without one."""
    text = {"name": f"char-{Path(dataset).stem}", "base_model": {"name": CHAR_GPT}}
    document = parse_document(json.dumps(text), "json", source=f"--dataset {dataset}")
    return interpret_document(document, overrides=overrides)


class NotACharacterConfig(ExpertError):
    """A file that is not about the character GPT; the message says why."""


def configured_manifest(file: Path, dataset: str, overrides: Sequence[str] = ()) -> ReadManifest:
    """The manifest of the character GPT for a text, with the settings of a file."""
    try:
        document = read_document(file)
    except ManifestError as error:  # a file of that name without settings
        raise NotACharacterConfig(error.problems[0].what) from None
    top = document.root.fields()
    if not isinstance(top.get("training", Item(None)).value, dict):
        raise NotACharacterConfig("it has no section 'training'")
    # The dataset decides the model; the one of the command replaces it later.
    own = document.root.get("training", "dataset") or top.get("dataset")
    if own is None:
        top["dataset"] = Item(dataset, "dataset")
    top.setdefault("name", Item(f"char-{Path(dataset).stem}", "name"))
    read = interpret_document(document, overrides=overrides)
    names = [spec.name for spec in read.manifest.base_models]
    if names != [CHAR_GPT]:
        raise NotACharacterConfig(f"it trains {', '.join(names)}")
    return replace(read, source=f"--dataset {dataset}")
