"""Messages of a row as turns: roles, weights, reasoning and tools of the common formats."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from expert.data.examples.tools import call_in_text, calls_in
from expert.data.records import Example, RowError, Turn
from expert.manifest.schema.message_names import (
    REASONING_FIELDS,
    ROLES,
    TOOL_COLUMNS,
    TRAIN_DETAIL,
    TRAIN_FIELDS,
    TRAIN_FLAGS,
    Role,
)

SUPPORTED_FIELDS = frozenset(
    {
        *("role", "from", "content", "value", *TRAIN_FIELDS, *REASONING_FIELDS),
        *("name", "tool_call_id", "tool_calls", "function_call"),
    }
)
# Fields that select what is trained on, or are part of a message, in unsupported ways.
UNSUPPORTED_FIELDS = frozenset(
    {
        *(TRAIN_DETAIL, "loss_mask", "loss_scale", "mask", "masked"),
        *("image", "images", "audio", "video", "videos", "refusal", *TOOL_COLUMNS),
    }
)
_TEXT_FIELDS = ("text", "value", "content")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
"""Types of parts that are text, in both formats of OpenAI; None: a part without a type."""
_REASONING_PARTS = ("reasoning", "thinking")
_CONTENT_FIELDS = frozenset({"content", "value", "tool_calls", "function_call"})


def unused_fields(messages: Any) -> list[str]:
    listed = messages if isinstance(messages, list | tuple) else ()
    said = [message for message in listed if isinstance(message, Mapping)]
    filled = (name for each in said for name in each if each[name] not in (None, "", [], {}))
    names = dict.fromkeys(filled)
    people = any(each.get("name") and each.get("role") not in ("tool", "function") for each in said)
    return [n for n in names if n not in SUPPORTED_FIELDS or (n == "name" and people)]


def has_other_system_text(messages: Any, system: Any) -> bool:
    """Whether the messages begin with a system text that differs from the system column."""
    first: Mapping[str, Any] = next(iter(messages_in(messages)), {})
    if not system or ROLES.get(first.get("role", first.get("from")) or "") != "system":
        return False
    own = first.get("content", first.get("value"))
    with contextlib.suppress(RowError):  # a content that is not understood is a bad row
        text = own if isinstance(own, str) else _joined(own, "")
        return bool(text.strip()) and text != system
    return False


def is_message(value: Any) -> bool:
    """Whether a value is a message: {role, content} or {from, value}."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role", value.get("from")), str):
        return False
    return not _CONTENT_FIELDS.isdisjoint(value)


def is_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_message, value))


def is_text_part(value: Any) -> bool:
    """{"type": "text", "text": …}, a part of a content list."""
    return isinstance(value, Mapping) and value.get("type") == "text"


def decoded_messages(text: str) -> list[Any] | None:
    """Messages stored as JSON text, as in CSV; None for other text."""
    start = text[:2]
    if not start.startswith("[") or start[1:].strip() not in ("", "{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if is_messages(value) else None


def messages_in(value: Any) -> Sequence[Any]:
    """The messages of a column: a list of them, its JSON text, or an object that has them; else
    none."""
    if isinstance(value, Mapping) and not is_message(value):
        value = value.get("messages")
    value = [value] if is_message(value) else value
    found = decoded_messages(value) if isinstance(value, str) else value
    return found if found is not None and is_messages(found) else ()


def text_of_part(part: Mapping[str, Any], where: str) -> str:
    text = next((part[name] for name in _TEXT_FIELDS if name in part), None)
    if not isinstance(text, str):
        raise RowError(f"{where}: a part of type 'text' without text")
    return text


def turns_in(messages: Sequence[Any], column: str) -> list[Turn]:
    """The messages as turns; RowError if one cannot be trained on."""
    return [_turn(message, f"{column}[{number}]") for number, message in enumerate(messages, 1)]


def _turn(message: Any, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise RowError(f"{where} is {describe_type(message)}, not a message")
    name = message.get("role", message.get("from"))
    if name is None:
        raise RowError(f"{where}: no 'role' or 'from'; its fields: {', '.join(message)}")
    role = known_role(name, where)
    content = message.get("content", message.get("value"))
    plain = role != "tool" and name != "function_call"
    if plain and type(content) is str and len(message) == 2:  # most messages
        return Turn(role, content)
    for field, value in message.items():
        text = value.strip() if isinstance(value, str) else value
        if field in UNSUPPORTED_FIELDS and text not in (None, "", [], {}, "[]", "{}", "null"):
            fix = "weight or train choose the answers, and tools are a column beside the messages"
            raise RowError(f"{where}: the field {field!r} of a message is not understood  ({fix})")
    extra = ""
    if name == "function_call":
        extra, content = call_in_text(content, where), ""
    elif role == "assistant":
        extra = calls_in(message, where)
    elif role == "tool":
        tool_fields = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
        extra = json.dumps(tool_fields, ensure_ascii=False, default=str)
    elif message.get("tool_calls") or message.get("function_call"):
        raise RowError(f"{where}: tool calls of the role {name!r}; only an assistant makes them")
    if content is None:
        if not extra:
            raise RowError(f"{where}: no content; its fields: {', '.join(message)}")
        content = ""
    thoughts, content = _without_reasoning(content, where)
    text = content if type(content) is str else _joined(content, where)
    thoughts += [message[name] for name in REASONING_FIELDS if message.get(name)]
    text = _with_reasoning(thoughts, text, role, where)
    return Turn(role, text, _is_trained(message, role, where), extra)


def known_role(name: Any, where: str = "") -> Role:
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        at = f"{where}: " if where else ""
        raise RowError(f"{at}unknown role {name!r}  (known: {', '.join(ROLES)})")
    return role


def _is_trained(message: Mapping[str, Any], role: Role, where: str) -> bool:
    """Whether an answer is trained on: `weight` of OpenAI, `train` of Axolotl and the like."""
    flags = {name: message[name] for name in TRAIN_FIELDS if message.get(name) is not None}
    for name, value in flags.items():
        if isinstance(value, str) or value not in (0, 1):
            raise RowError(f"{where}: {name} {value!r}; allowed: 1 or true, 0 or false")
    if len(set(map(bool, flags.values()))) > 1:
        both = ", ".join(f"{name} {value!r}" for name, value in flags.items())
        raise RowError(f"{where}: {both} contradict each other")
    if role != "assistant" and any(flags.get(name) for name in TRAIN_FLAGS):
        fix = "train_on_prompt: true trains on everything"
        raise RowError(f"{where}: train is true, but only answers can be selected  ({fix})")
    return role != "assistant" or all(flags.values())


def _without_reasoning(content: Any, where: str) -> tuple[list[Any], Any]:
    """The reasoning in the first parts of a content list, and the parts after it."""
    if not isinstance(content, list | tuple):
        return [], content
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    first = next((at for at, kind in enumerate(kinds) if kind not in _REASONING_PARTS), len(kinds))
    if late := [kind for kind in kinds[first:] if kind in _REASONING_PARTS]:
        raise RowError(f"{where}: a part of type {late[0]!r} after the text of the answer")
    found = [part.get(part["type"]) or part.get("text") for part in content[:first]]
    if not all(isinstance(text, str | None) for text in found):
        raise RowError(f"{where}: a part of type {kinds[0]!r} without text")
    said = "\n\n".join(filter(None, found))
    return [said] if said else [], content[first:]


def _with_reasoning(thoughts: Sequence[Any], text: str, role: Role, where: str) -> str:
    """The answer preceded by its reasoning, as in Qwen3's template."""
    if not thoughts:
        return text
    if role != "assistant" or len(thoughts) > 1 or not isinstance(thoughts[0], str):
        raise RowError(f"{where}: reasoning is one text, in an assistant message")
    if "</think>" in text:
        raise RowError(f"{where}: reasoning in a field of its own and in the content")
    inner, said = thoughts[0].strip("\n"), text.lstrip("\n")
    return f"<think>\n{inner}\n</think>\n\n{said}"


def _joined(content: Any, where: str) -> str:
    """The text of a content list."""
    if is_text_part(content):
        return text_of_part(content, where)
    if not isinstance(content, list | tuple):
        raise RowError(f"{where}: the content is {describe_type(content)}")
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            is_text = part.get("type") in _TEXT_PARTS
            text = text_of_part(part, where) if is_text_part(part) else is_text and part.get("text")
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"{where}: a part of type {kind!r}; only text is trained on")
        texts.append(text)
    return "".join(texts)


def conversation(turns: Iterable[Turn], system: str = "", tools: str = "") -> Example:
    """The turns as an example; RowError if no template could render them. Consecutive user turns
    are joined by a blank line."""
    merged: list[Turn] = []
    for turn in turns:
        if turn.role == "user" and merged and merged[-1].role == "user":
            both = (text for text in (merged[-1].text, turn.text) if text.strip())
            merged[-1] = Turn("user", "\n\n".join(both))
        elif turn.role != "system" or turn.text.strip():
            merged.append(turn)
    if system and not (merged and merged[0].role == "system"):
        merged.insert(0, Turn("system", system))
    before = Turn("system", "")
    for number, turn in enumerate(merged, 1):
        if turn.role == "system":
            if number > 1:
                raise RowError(f"turn {number}: a system turn that is not the first")
        elif turn.role == "tool":
            if before.role != "tool" and not (before.role == "assistant" and before.extra):
                raise RowError(
                    f"turn {number}: a tool result without a call before it  (write the call as "
                    "tool_calls; where the answer has it in its text, give the result the role "
                    "user)"
                )
        elif (not turn.text or turn.text.isspace()) and not turn.extra:
            raise RowError(f"turn {number} ({turn.role}) is empty")
        elif turn.role == "assistant" and before.role == "assistant":
            raise RowError(f"turn {number}: two answers in a row")
        elif turn.role == "assistant" and before.role == "system":
            what = f"turn {number}: an answer without a user turn before it"
            raise RowError(f"{what}  (remove it, or add the request)")
        before = turn
    answers = [turn.learn for turn in merged if turn.role == "assistant"]
    if not answers:
        raise RowError("there is no assistant turn")
    if not any(answers):
        raise RowError("no assistant turn is trained on: weight 0 or train: false in every one")
    return Example(tuple(merged), tools=tools)


def describe_type(value: Any) -> str:
    """The type of a row's value, for messages."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    words = {str: "text", dict: "an object", list: "a list", int: "a number", float: "a number"}
    return words.get(type(value), f"a {type(value).__name__}")
