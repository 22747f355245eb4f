"""Rows of many shapes, understood as one: which column holds what, and what is said in a row."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from expert.data.marked_text import UnfitRow, marked_turns
from expert.data.records import BadRow, DataError, Example, Role, Row, Turn
from expert.manifest.dataset import FieldMapping

Kind = Literal["instruction", "messages", "text", "multi_task"]

# In the order in which they are tried where the manifest names no column.
USUAL_REQUESTS = ("instruction", "prompt", "question", "text", "sql_prompt")
USUAL_ANSWERS = ("response", "output", "answer", "completion", "text", "cypher", "sql")
# Names that may as well stand for something else, after those that do not.
INSTRUCTION_COLUMNS = (*USUAL_REQUESTS, "query", "request", "user", "human")
RESPONSE_COLUMNS = (*USUAL_ANSWERS, "reply", "assistant")
SPEAKERS = frozenset({"user", "human"})
"""Such a column holds what was said only beside "assistant"; else it may say who it was."""
INPUT_COLUMNS = ("input", "context", "schema")
MESSAGE_COLUMNS = ("messages", "conversations")

PREFERENCE = "preference rows need DPO; only supervised fine-tuning is built"
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


@dataclass(frozen=True, slots=True)
class Columns:
    """What the rows of a data set are, and which column holds which part; "": none does."""

    kind: Kind
    instruction: str = ""
    input: str = ""
    response: str = ""
    system: str = ""
    text: str = ""
    messages: str = ""


def understand_columns(
    names: Collection[str],
    first_row: Mapping[str, Any],
    *,
    mapping: FieldMapping | None = None,
    text_field: str | None = None,
) -> Columns:
    """The kind of rows and their columns: as the manifest says, otherwise by their names."""
    asked = _asked_columns(names, mapping, text_field)
    if "text" in asked:
        return Columns("text", text=asked["text"])
    written, plain = {name: name for name in names}, _by_plain_name(names)
    # The strictest reading that finds something counts: what is understood by usual names, as they
    # are usually written, must not be understood otherwise because more is tried after it.
    for known, requests, answers in (
        (written, USUAL_REQUESTS, USUAL_ANSWERS),
        (plain, USUAL_REQUESTS, USUAL_ANSWERS),
        (plain, INSTRUCTION_COLUMNS, RESPONSE_COLUMNS),
    ):
        if not asked.keys() & {"instruction", "response"}:
            found = _other_kinds(known, first_row)
            if found:
                return found
        found = _instruction_columns(known, asked, requests, answers)
        if found:
            return found
    raise _not_understood(names, plain, asked)


def _other_kinds(known: Mapping[str, str], first_row: Mapping[str, Any]) -> Columns | None:
    """Messages, or rows of several tasks; preference rows are refused."""
    system = known.get("system", "")
    if {"chosen", "rejected"} <= known.keys():
        raise DataError(f"{PREFERENCE}  ({_found(known.values())})")
    for name in MESSAGE_COLUMNS:
        column = known.get(name)
        if column and isinstance(first_row.get(column), list | tuple | None):
            return Columns("messages", messages=column, system=system)
    if _is_multi_task(known, first_row):
        return Columns("multi_task", input=known["input"], response=known["output"], system=system)
    return None


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    """The columns by their names in small letters without blanks around them, in their order; of
    two that are alike then, the one that is written so, else the first."""
    known: dict[str, str] = {}
    for name in names:
        plain = name.strip().lower()
        if plain not in known or name == plain:
            known[plain] = name
    return known


def _asked_columns(
    names: Collection[str], mapping: FieldMapping | None, text_field: str | None
) -> dict[str, str]:
    """Parts of an example that the manifest gives a column, all of which exist."""
    mapped = {} if mapping is None else mapping.model_dump(include=set(FieldMapping.model_fields))
    # A part mapped to its own name is the default written out: the automatic choice may go on.
    asked = {
        part: column
        for part, column in mapped.items()
        if column and not (part == column and column not in names)
    }
    if text_field is not None and asked.setdefault("text", text_field) != text_field:
        raise DataError(
            f"training.dataset: text_field is {text_field!r} and field_mapping.text is "
            f"{asked['text']!r}  (keep one of them)"
        )
    for part, column in asked.items():
        if column not in names:
            key = f"field_mapping.{part}" if mapped.get(part) else "text_field"
            raise DataError(
                f"training.dataset.{key}: there is no column {column!r}  ({_found(names)})"
            )
    if "text" in asked and asked.keys() & {"instruction", "response"}:
        raise DataError(
            "training.dataset.field_mapping: either text, or instruction and response  "
            f"({_found(names)})"
        )
    return asked


def _is_multi_task(known: Mapping[str, str], first_row: Mapping[str, Any]) -> bool:
    if "instruction" in known or not {"input", "output"} <= known.keys():
        return False
    return "task" in known or isinstance(first_row.get(known["input"]), Mapping)


def _instruction_columns(
    known: Mapping[str, str],
    asked: Mapping[str, str],
    requests: Sequence[str],
    answers: Sequence[str],
) -> Columns | None:
    """Request and answer, or plain text; None where one of the two is missing and no text is."""
    instruction, response = _exchange_columns(known, asked, requests, answers)
    if instruction and response:
        taken = {instruction, response}
        return Columns(
            "instruction",
            instruction=instruction,
            input=_choose("input", INPUT_COLUMNS, known, asked, taken),
            response=response,
            system=known.get("system", ""),
        )
    if "text" in known and not asked:
        return Columns("text", text=known["text"])
    return None


def _exchange_columns(
    known: Mapping[str, str],
    asked: Mapping[str, str],
    requests: Sequence[str],
    answers: Sequence[str],
) -> tuple[str, str]:
    """The columns with the request and with the answer, "" for one that is not there."""
    given = set(asked.values())
    doubtful = {known[name] for name in SPEAKERS & known.keys() if "assistant" not in known}
    instruction = _choose("instruction", requests, known, asked, given | doubtful)
    response = _choose("response", answers, known, asked, given | {instruction})
    if not instruction and response:
        instruction = _choose("instruction", ("input",), known, asked, given)
    return instruction, response


def _choose(
    part: str,
    candidates: Sequence[str],
    known: Mapping[str, str],
    asked: Mapping[str, str],
    taken: Collection[str],
) -> str:
    there = (known[name] for name in candidates if name in known)
    return asked.get(part) or next((name for name in there if name not in taken), "")


def _not_understood(
    names: Collection[str], known: Mapping[str, str], asked: Mapping[str, str]
) -> DataError:
    candidates = (INSTRUCTION_COLUMNS, RESPONSE_COLUMNS)
    columns = _exchange_columns(known, asked, *candidates)
    missing = [
        f"no column holds the {what} (looked for {', '.join(looked_for)})"
        for what, column, looked_for in zip(("request", "answer"), columns, candidates, strict=True)
        if not column
    ]
    return DataError(
        f"{' and '.join(missing)}; {_found(names)}  (name them in training.dataset.field_mapping: "
        "instruction and response, or text where the rows are already formatted)"
    )


def _found(names: Iterable[str]) -> str:
    return f"columns found: {', '.join(names) or 'none'}"


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
    return f"column {column!r} is missing; {_found(values)}"


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
    raise UnfitRow(f"column {column!r} holds {_kind_of(value)}, not text")


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
