"""Which domain the answers of an expert belong to, by what its manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NAMES = {
    "json": "json",
    "sql": "sql",
    "cypher": "cypher",
    "neo4j": "cypher",
    "typescript": "typescript",
    "ts": "typescript",
    "tsx": "typescript",
}
WRITTEN = {**NAMES, "text": "text", "open": "open"}
"""What grammar_type may say besides. A tag like format:text is no word on how to judge."""
STRICT = ("parser-strict", "schema-strict")


def domain_of(capabilities: Iterable[str], decoding: Mapping[str, Any]) -> str:
    """By grammar_type or validation of the decoding, else by a tag like language:sql; "" where the
    manifest does not say."""
    grammar = str(decoding.get("grammar_type") or "").lower().partition("-")[0]
    if grammar in WRITTEN:
        return WRITTEN[grammar]
    if decoding.get("validation") == "tsc":
        return "typescript"
    tags = (str(tag).lower().rpartition(":")[2] for tag in capabilities)
    return next((NAMES[tag] for tag in tags if tag in NAMES), "")


def is_strict(decoding: Mapping[str, Any]) -> bool:
    """Whether an answer must stand without the Markdown fence that models like to put around it."""
    return decoding.get("validation") in STRICT
