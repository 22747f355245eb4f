"""Tools in conversations: parsed from rows into JSON, and rendered in ChatML.

ChatML as in Qwen and Hermes: tools in the system turn between <tools> tags, calls in the answer
between <tool_call> tags, results in a user turn between <tool_response> tags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from expert.data.records import Example, RowError, Turn

_SCHEMAS = dict.fromkeys(("input_schema", "inputSchema"), "parameters")  # Anthropic's and MCP's
_PREFACE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def tools_of(value: Any, column: str) -> str:
    """The tools of a row as JSON in OpenAI's format; "" if there are none."""
    where = f"column {column!r}"
    tools = _parsed(value, where) if isinstance(value, str) and value.strip() else value
    if tools is None or tools in ("", [], {}):
        return ""
    if not isinstance(tools, list | tuple):
        raise RowError(f"{where}: not a list of tools")
    for number, tool in enumerate(tools, 1):
        _function_in(tool, f"{where}: tool {number} has no name")
    # Bare functions, some with OpenAI's newer "type": "function" beside their name, are wrapped.
    wrap = {"type": "function"}
    bare = (
        {_SCHEMAS.get(k, k): v for k, v in tool.items() if (k, v) != ("type", "function")}
        for tool in tools
    )
    pairs = zip(tools, bare, strict=True)
    return _text([tool if "function" in tool else wrap | {"function": own} for tool, own in pairs])


def _function_in(value: Any, nameless: str) -> Mapping[str, Any]:
    """The function of a tool or a call, bare or under "function"."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(nameless)
    return function


def calls_in(message: Mapping[str, Any], where: str) -> str:
    """The calls of an assistant message as JSON fields for a template; "" if there are none."""
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        calls = [message["function_call"]]
    if not calls:
        return ""
    if not isinstance(calls, list | tuple):
        raise RowError(f"{where}: tool_calls is not a list")
    return _text({"tool_calls": [_call(call, where) for call in calls]})


def call_in_text(value: Any, where: str) -> str:
    """The same for a message whose whole text is a call, or a list of calls, as JSON."""
    calls = _parsed(value, where) if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, Mapping) else calls
    return calls_in({"tool_calls": calls}, where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = _function_in(call, f"{where}: a tool call has no name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # JSON text, as in OpenAI's format
        arguments = _parsed(arguments or "{}", f"{where}: the arguments of {function['name']}")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}: the arguments of {function['name']} are not a JSON object")
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**result, "id": call["id"]} if call.get("id") else result


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(f"{where}: not valid JSON") from None


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"tools cannot be written as JSON: {error}") from None


def has_tools(example: Example) -> bool:
    return bool(example.tools) or any(turn.extra for turn in example.turns)


def calls_of(turn: Turn) -> list[dict[str, Any]]:
    """The functions a turn calls, with arguments."""
    calls = json.loads(turn.extra).get("tool_calls", []) if turn.extra else []
    return [call["function"] for call in calls]


def left_out(example: Example, text: str) -> set[str]:
    """Which parts of the example are missing from its rendered text."""
    lacks = set()
    for turn in example.turns:
        before, _, words = turn.text.rpartition("</think>")
        thoughts = before.rpartition("<think>")[2].strip()
        if turn.role == "assistant" and thoughts not in text:
            lacks.add("reasoning")
        if turn.role != "tool" and words.strip() not in text:
            lacks.add("words beside a call" if turn.extra else f"a {turn.role} text")
    return lacks


def tool_names(turns: Sequence[Turn], tools: str) -> Iterator[str]:
    yield from (tool["function"]["name"] for tool in json.loads(tools or "[]"))
    yield from (call["name"] for turn in turns for call in calls_of(turn))


def in_chatml(example: Example) -> tuple[Turn, ...]:
    """The conversation with only system, user and assistant turns."""
    turns = list(example.turns)
    if example.tools:
        listed = "\n".join(_text(tool) for tool in json.loads(example.tools))
        preface = _PREFACE.format(listed)
        if turns[0].role == "system":
            preface = f"{turns.pop(0).text}\n\n{preface}"
        turns.insert(0, Turn("system", preface))
    written: list[Turn] = []
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn.role == "tool":
            response = f"<tool_response>\n{turn.text}\n</tool_response>"
            if before and before.role == "tool":
                response = f"{written.pop().text}\n{response}"
            written.append(Turn("user", response))
        else:
            written.append(replace(turn, text=with_calls(turn), extra="") if turn.extra else turn)
    return tuple(written)


def with_calls(turn: Turn) -> str:
    """The text of a turn followed by its calls, in ChatML."""
    shape = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    calls = (shape.format(call["name"], _text(call["arguments"])) for call in calls_of(turn))
    return "\n".join([*([turn.text] if turn.text else []), *calls])
