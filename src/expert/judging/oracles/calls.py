"""Tool calls: the answer calls the expected functions with equal arguments.

Every template writes calls in its own way. The marks around them are read off a call that the
template rendered; a template whose calls are not JSON between two marks has no oracle here.
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
from expert.judging.oracles.oracle import (
    Judgement,
    JudgeOptions,
    expected_part,
    right,
    unknown,
    wrong,
)

CALLS = "calls"
UNREADABLE_CALLS = (
    "the model's template writes calls in a form that cannot be read  (train with "
    "base_models[0].prompt_template: chatml)"
)
_ARGUMENTS = ("arguments", "parameters")

Call = tuple[str, Any]
"""A function and its arguments."""


class NotACall(DoesNotParse):
    """Text marked as a call that is not one; the message says why."""


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
    """`check` of a case: `calls`, the expected ones, and `marks`, the text around them. Without
    `calls` they are read from the expected answer; if it has none, answers are compared as text."""
    marks = CallMarks(**case.check.get("marks") or {})
    given = case.check.get("calls")
    with expected_part("the expected answer: "):
        if not given:
            wanted = calls_in(case.expected, marks)
        else:  # a list of objects with name and arguments, or the same as JSON text
            value = parse(given if isinstance(given, str) else json.dumps(given))
            every = enumerate(value if isinstance(value, list) else [value], 1)
            wanted = [_call(each, "arguments", f"call {number}") for number, each in every]
    if given:
        try:
            readable = not _difference(wanted, calls_in(case.expected, marks))
        except NotACall:
            readable = False
        if not readable:
            return unknown(UNREADABLE_CALLS)
    how.begin()
    found = calls_in(answer, marks)
    if not wanted and not found:
        return text.judge(case, answer, JudgeOptions(strict=how.strict))
    place = _difference(wanted, found)
    return wrong(CALLS, place) if place else right(CALLS)


def calls_in(answer: str, marks: CallMarks) -> list[Call]:
    """The calls in an answer, in order; NotACall for a marked one that is invalid. Thinking before
    them and text around them are ignored."""
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
    """The marks a template puts around calls, read from an answer that consists of one call of
    `name`; None if they cannot be determined."""
    text = written.rpartition("</think>")[2].strip()
    decoder = json.JSONDecoder()
    for place in (at for at, letter in enumerate(text) if letter in "{["):
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue  # a bracket that belongs to the marks
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
    # As text, so that no number is rounded on the way to the judging process.
    return {"calls": json.dumps(list(calls), ensure_ascii=False)}


def _call(value: Any, field: str, where: str) -> Call:
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise NotACall(f"{where}: names no function")
    arguments = value.get(field)
    if isinstance(arguments, str):  # some templates write them as JSON inside a string
        try:
            arguments = parse(arguments)
        except DoesNotParse as fault:
            raise NotACall(f"{where}: the {field} of {short(name)} are not JSON: {fault}") from None
    if not isinstance(arguments, Mapping):
        raise NotACall(f"{where}: {short(name)} has no {field}")
    return name, arguments


def _difference(wanted: Sequence[Call], found: Sequence[Call]) -> str:
    """How the calls differ from the expected ones, in words; "" if they do not."""
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
