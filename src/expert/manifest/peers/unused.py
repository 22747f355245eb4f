"""Keys of other trainers without a counterpart here: not used, or refused where leaving them out
would train something else. A key that is empty or false is dropped silently."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expert.core.files import read_text
from expert.manifest.migrate.aliases import (
    CONFIG_ALIASES,
    CONFIG_KEYS,
    LOOSE_DATASET_KEYS,
    SPECIAL_NAMES,
)
from expert.manifest.migrate.migration import Entries, Migration
from expert.manifest.peers.keys import CONVERTED, METADATA_WORDS
from expert.manifest.text.item import shown


@dataclass(frozen=True)
class KeyAnswer:
    """The answer to a key of another trainer."""

    reason: str
    refused: bool = False
    fix: str = ""
    """What to write instead of a refused key."""
    agrees: tuple[Any, ...] = (False,)
    """Values that change nothing; null never does."""


def _answers() -> dict[str, KeyAnswer]:
    answers = {}
    table = re.sub(r"(?m)^#.*\n", "", read_text(Path(__file__).with_name("unused.txt")))
    for entry in re.split(r"\n(?=\S)", table.strip()):
        head, *keys = entry.splitlines()
        head, _, fix = head.partition(" > ")
        before, _, reason = head.partition(": ")
        kind, _, unless = before.partition(" unless ")
        refused = kind == "refused"
        agrees = tuple(json.loads(f"[{unless}]")) if unless else (False,)
        answer = KeyAnswer(reason, refused, fix or "remove it" if refused else "", agrees)
        answers.update(dict.fromkeys(" ".join(keys).split(), answer))
    return answers


ANSWERS = _answers()
FAMILIES = {key[:-1]: ANSWERS.pop(key) for key in [*ANSWERS] if key.endswith("*")}
"""Answers to keys by their prefix."""
_READ_KEYS = {*CONFIG_KEYS, *CONFIG_ALIASES, *SPECIAL_NAMES, *LOOSE_DATASET_KEYS, *CONVERTED}
"""Keys that are read, whatever their prefix."""


def answer_to(key: str) -> KeyAnswer | None:
    """The answer to a key of another trainer; None if it is unknown."""
    if key in ANSWERS or key in _READ_KEYS:
        return ANSWERS.get(key)
    prefixes = [prefix for prefix in FAMILIES if key.startswith(prefix)]
    return FAMILIES[max(prefixes, key=len)] if prefixes else None


def report_unused(work: Migration, zone: Entries, *, keep: str = "") -> None:
    """Remove and report the keys of other trainers in a section, except `keep`."""
    has_metadata = zone is work.root and work.is_expert_manifest
    for key in [key for key in zone if key != keep]:
        answer = None if has_metadata and key in METADATA_WORDS else answer_to(key)
        if answer is None:
            continue
        item = zone.pop(key)
        value = item.plain()
        # In Python 1 == True, so compare types too.
        agrees = any(type(value) is type(known) and value == known for known in answer.agrees)
        if value in (None, "", [], {}) or agrees:
            continue
        if not answer.refused:
            work.unused(item, answer.reason)
            continue
        is_section = isinstance(value, dict | list)
        what = answer.reason if is_section else f"{shown(value)}: {answer.reason}"
        work.problem(item, what, answer.fix)
