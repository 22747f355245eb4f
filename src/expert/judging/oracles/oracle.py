"""What all oracles share: each judges one answer by one case.

Each file here has a function `judge(case, answer, how)`; `oracle_for` finds it by domain. It may
raise NoOracle, and DoesNotParse for the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from expert.core.errors import ExpertError
from expert.core.install import pip_install
from expert.judging.answers import DoesNotParse, unfenced
from expert.judging.cases import Case
from expert.judging.domain import JUDGES


class NoOracle(Exception):
    """This case cannot be decided; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on an answer."""

    passed: bool | None
    """None: there is no oracle for it. That never counts as a pass."""
    reason: str
    """Why it failed; "" if it passed without a comment."""
    kind: str
    """What decided: "equal", "rows", "state", "parse", "run", "schema", "types", "calls", "judge",
    "none", …; "open": open text, which is not judged."""
    score: float | None = None
    """Of a judge command."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    strict: bool = False
    """A Markdown fence around the answer counts as part of it."""
    seconds: float = 2.0
    """For one query on the few rows of a case, or one schema on one answer."""
    begin: Callable[[], None] = lambda: None
    """Called when the case has been understood and the answer comes next: if judging is then
    stopped for taking too long, the answer is to blame."""

    def inside(self, answer: str) -> str:
        """The part of the answer that is judged."""
        return answer if self.strict else unfenced(answer)


Oracle = Callable[[Case, str, JudgeOptions], Judgement]


def oracle_for(domain: str) -> Oracle:
    """The oracle of a domain; ExpertError if there is none."""
    if domain not in JUDGES:
        raise ExpertError(f"--domain {domain}: is not known  (known: {', '.join(JUDGES)})")
    kind = JUDGES[domain]
    module = importlib.import_module(f"expert.judging.oracles.{kind.file}")
    judge: Oracle = getattr(module, kind.function)

    def judged(case: Case, answer: str, how: JudgeOptions) -> Judgement:
        try:
            return judge(case, answer, how)
        except NoOracle as fault:
            return unknown(str(fault))
        except DoesNotParse as fault:
            return wrong("parse", str(fault))

    return judged


@contextmanager
def expected_part(what: str) -> Iterator[None]:
    """Where an expected answer is parsed: if it does not parse, the case has no oracle."""
    try:
        yield
    except DoesNotParse as fault:
        raise NoOracle(f"{what}{fault}") from None


def missing_packages(domain: str) -> list[str]:
    """Packages that the oracle of a domain needs and that are not installed."""
    needs = JUDGES[domain].packages if domain in JUDGES else ()
    return [name for name in needs if importlib.util.find_spec(name) is None]


def import_optional(package: str) -> Any:
    """An optional package, or NoOracle with the install command."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0].replace("_", "-")
        raise NoOracle(f"'{name}' is not installed  ({pip_install('validate')})") from None


def right(kind: str) -> Judgement:
    return Judgement(passed=True, reason="", kind=kind)


def wrong(kind: str, reason: str) -> Judgement:
    return Judgement(passed=False, reason=reason, kind=kind)


def unknown(reason: str) -> Judgement:
    return Judgement(passed=None, reason=f"no oracle: {reason}", kind="none")
