"""Rows of many shapes, understood as one: what is said in a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from expert.data.columns import PREFERENCE, TOOL_COLUMNS, Columns, Kind, columns_found
from expert.data.marked_text import UnfitRow, marked_turns
from expert.data.messages import conversation, is_messages, kind_of, known_role, turns_in
from expert.data.records import BadRow, Example, Role, Row, Turn
from expert.data.tools import tools_of

METADATA_OF_A_TASK = frozenset({"instruction", "error_type"})
RAW_CHARACTERS = 500
_CHANGE_WHAT_IS_SAID: dict[Kind, tuple[str, ...]] = {
    "messages": TOOL_COLUMNS,
    "instruction": ("history",),
}


def example_of(row: Row, columns: Columns) -> Example | BadRow:
    """The example in a row, or why there is none."""
    try:
        _refuse_what_the_first_row_had_not(row.values, columns)
        return _READERS[columns.kind](row.values, columns)
    except UnfitRow as fault:
        return BadRow(row.file, row.line, str(fault), raw=_beginning(row.values))


def _refuse_what_the_first_row_had_not(values: Mapping[str, Any], columns: Columns) -> None:
    """Columns are told by the first row; one that changes what is said must not come unseen."""
    for name in _CHANGE_WHAT_IS_SAID.get(columns.kind, ()):
        if name in (columns.tools, columns.history):
            return
        if isinstance(values.get(name), list | tuple) and values[name]:
            raise UnfitRow(
                f"column {name!r}: the first row has none, so that it is not read  (give the "
                "first row one, [] where it is empty)"
            )


def _beginning(values: Mapping[str, Any]) -> str:
    text = json.dumps(dict(values), ensure_ascii=False, default=str)
    return text[:RAW_CHARACTERS]


def _instruction_example(values: Mapping[str, Any], columns: Columns) -> Example:
    request = values.get(columns.instruction)
    answer = values.get(columns.response)
    if is_messages(request) or is_messages(answer):
        return _prompt_completion_example(values, columns)
    if type(answer) is not str:
        answer = _needed(values, columns.response)
    if not answer or answer.isspace():
        raise UnfitRow(f"column {columns.response!r}: the answer is empty")
    if type(request) is not str:
        request = _needed(values, columns.instruction)
    material = _optional(values, columns.input)
    if material:
        request = _with_input(request, columns.input, material)
    if not request or request.isspace():
        raise UnfitRow(f"column {columns.instruction!r}: the request is empty")
    system = _optional(values, columns.system)
    if columns.history and values.get(columns.history):
        said = _history(values[columns.history], columns.history)
        return conversation([*said, Turn("user", request), Turn("assistant", answer)], system)
    return _exchange(system, request, answer)


def _history(pairs: Any, column: str) -> list[Turn]:
    """Earlier requests and answers, which are learnt like the last one."""
    turns = []
    for number, pair in enumerate(pairs if isinstance(pairs, list | tuple) else [pairs], 1):
        told = list(pair) if isinstance(pair, list | tuple) else []
        if len(told) != 2 or not all(isinstance(text, str) for text in told):
            raise UnfitRow(f"{column}[{number}]: is no pair of a request and an answer")
        turns += [Turn("user", told[0]), Turn("assistant", told[1])]
    return turns


def _exchange(system: str, request: str, answer: str) -> Example:
    turns = (Turn("user", request), Turn("assistant", answer))
    return Example((Turn("system", system), *turns)) if system else Example(turns)


def _with_input(request: str, column: str, material: str) -> str:
    """The request with the material under a label; without a request, the material alone."""
    if not request or request.isspace():
        return material
    name = column.lower()
    if "CREATE TABLE" in material or "schema" in name:
        label = "Schema"
    else:
        label = "Context" if "context" in name else "Input"
    return f"{request}\n\n{label}:\n{material}"


def _prompt_completion_example(values: Mapping[str, Any], columns: Columns) -> Example:
    turns: list[Turn] = []
    roles: tuple[tuple[str, Role], ...] = (
        (columns.instruction, "user"),
        (columns.response, "assistant"),
    )
    for column, role in roles:
        value: Any = values.get(column)
        if is_messages(value):
            turns += turns_in(value, column)
        else:
            turns.append(Turn(role, _needed(values, column)))
    if turns[-1].role != "assistant":
        raise UnfitRow(f"column {columns.response!r}: the last message is not an answer")
    asked, answers = values.get(columns.instruction), values.get(columns.response)
    if isinstance(asked, str) and is_messages(answers):
        # The whole conversation stands in the column of the answer, with the request once more.
        whole = turns_in(answers or (), columns.response)
        first = next((turn.text for turn in whole if turn.role == "user"), asked)
        if first.strip() != asked.strip():
            raise UnfitRow(
                f"column {columns.response!r}: it begins with another request than "
                f"{columns.instruction!r} has"
            )
        turns = whole if any(turn.role == "user" for turn in whole) else turns
    return conversation(turns, _optional(values, columns.system))


def _messages_example(values: Mapping[str, Any], columns: Columns) -> Example:
    value = values.get(columns.messages)
    if not isinstance(value, list | tuple):
        if value is None:
            raise UnfitRow(_absence(values, columns.messages))
        raise UnfitRow(f"column {columns.messages!r} holds {kind_of(value)}, not messages")
    turns = turns_in(value, columns.messages)
    tools = tools_of(values.get(columns.tools), columns.tools) if columns.tools else ""
    return conversation(turns, _optional(values, columns.system), tools)


def _text_example(values: Mapping[str, Any], columns: Columns) -> Example:
    text = values.get(columns.text)
    if type(text) is not str:
        if text is None:
            raise UnfitRow(_absence(values, columns.text))
        raise UnfitRow(f"column {columns.text!r} holds {kind_of(text)}, not text")
    if not text or text.isspace():
        raise UnfitRow(f"column {columns.text!r}: the text is empty")
    marked = marked_turns(text)
    if marked is None:
        return Example(text=text)
    return conversation(
        Turn(role, body) for role, body in ((_marked_role(name), body) for name, body in marked)
    )


def _marked_role(name: str) -> Role:
    role = known_role(name)
    if role == "tool" or name == "function_call":
        raise UnfitRow(
            "tools in marked text are not understood  (write such rows as messages, with "
            "tool_calls and the role tool)"
        )
    return role


def _multi_task_example(values: Mapping[str, Any], columns: Columns) -> Example:
    answer = _needed(values, columns.response)
    if not answer or answer.isspace():
        raise UnfitRow(f"column {columns.response!r}: the answer is empty")
    given = values.get(columns.input)
    request = _labelled(given) if isinstance(given, Mapping) else _needed(values, columns.input)
    if not request or request.isspace():
        raise UnfitRow(f"column {columns.input!r}: the request is empty")
    return _exchange(_optional(values, columns.system), request, answer)


def _labelled(parts: Mapping[str, Any]) -> str:
    """The instruction, then everything else under the name it has in the row."""
    blocks = [_optional(parts, "instruction")]
    for name in parts:
        text = "" if name in METADATA_OF_A_TASK else _optional(parts, name)
        if text:
            blocks.append(f"{name.replace('_', ' ').capitalize()}:\n{text}")
    return "\n\n".join(block for block in blocks if block)


def _needed(values: Mapping[str, Any], column: str) -> str:
    value = values.get(column)
    if value is None:
        raise UnfitRow(_absence(values, column))
    return _as_text(value, column)


def _absence(values: Mapping[str, Any], column: str) -> str:
    if column in values:
        return f"column {column!r} is null"
    if "chosen" in values and "rejected" in values:
        return PREFERENCE
    return f"column {column!r} is missing; {columns_found(values)}"


def _optional(values: Mapping[str, Any], column: str) -> str:
    """The text of a column that may be absent, null or blank: then ""."""
    value = values.get(column) if column else None
    text = "" if value is None else _as_text(value, column)
    return "" if text.isspace() else text


def _as_text(value: Any, column: str) -> str:
    """Text as it is; numbers, objects and lists as JSON without spaces."""
    if type(value) is str:
        return value
    if not isinstance(value, bool) and isinstance(value, int | float | dict | list | tuple):
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError):
            pass
    truth = "; write what is to be learnt in words" if isinstance(value, bool) else ""
    raise UnfitRow(f"column {column!r} holds {kind_of(value)}, not text{truth}")


_READERS: dict[Kind, Callable[[Mapping[str, Any], Columns], Example]] = {
    "instruction": _instruction_example,
    "messages": _messages_example,
    "text": _text_example,
    "multi_task": _multi_task_example,
}
