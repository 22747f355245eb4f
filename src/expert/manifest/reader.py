"""Reads a manifest: parse, migrate to the 2.0 layout, apply --set, validate, check rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from expert.core.errors import ManifestError, Problem
from expert.core.secrets import remember_secrets
from expert.manifest.check.problems import schema_problems, unknown_keys
from expert.manifest.check.rules import RULES, Findings
from expert.manifest.migrate.aliases import CONFIG
from expert.manifest.migrate.layout import complete_layout, migrate
from expert.manifest.migrate.overrides import apply_overrides
from expert.manifest.migrate.values import convert_values
from expert.manifest.schema.expectations import allows_null, below, schema
from expert.manifest.schema.manifest import Manifest
from expert.manifest.text.document import Document, read_document
from expert.manifest.text.item import Item, Notice


@dataclass(frozen=True)
class ReadManifest:
    """A manifest, its source, and the notices about it."""

    manifest: Manifest
    source: str
    folder: Path
    notices: tuple[Notice, ...] = ()
    root: Item | None = None
    """The canonical tree with lines and comments."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The notices that are warnings, each with its file and line."""
        warnings = (notice for notice in self.notices if notice.kind == "warning")
        return tuple(f"{self.source}: {each.where}: {each.text}" for each in warnings)

    @property
    def keys_on_command_line(self) -> frozenset[str]:
        """The last part of every key whose value comes from the command line."""
        items = self.root.by_path() if self.root is not None else ()
        return frozenset(path.rpartition(".")[2] for path, item in items if item.from_command_line)


def read_manifest(
    path: str | Path, *, overrides: Sequence[str] = (), strict: bool = False
) -> ReadManifest:
    """Read a JSON or YAML manifest of any known layout; ManifestError lists all its problems."""
    return interpret_document(read_document(Path(path)), overrides=overrides, strict=strict)


def interpret_document(
    document: Document, *, overrides: Sequence[str] = (), strict: bool = False
) -> ReadManifest:
    """Turn a parsed document into a Manifest. The document's tree is rewritten in place."""
    root = document.root
    set_values = dict(text.split("=", 1) for text in overrides if "=" in text)
    remember_secrets([root.plain(), set_values])
    problems = list(document.problems)
    top_level_only = root.get("training") is None
    work = migrate(root, document.folder)
    overridden = apply_overrides(root, overrides)
    complete_layout(work)
    if root.get("name") is None:  # the file's, or the folder's for manifest.* and config.*
        name = Path(document.source).stem
        if name.lower() in {"manifest", "config"}:
            name = document.folder.resolve().name or name
        root.fields()["name"] = Item(name, "name")
    convert_values(work)
    notices = [*work.notices, *overridden.notices]
    problems += [*work.problems, *overridden.problems]
    # Whether the file has settings at its top level.
    moved = [n for n in work.notices if n.kind == "read as" and "." not in n.path]
    flat = any(f"{CONFIG}." in notice.text for notice in moved)
    unknown, kept = unknown_keys(root, strict=strict, flat=flat, top_level_only=top_level_only)
    problems += unknown
    notices += kept
    manifest, violations = _validate(root, {problem.path for problem in problems})
    problems += violations
    findings = Findings(root)
    if manifest is not None:
        for rule in RULES:
            rule(manifest, findings)
    problems += [problem for problem in findings.problems if not _caused_by(problem, problems)]
    if "no rows" in work.seen:  # already reported
        problems = [p for p in problems if p.path not in ("training", "training.dataset")]
    if problems or manifest is None:
        problems.sort(key=lambda problem: problem.line or 0)
        raise ManifestError(document.source, problems, [str(notice) for notice in kept])
    notices = list(dict.fromkeys([*notices, *findings.notices]))
    notices.sort(key=lambda notice: notice.line or 0)
    return ReadManifest(manifest, document.source, document.folder, tuple(notices), root)


def _caused_by(rule: Problem, problems: Sequence[Problem]) -> bool:
    """Whether a rule is about a key that is itself wrong: the rule only saw its default."""
    for problem in problems:
        key = problem.path.rpartition(".")[2]
        inside = problem.path.startswith((f"{rule.path}.", f"{rule.path}["))
        if problem.path == rule.path or inside or (key and key in rule.what.split()):
            return True
    return False


def _data(item: Item, node: Mapping[str, Any] | None) -> Any:
    """Plain data for the schema, without nulls that mean "not set"."""
    if isinstance(item.value, list):
        return [_data(entry, below(node, i)) for i, entry in enumerate(item.value)]
    if not isinstance(item.value, dict):
        return item.value
    data = {}
    for key, entry in item.value.items():
        inner = below(node, key)
        if entry.value is not None or not inner or allows_null(inner):
            data[key] = _data(entry, inner)
    return data


def _validate(root: Item, reported: set[str]) -> tuple[Manifest | None, list[Problem]]:
    """The manifest and its schema problems; invalid keys are left out so that rules can run."""
    data = _data(root, schema())
    try:
        return Manifest.model_validate(data), []
    except ValidationError as error:
        found = schema_problems(error, root)
        problems = [problem for problem in found.values() if problem.path not in reported]
        for place in found:
            _remove(data, place)
    try:
        return Manifest.model_validate(data), problems
    except ValidationError:
        return None, problems


def _remove(data: Any, place: tuple[str | int, ...]) -> None:
    """Remove the innermost key around an invalid value: for a list entry, the key of the list."""
    holder, key = data, None
    for step in place:
        if isinstance(data, dict) and step in data:
            holder, key = data, step
        elif not (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            return
        data = data[step]
    holder.pop(key, None)
