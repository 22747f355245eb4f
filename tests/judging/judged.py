"""One answer, judged in this process."""

from __future__ import annotations

from typing import Any

from expert.judging.cases import Case
from expert.judging.oracles.oracle import Judgement, JudgeOptions, oracle_for

CALL = '<tool_call>\n{"name": "f", "arguments": {"town": "K\u00f6ln", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def case_of(expected: str, *, prompt: str = "do it", **check: Any) -> Case:
    return Case(id="1", turns=(("user", prompt),), expected=expected, check=check)


def judged(
    domain: str, expected: str, answer: str, *, strict: bool = False, prompt: str = "", **check: Any
) -> Judgement:
    begun: list[bool] = []
    case = case_of(expected, prompt=prompt or "do it", **check)
    how = JudgeOptions(strict=strict, begin=lambda: begun.append(True))
    found = oracle_for(domain)(case, answer, how)
    assert begun or found.passed is None, "an answer was judged before the case was understood"
    return found
