"""Calls that are expected, as the template of the model that is asked writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expert.data.records import Example
    from expert.data.template.templates import Template
    from expert.judging.cases import Case
    from expert.judging.oracles.calls import Marks

_NAME = "zq0called"


def as_written(asked: Sequence[tuple[Case, Example]], template: Template) -> list[Case]:
    """The cases; of those that expect calls, the expected answer is the text that was learnt."""
    if not any(example.turns[-1].extra for _, example in asked):
        return [case for case, _ in asked]
    marks = _marks(template)
    found = []
    for case, example in asked:
        if example.turns[-1].extra:
            check = {**case.check, **({"marks": asdict(marks)} if marks else {})}
            case = replace(case, expected=_written(template, example), check=check)
        found.append(case)
    return found


def _marks(template: Template) -> Marks | None:
    """What the template puts around calls; None where it does not write the shortest row."""
    from expert.data.records import Example, Turn
    from expert.judging.oracles.calls import marks_of

    tool = {"name": _NAME, "description": "x", "parameters": {"type": "object", "properties": {}}}
    call = {"name": _NAME, "arguments": {"x": "y"}}
    # Mistral's template wants an id of nine letters.
    calls = [{"type": "function", "function": call, "id": "call00001"}]
    turns = (Turn("user", "x"), Turn("assistant", "", extra=json.dumps({"tool_calls": calls})))
    tools = json.dumps([{"type": "function", "function": tool}])
    return marks_of(_written(template, Example(turns, tools=tools)), _NAME)


def _written(template: Template, example: Example) -> str:
    """The last answer without its end; "" where the template cannot write it."""
    from expert.data.template.templates import TemplateError

    try:
        *_, answer = (each.text for each in template.segments(example) if each.learn)
    except TemplateError:
        return ""
    return answer.strip().removesuffix(template.stop).strip()
