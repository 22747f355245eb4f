"""Cases to judge by: what is asked, what is expected, and what the check needs besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert.core.errors import ExpertError
from expert.core.files import read_json

VERSION = 1
OWN_KEYS = frozenset({"id", "task", "expected", "check", "domain"})
"""Keys of a case that are not part of what is asked."""
SHOWN_PROBLEMS = 5


class CasesError(ExpertError):
    """A file of cases that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question with its answer."""

    id: str
    turns: tuple[tuple[str, str], ...]
    """(role, text) up to the answer; the last is the user's, or what a tool gave back."""
    expected: str
    task: str = ""
    domain: str = ""
    """Of this case alone; "": that of the whole set."""
    check: Mapping[str, Any] = field(default_factory=dict)
    row: str = ""
    """The row it is of, whose other answers are cases too; "": it is one by itself."""
    turn: int = 0
    """Which turn of the row the expected answer is, from 1; 0: unknown."""

    @property
    def prompt(self) -> str:
        """What was said last: the user's words, or what a tool gave back."""
        return self.turns[-1][1] if self.turns else ""


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """A test_cases.json as it was read: rows such as training takes, with what judges them."""

    domain: str
    cases: tuple[Mapping[str, Any], ...]


def is_case_file(path: Path) -> bool:
    """Whether a file holds cases rather than rows: a .json file with an object that lists them."""
    if path.suffix.lower() != ".json":
        return False
    try:
        found = read_json(path)
    except (OSError, ValueError, RecursionError):
        return False  # reading it as rows will say what is wrong
    return isinstance(found, dict) and isinstance(found.get("cases"), list)


def read_case_file(path: Path) -> CaseFile:
    """The cases of a test_cases.json; CasesError names what is wrong with it."""
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
    problems = _problems(cases)
    if problems:
        raise CasesError("\n".join([f"{path}: {len(problems)} problem(s)", *problems]))
    return CaseFile(domain=str(found.get("domain") or ""), cases=tuple(cases))


def _problems(cases: Any) -> list[str]:
    """What is wrong with a list of cases, each with its place."""
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
        if case.get("id") in ids and case.get("id") is not None:
            found.append(f"{where}.id: {case['id']!r} was there before")
        ids.add(case.get("id"))
    return found[:SHOWN_PROBLEMS]
