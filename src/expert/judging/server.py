"""The process in which answers are judged: it may hang or fall, and takes nobody with it.

One JSON object a line in, two out: `{"begun": true}` when the case is understood and the answer
comes next, then the judgement.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from expert.judging.cases import Case
from expert.judging.oracle import Oracle, oracle_for

MEMORY_BYTES = 8 * 2**30
"""Of addresses; the graph database reserves some of them for nothing."""


def main() -> None:
    """Judge what comes on standard input until it ends."""
    # What a library writes to standard output would be read as an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
    limit()
    oracles: dict[tuple[str, bool], Oracle] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        key = (asked["domain"], bool(asked["strict"]))
        oracles[key] = oracles.get(key) or oracle_for(key[0], strict=key[1])
        _answer(oracles[key], asked, answers)


def _answer(oracle: Oracle, asked: dict[str, Any], answers: IO[str]) -> None:
    def tell(fact: dict[str, Any]) -> None:
        answers.write(json.dumps(fact) + "\n")
        answers.flush()

    turns = tuple((role, text) for role, text in asked["case"].pop("turns"))
    case = Case(turns=turns, **asked["case"])
    tell(asdict(oracle.judge(case, asked["answer"], lambda: tell({"begun": True}))))


def limit() -> None:
    """Less memory than the machine has, no file written, no core left behind; where a system knows
    such limits."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        for kind, most in (
            (resource.RLIMIT_AS, MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(kind)
            allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (allowed, hard))


if __name__ == "__main__":
    main()
