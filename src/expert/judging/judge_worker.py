"""The process that judges answers; it may hang or crash without affecting the caller.

It first drops its permissions (see confinement) and reports those it could not drop, as
`{"open": […]}`. Then it reads one JSON object per line and writes two: `{"begun": true}` when the
case is understood and the answer comes next, then the judgement.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from typing import IO, Any

from expert.judging.cases import Case
from expert.judging.confinement import MEMORY_BYTES, confine, python_folders, restart_cpu_limit
from expert.judging.oracles.oracle import Judgement, JudgeOptions, oracle_for, unknown, wrong

LONGEST_REASON = 2000
FUNCTION = "judge"
"""The name of the user's function that scores an answer."""


def main() -> None:
    """Judge the requests on standard input until it ends."""
    # A library's output on standard output would be read as an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
    _send(answers, {"open": confine(python_folders())})
    for line in sys.stdin:
        restart_cpu_limit()
        found = asdict(_judged(json.loads(line), answers))
        _send(answers, {**found, "reason": found["reason"][:LONGEST_REASON]})


def _judged(asked: dict[str, Any], answers: IO[str]) -> Judgement:
    """The oracle's judgement. A check is any JSON and an answer any text: whatever they break
    affects this case alone, and once the case is understood it is the answer's fault."""
    turns = tuple((role, text) for role, text in asked["case"].pop("turns"))
    case = Case(turns=turns, **asked["case"])
    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True
        _send(answers, {"begun": True})

    try:
        if asked["function"]:
            return _scored(asked["function"], case, asked["answer"])
        how = JudgeOptions(strict=asked["strict"], seconds=asked["seconds"], begin=begin)
        return oracle_for(asked["domain"])(case, asked["answer"], how)
    except MemoryError:
        why = f"needs more than {MEMORY_BYTES / 2**30:g} GiB of memory"
    except Exception as error:  # noqa: BLE001 - as above
        why = f"cannot be judged: {type(error).__name__}: {error}"
    return wrong("run", f"the answer {why}") if begun else unknown(f"the case itself {why}")


def _scored(source: str, case: Case, answer: str) -> Judgement:
    """The score that the user's function gives; what it raises is its own fault."""
    own: dict[str, Any] = {}
    try:
        exec(compile(source, FUNCTION, "exec"), own)
        score = own[FUNCTION](prompt=case.prompt, expected=case.expected, answer=answer)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            return unknown(f"{FUNCTION}() returned {score!r:.60}, expected a score from 0 to 1")
    except Exception as error:  # noqa: BLE001 - as above
        return unknown(f"{FUNCTION}() failed: {type(error).__name__}: {error}")
    return Judgement(passed=None, reason=f"score {score:g}", kind="none", score=float(score))


def _send(answers: IO[str], fact: dict[str, Any]) -> None:
    answers.write(json.dumps(fact) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
