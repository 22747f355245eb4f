"""Who says whether an answer is right, for each domain."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.judging.cases import Case

Begin = Callable[[], None]
"""Called when the case itself is understood and the answer comes next: who ends the judging there
for taking too long knows whose fault it is."""


class UnknownDomain(ExpertError):
    """A domain that nobody here can judge."""


class NoOracle(Exception):
    """There is nothing that tells right from wrong in this case; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of an answer."""

    passed: bool | None
    """None: there is no oracle for it. That never counts as a pass."""
    reason: str
    """Why not; "" where it passed without more to say."""
    kind: str
    """What told: "equal", "rows", "state", "parse", "run", "schema", "types", "calls", "judge",
    "none", …; "open": nothing can, nor has to."""


class Oracle(Protocol):
    """Judges the answers of one domain."""

    def judge(self, case: Case, answer: str, begin: Begin) -> Judgement: ...


_HOMES = {
    "json": ("expert.judging.oracles.json_values", "JsonOracle"),
    "sql": ("expert.judging.oracles.sql", "SqlOracle"),
    "cypher": ("expert.judging.oracles.cypher", "CypherOracle"),
    "typescript": ("expert.judging.oracles.typescript", "TypeScriptOracle"),
    "calls": ("expert.judging.oracles.calls", "CallsOracle"),
    "text": ("expert.judging.oracles.text", "TextOracle"),
    "open": ("expert.judging.oracles.open_text", "OpenOracle"),
}
DOMAINS = tuple(_HOMES)
PACKAGES = {
    "sql": ("sqlglot",),
    "cypher": ("antlr4_cypher", "ladybug"),
    "typescript": ("tree_sitter", "tree_sitter_typescript"),
}


def oracle_for(name: str, *, strict: bool = False) -> Oracle:
    """The oracle of a domain; `strict` takes an answer inside a Markdown fence as it stands."""
    if name not in _HOMES:
        raise UnknownDomain(f"--domain {name}: is not known  (known: {', '.join(DOMAINS)})")
    home, title = _HOMES[name]
    return cast(Oracle, getattr(importlib.import_module(home), title)(strict=strict))


def missing_packages(domain: str) -> list[str]:
    """Packages that the oracle of a domain needs and that are not installed."""
    return [name for name in PACKAGES.get(domain, ()) if importlib.util.find_spec(name) is None]


def needed(package: str) -> Any:
    """An optional package, or NoOracle that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0].replace("_", "-")
        raise NoOracle(f"'{name}' is not installed  ({pip_install('validate')})") from None


def right(kind: str, reason: str = "") -> Judgement:
    return Judgement(passed=True, reason=reason, kind=kind)


def wrong(kind: str, reason: str) -> Judgement:
    return Judgement(passed=False, reason=reason, kind=kind)


def unknown(reason: str) -> Judgement:
    return Judgement(passed=None, reason=f"no oracle: {reason}", kind="none")
