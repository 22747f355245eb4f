"""Calls of tools: the answer calls the functions that are expected, with equal arguments.

Every template has a way of its own to write calls. What it puts around them is read off a call that
it wrote itself; a template whose calls are no JSON between two marks has no oracle here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from expert.core.text import counted
from expert.judging.answers import DoesNotParse, short
from expert.judging.cases import Case
from expert.judging.oracles import text
from expert.judging.oracles.json_values import difference, parse
from expert.judging.oracles.oracle import Judgement, JudgeOptions, right, unknown, wrong

CALLS = "calls"
NOT_UNDERSTOOD = (
    "the model's template writes calls in a form that cannot be read  (train with "
    "base_models[0].prompt_template: chatml)"
)
_ARGUMENTS = ("arguments", "parameters")

Call = tuple[str, Any]
"""A function and its arguments."""


class NotACall(Exception):
    """What is marked as a call and is none; the text says why."""


@dataclass(frozen=True, kw_only=True)
class CallMarks:
    """How calls are distinguished from text."""

    opening: str = "<tool_call>"
    """"": an answer that is JSON is a call."""
    closing: str = "</tool_call>"
    """"": a call extends to the next one, or to the end."""
    arguments: str = "arguments"
    """The name of the field with the arguments."""


def judge(case: Case, answer: str, how: JudgeOptions) -> Judgement:
    """`check` of a case: `calls`, those that are expected, and `marks`, what stands around them.
    Without `calls` they are read in the expected answer; one without any is compared as text."""
    marks = CallMarks(**case.check.get("marks") or {})
    given = case.check.get("calls")
    try:
        wanted = _given(given) if given else calls_in(case.expected, marks)
    except (NotACall, DoesNotParse) as fault:
        return unknown(f"the expected answer: {fault}")
    if given and not _writes(wanted, case.expected, marks):
        return unknown(NOT_UNDERSTOOD)
    how.begin()
    try:
        found = calls_in(answer, marks)
    except NotACall as fault:
        return wrong("parse", str(fault))
    if not wanted and not found:
        return text.judge(case, answer, JudgeOptions(strict=how.strict))
    place = _difference(wanted, found)
    return wrong(CALLS, place) if place else right(CALLS)


def calls_in(answer: str, marks: CallMarks) -> list[Call]:
    """The calls in an answer, in their order; NotACall where something is marked and is none. What
    is thought before it, and what is said beside them, is passed over."""
    text = answer.rpartition("</think>")[2].strip()
    if marks.opening:
        _, *parts = text.split(marks.opening)
    else:
        parts = [text] if text.startswith(("{", "[")) else []
    found: list[Call] = []
    for part in parts:
        where = f"call {len(found) + 1}"
        body, closed, _ = part.partition(marks.closing) if marks.closing else (part, "", "")
        if marks.closing and not closed:
            raise NotACall(f"{where}: {marks.closing} is missing")
        try:
            value = parse(body.strip())
        except DoesNotParse as fault:
            raise NotACall(f"{where}: not JSON: {fault}") from None
        for each in value if isinstance(value, list) else [value]:
            found.append(_call(each, marks.arguments, f"call {len(found) + 1}"))
    return found


def marks_of(written: str, name: str) -> CallMarks | None:
    """What a template puts around calls, by an answer of it that is one call of `name` and nothing
    else; None where that is unknown."""
    text = written.rpartition("</think>")[2].strip()
    decoder = json.JSONDecoder()
    for place in (at for at, letter in enumerate(text) if letter in "{["):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue  # a bracket of the marks
        each = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(each, Mapping) or each.get("name") != name:
            return None
        field = next((field for field in _ARGUMENTS if field in each), "")
        if not field:
            return None
        return CallMarks(opening=text[:place].strip(), closing=text[end:].strip(), arguments=field)
    return None


def check_of(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The check of a case that expects these calls."""
    # As text: no number is rounded on its way to the process that judges.
    return {"calls": json.dumps(list(calls), ensure_ascii=False)}


def _writes(calls: Sequence[Call], text: str, marks: CallMarks) -> bool:
    try:
        return not _difference(calls, calls_in(text, marks))
    except NotACall:
        return False


def _given(calls: Any) -> list[Call]:
    """The calls of a check: a list of objects with name and arguments, or that as JSON."""
    value = parse(calls if isinstance(calls, str) else json.dumps(calls))
    return [
        _call(each, "arguments", f"call {number}")
        for number, each in enumerate(value if isinstance(value, list) else [value], 1)
    ]


def _call(value: Any, field: str, where: str) -> Call:
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise NotACall(f"{where}: names no function")
    arguments = value.get(field)
    if isinstance(arguments, str):  # some templates write them as JSON in a text
        try:
            arguments = parse(arguments)
        except DoesNotParse as fault:
            raise NotACall(f"{where}: the {field} of {short(name)} are not JSON: {fault}") from None
    if not isinstance(arguments, Mapping):
        raise NotACall(f"{where}: {short(name)} has no {field}")
    return name, arguments


def _difference(wanted: Sequence[Call], found: Sequence[Call]) -> str:
    """Where calls differ from those that are wanted, in words; "" where they do not."""
    if not found and wanted:
        return f"no call; {wanted[0][0]} should be called"
    if found and not wanted:
        return f"{short(found[0][0])} is called; nothing should be called"
    for number, (one, other) in enumerate(zip(wanted, found, strict=False), 1):
        if one[0] != other[0]:
            return f"call {number}: {short(other[0])} instead of {one[0]}"
        place = difference(one[1], other[1])
        if place is not None:
            return f"call {number} of {one[0]}: {place}"
    if len(wanted) != len(found):
        return f"{counted(len(found), 'call')} instead of {len(wanted)}"
    return ""
