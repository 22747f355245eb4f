"""Test cases: the prompt, the expected answer, and what its check needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_json
from expert.core.text import counted

VERSION = 1
OWN_KEYS = frozenset({"id", "task", "expected", "check", "domain"})
"""Keys of a case that are not part of the prompt."""
SHOWN_PROBLEMS = 5


class CasesError(ExpertError):
    """A file of cases that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt with its expected answer."""

    id: str
    turns: tuple[tuple[str, str], ...]
    """(role, text) up to the answer; the last turn is the user's or a tool result."""
    expected: str
    task: str = ""
    domain: str = ""
    """For this case alone; "": the domain of the whole set."""
    check: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    """The row it comes from, whose other answers are cases too; "": a row of its own."""
    turn: int = 0
    """Which turn of the row holds the expected answer, counted from 1; 0: unknown."""

    @property
    def prompt(self) -> str:
        """The last turn: the user's message or a tool result."""
        return self.turns[-1][1] if self.turns else ""


def is_case_file(path: Path) -> bool:
    """Whether a file holds cases rather than rows: a .json object with a list of cases."""
    if path.suffix.lower() != ".json":
        return False
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return False  # reading it as rows will report the error
    return isinstance(found, dict) and isinstance(found.get("cases"), list)


def read_case_file(path: Path) -> tuple[str, list[Mapping[str, Any]]]:
    """The domain of a test_cases.json, and its cases: rows in the training format, with what judges
    them. CasesError lists what is wrong with it."""
    try:
        found = read_json(path)
    except OSError as error:
        raise CasesError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CasesError(f"{path}: is not JSON: {error}") from None
    version = found.get("version", VERSION) if isinstance(found, dict) else None
    if version != VERSION:
        raise CasesError(f"{path}: version {version!r} is not known  (write version: {VERSION})")
    cases = found.get("cases")
    if problems := _problems(cases):
        lines = [f"{path}: {counted(len(problems), 'problem')}", *problems[:SHOWN_PROBLEMS]]
        raise CasesError("\n".join(lines))
    return str(found.get("domain") or ""), cases


def _problems(cases: Any) -> list[str]:
    """What is wrong with a list of cases, each with its location."""
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        return ["  - cases: is not a list of cases  (write at least one)"]
    found, ids = [], set()
    for number, case in enumerate(cases):
        where = f"  - cases[{number}]"
        if not isinstance(case, Mapping):
            found.append(f"{where}: is not an object")
            continue
        if case.get("expected") is None:
            found.append(f"{where}: has no expected answer")
        if not set(case) - OWN_KEYS:
            found.append(f"{where}: asks nothing  (write instruction, and input where needed)")
        if not isinstance(case.get("check") or {}, Mapping):
            found.append(f"{where}.check: is not an object")
        name = repr(case.get("id"))  # any JSON value, hashable or not
        if name in ids and name != "None":
            found.append(f"{where}.id: {name} is used by another case")
        ids.add(name)
    return found
