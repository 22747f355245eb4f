"""Rows of many shapes, understood as one: what is said in a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from expert.data.columns import PREFERENCE, Columns, Kind, columns_found
from expert.data.marked_text import UnfitRow, marked_turns
from expert.data.records import BadRow, Example, Role, Row, Turn

ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = frozenset({"tool", "function", "function_call", "observation", "ipython"})
METADATA_OF_A_TASK = frozenset({"instruction", "error_type"})
RAW_CHARACTERS = 500


def example_of(row: Row, columns: Columns) -> Example | BadRow:
    """The example in a row, or why there is none."""
    try:
        return _READERS[columns.kind](row.values, columns)
    except UnfitRow as fault:
        return BadRow(row.file, row.line, str(fault), raw=_beginning(row.values))


def _beginning(values: Mapping[str, Any]) -> str:
    text = json.dumps(dict(values), ensure_ascii=False, default=str)
    return text[:RAW_CHARACTERS]


def _instruction_example(values: Mapping[str, Any], columns: Columns) -> Example:
    request = values.get(columns.instruction)
    answer = values.get(columns.response)
    if _is_messages(request) or _is_messages(answer):
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
    return _exchange(_optional(values, columns.system), request, answer)


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
        if _is_messages(value):
            turns += _turns(value, column)
        else:
            turns.append(Turn(role, _needed(values, column)))
    if turns[-1].role != "assistant":
        raise UnfitRow(f"column {columns.response!r}: the last message is not an answer")
    return _conversation(turns, _optional(values, columns.system))


def _messages_example(values: Mapping[str, Any], columns: Columns) -> Example:
    value = values.get(columns.messages)
    if not isinstance(value, list | tuple):
        if value is None:
            raise UnfitRow(_absence(values, columns.messages))
        raise UnfitRow(f"column {columns.messages!r} holds {_kind_of(value)}, not messages")
    turns = _turns(value, columns.messages)
    return _conversation(turns, _optional(values, columns.system))


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(part, Mapping) and ("role" in part or "from" in part) for part in value)
    )


def _turns(messages: Sequence[Any], column: str) -> list[Turn]:
    turns = []
    for number, message in enumerate(messages, 1):
        where = f"{column}[{number}]"
        if not isinstance(message, Mapping):
            raise UnfitRow(f"{where} is {_kind_of(message)}, not a message")
        name = message.get("role", message.get("from"))
        role = ROLES.get(name) if isinstance(name, str) else None
        if (role is None and name in TOOL_ROLES) or message.get("tool_calls"):
            raise UnfitRow(f"{where}: tool messages are not supported")
        if role is None:
            raise UnfitRow(f"{where}: unknown role {name!r}  (known: {', '.join(ROLES)})")
        content = message.get("content", message.get("value"))
        turns.append(Turn(role, content if type(content) is str else _joined(content, where)))
    return turns


def _joined(content: Any, where: str) -> str:
    """The text of a message whose content is a list of parts."""
    if not isinstance(content, list | tuple):
        what = "has no content" if content is None else f"the content is {_kind_of(content)}"
        raise UnfitRow(f"{where}: {what}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise UnfitRow(f"{where}: a part of type {kind!r}; only text is learnt")
        texts.append(text)
    return "".join(texts)


def _conversation(turns: Iterable[Turn], system: str = "") -> Example:
    """The turns as an example; a conversation that no template can write is refused."""
    said = [turn for turn in turns if turn.role != "system" or turn.text.strip()]
    if system and not (said and said[0].role == "system"):
        said.insert(0, Turn("system", system))
    before = ""
    for number, turn in enumerate(said, 1):
        if turn.role == "system":
            if number > 1:
                raise UnfitRow(f"turn {number}: a system turn that is not the first")
        elif not turn.text or turn.text.isspace():
            raise UnfitRow(f"turn {number} ({turn.role}) is empty")
        elif turn.role == "assistant" and before != "user":
            what = "two answers in a row" if before == "assistant" else "an answer to no user turn"
            raise UnfitRow(f"turn {number}: {what}")
        elif turn.role == before:
            raise UnfitRow(f"turn {number}: two user turns in a row")
        before = turn.role
    if not any(turn.role == "assistant" for turn in said):
        raise UnfitRow("there is no assistant turn")
    return Example(tuple(said))


def _text_example(values: Mapping[str, Any], columns: Columns) -> Example:
    text = values.get(columns.text)
    if type(text) is not str:
        if text is None:
            raise UnfitRow(_absence(values, columns.text))
        raise UnfitRow(f"column {columns.text!r} holds {_kind_of(text)}, not text")
    if not text or text.isspace():
        raise UnfitRow(f"column {columns.text!r}: the text is empty")
    marked = marked_turns(text)
    if marked is None:
        return Example(text=text)
    return _conversation(
        Turn(role, body) for role, body in ((_known_role(name), body) for name, body in marked)
    )


def _known_role(name: str) -> Role:
    if name in TOOL_ROLES:
        raise UnfitRow("tool messages are not supported")
    if name not in ROLES:
        raise UnfitRow(f"unknown role {name!r}  (known: {', '.join(ROLES)})")
    return ROLES[name]


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
    raise UnfitRow(f"column {column!r} holds {_kind_of(value)}, not text{truth}")


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    words = {str: "text", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return words.get(type(value), f"a {type(value).__name__}")


_READERS: dict[Kind, Callable[[Mapping[str, Any], Columns], Example]] = {
    "instruction": _instruction_example,
    "messages": _messages_example,
    "text": _text_example,
    "multi_task": _multi_task_example,
}
