"""One function for each shape of rows, from the columns of a row to an example."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from expert.data.examples.columns import Columns, Kind, columns_found
from expert.data.examples.messages import (
    conversation,
    decoded_messages,
    describe_type,
    is_message,
    is_messages,
    is_text_part,
    known_role,
    text_of_part,
    turns_in,
)
from expert.data.examples.tools import tools_of
from expert.data.records import BadRow, Dropped, Example, Row, RowError, Turn
from expert.manifest.schema.message_names import Role

METADATA_OF_A_TASK = frozenset({"instruction", "error_type"})
RAW_CHARACTERS = 500
END_OF_TEXT = "<|endoftext|>"

# Turns in text, and what they begin with: ChatML, and the older <|user|>…<|end|>.
_CHATML_TURN = re.compile(
    r"<\|im_start\|>[ \t]*(\w+)[ \t]*(?:\r\n|\n|\r)(.*?)<\|im_end\|>", re.DOTALL
)
_TAGGED_TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)<\|end\|>", re.DOTALL)
_CHATML_START = re.compile(r"\s*<\|im_start\|>")
_TAG_START = re.compile(r"\s*<\|(?:system|user|assistant)\|>")
_ANY_MARKER = re.compile(r"<\|(?:im_start|im_end|system|user|assistant|end)\|>")
_EDGES = re.compile(r"\A(?:\r\n|\n|\r)|(?:\r\n|\n|\r)\Z")
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|User|Assistant|System): ?")
_SHOWN_CHARACTERS = 40
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
Values = Mapping[str, Any]


def example_of(row: Row, columns: Columns) -> Example | BadRow | Dropped:
    """The example in a row, or why there is none."""
    try:
        if columns.label and not _is_preferred(row.values.get(columns.label), columns.label):
            return Dropped(f"{columns.label} is false")
        return _SHAPES[columns.kind](row.values, columns)
    except RowError as fault:
        raw = json.dumps(dict(row.values), ensure_ascii=False, default=str)[:RAW_CHARACTERS]
        return BadRow(row.file, row.line, str(fault), raw=raw)


def answers_of(row: Row, columns: Columns) -> list[Example | None] | BadRow | Dropped:
    """The example in a row; if answers are compared, the conversation with the preferred answer and
    the one with the rejected answer, None for one that the row does not have. Of those only the
    last answers are trained on."""
    if not columns.rejected and not columns.judged:
        only = example_of(row, columns)
        return [only] if isinstance(only, Example) else only
    both: list[Columns | None]
    if columns.rejected:
        other = replace(columns, response=columns.rejected)
        if not columns.response:  # the prompt is in the same messages
            other = replace(columns, messages=columns.rejected)
        both = [columns, other]
    else:
        try:
            good = _is_preferred(row.values.get(columns.label), columns.label)
        except RowError as fault:
            return BadRow(row.file, row.line, str(fault))
        its_own = replace(columns, label="")
        both = [its_own, None] if good else [None, its_own]
    found: list[Example | None] = []
    for its in both:
        if its is None:
            found.append(None)
            continue
        example = example_of(row, its)
        if not isinstance(example, Example):
            return example
        *before, last = example.turns
        if last.role != "assistant":
            where = f"column {its.response or its.messages!r}"
            return BadRow(row.file, row.line, f"{where}: the last message is not an answer")
        before = [replace(turn, in_prompt=turn.role == "assistant") for turn in before]
        found.append(replace(example, turns=(*before, last)))
    return found


def first_example(row: Row, columns: Columns) -> Example | BadRow | Dropped:
    """The example in a row; of a row with several answers that of the first."""
    answers = answers_of(row, columns)
    return next(filter(None, answers)) if isinstance(answers, list) else answers


def _is_preferred(value: Any, column: str) -> bool:
    known = _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else value
    if known not in (0, 1):
        raise RowError(f"column {column!r}: {value!r} is neither true nor false")
    return bool(known)


# --- a request and an answer ---------------------------------------------------------------------


def _exchange(values: Values, columns: Columns) -> Example:
    """A request and an answer, each a text or messages."""
    asked = _messages_in(values.get(columns.instruction))
    answered = _messages_in(values.get(columns.response))
    if asked is None and answered is None:
        # A request with its input, and the answer to it.
        answer = _required_text(values, columns.response, columns)
        _refuse_empty(answer, columns.response, "the answer is empty")
        request = _required_text(values, columns.instruction, columns)
        material = _optional_text(values, columns.input, columns)
        if material and (not request or request.isspace()):
            request = material
        elif material:
            name = columns.input.lower()
            label = "Context" if "context" in name else "Input"
            if "CREATE TABLE" in material or "schema" in name:
                label = "Schema"
            request = f"{request}\n\n{label}:\n{material}"
        _refuse_empty(request, columns.instruction, "the request is empty")
        system = _optional_text(values, columns.system, columns)
        offered = _offered(values, columns)
        turns = [Turn("user", request), Turn("assistant", answer)]
        said = values.get(columns.history) if columns.history else None
        if offered or said:
            return conversation([*_history(said or [], columns.history), *turns], system, offered)
        return Example((Turn("system", system), *turns) if system else tuple(turns))
    before = _turns_or_text(values, columns.instruction, "user", asked, columns)
    after = _turns_or_text(values, columns.response, "assistant", answered, columns)
    if after[-1].role != "assistant":
        raise RowError(f"column {columns.response!r}: the last message is not an answer")
    turns = _join_turns(before, after, columns.instruction, columns.response)
    if _optional_text(values, columns.input, columns):
        what = f"column {columns.input!r}: it cannot be put into a conversation"
        raise RowError(f"{what}  (write it into the message it belongs to)")
    return conversation(
        turns, _optional_text(values, columns.system, columns), _offered(values, columns)
    )


def _offered(values: Values, columns: Columns) -> str:
    """The tools of a row as JSON; "" if there are none."""
    tools = values.get(columns.tools) if columns.tools else None
    return tools_of(tools, columns.tools) if tools is not None else ""


def _refuse_empty(text: str, column: str, what: str) -> None:
    if not text or text.isspace():
        raise RowError(f"column {column!r}: {what}")


def _messages_in(value: Any) -> Sequence[Any] | None:
    """A list of messages, or a single one. Text is never parsed: an answer may well be JSON."""
    if type(value) is str:
        return None
    if is_message(value):
        return [value]
    return value if is_messages(value) else None


def _history(pairs: Any, column: str) -> list[Turn]:
    """Earlier requests and answers, which are trained on like the last."""
    if is_messages(pairs):
        return turns_in(pairs, column)
    turns = []
    for number, pair in enumerate(pairs if isinstance(pairs, list | tuple) else [pairs], 1):
        said = list(pair) if isinstance(pair, list | tuple) else []
        if len(said) != 2 or not all(isinstance(text, str) for text in said):
            raise RowError(f"{column}[{number}]: is not a pair of a request and an answer")
        turns += [Turn("user", said[0]), Turn("assistant", said[1])]
    return turns


def _turns_or_text(
    values: Values, column: str, role: Role, messages: Sequence[Any] | None, columns: Columns
) -> list[Turn]:
    if messages is not None:
        return turns_in(messages, column)
    return [Turn(role, _required_text(values, column, columns))]


def _join_turns(
    before: list[Turn], after: list[Turn], asked_in: str, answered_in: str
) -> list[Turn]:
    """The request's turns and the answer's; answers among the request's are context, and not
    trained on. Some data sets repeat the conversation in the answer column: then it is used once,
    and must contain the requests."""
    before = [replace(turn, in_prompt=turn.role == "assistant") for turn in before]
    users = [turn.text.strip() for turn in after if turn.role == "user"]
    if not users:
        return [*before, *after]
    if any(turn.role == "user" and turn.text.strip() not in users for turn in before):
        raise RowError(f"column {answered_in!r}: it holds another conversation than {asked_in!r}")
    has_system = any(turn.role == "system" for turn in after)
    said = [(turn.role, turn.text.strip()) for turn in before if turn.role != "system"]
    repeated, place = [], 0
    for turn in after:
        is_context = place < len(said) and said[place] == (turn.role, turn.text.strip())
        place = place + is_context if turn.role != "system" else place
        repeated.append(replace(turn, in_prompt=is_context and turn.role == "assistant"))
    return [*([] if has_system else [t for t in before if t.role == "system"]), *repeated]


# --- conversations, texts and tasks --------------------------------------------------------------


def _conversation(values: Values, columns: Columns) -> Example:
    value, column = values.get(columns.messages), columns.messages
    tools = values.get(columns.tools) if columns.tools else None
    if isinstance(value, Mapping) and is_messages(value.get("messages")):
        tools = value.get("tools") if tools is None else tools
        value = value["messages"]
    turns: list[Turn] | None = None
    if isinstance(value, str):
        messages = decoded_messages(value)
        if messages is not None:
            turns = turns_in(messages, column)
        else:  # a transcript; other text is a request if the answer has its own column
            turns = _marked_turns(value) or _transcript_turns(value)
            turns = turns or ([Turn("user", value)] if columns.response else None)
    elif isinstance(value, list | tuple):
        turns = turns_in(value, column)
    if turns is None:
        raise _wrong_value(values, column, "messages")
    if columns.response:
        answer = values.get(columns.response)
        said = decoded_messages(answer) if isinstance(answer, str) else _messages_in(answer)
        after = _turns_or_text(values, columns.response, "assistant", said, columns)
        turns = _join_turns(turns, after, column, columns.response)
    offered = tools_of(tools, columns.tools or column) if tools is not None else ""
    return conversation(turns, _optional_text(values, columns.system, columns), offered)


def _plain_text(values: Values, columns: Columns) -> Example:
    text = values.get(columns.text)
    if type(text) is not str:
        raise _wrong_value(values, columns.text, "text")
    _refuse_empty(text, columns.text, "the text is empty")
    marked = _marked_turns(text)
    return Example(text=text) if marked is None else conversation(marked)


def _task(values: Values, columns: Columns) -> Example:
    """Inputs of tasks have several parts; those that are not text become JSON."""
    columns = replace(columns, json_values=True)
    answer = _required_text(values, columns.response, columns)
    _refuse_empty(answer, columns.response, "the answer is empty")
    task_input = values.get(columns.input)
    if isinstance(task_input, Mapping):
        # The instruction, followed by the other parts under their names.
        blocks = [_optional_text(task_input, "instruction", columns)]
        for name in (name for name in task_input if name not in METADATA_OF_A_TASK):
            if text := _optional_text(task_input, name, columns):
                blocks.append(f"{name.replace('_', ' ').capitalize()}:\n{text}")
        request = "\n\n".join(block for block in blocks if block)
    else:
        request = _required_text(values, columns.input, columns)
    _refuse_empty(request, columns.input, "the request is empty")
    turns = (Turn("user", request), Turn("assistant", answer))
    system = _optional_text(values, columns.system, columns)
    return Example((Turn("system", system), *turns) if system else turns)


_SHAPES: dict[Kind, Callable[[Values, Columns], Example]] = {
    "instruction": _exchange,
    "messages": _conversation,
    "text": _plain_text,
    "multi_task": _task,
}


# --- text with turn markers -----------------------------------------------------------------------


def _marked_turns(text: str) -> list[Turn] | None:
    """The turns of marked text; None for plain text without markers."""
    if "<|" not in text:
        return None
    if _CHATML_START.match(text):
        turn, start = _CHATML_TURN, _CHATML_START
    elif _TAG_START.match(text):
        turn, start = _TAGGED_TURN, _TAG_START
    elif marker := _ANY_MARKER.search(text):
        raise RowError(f"the text has turn markers ({marker[0]}) but does not begin with one")
    else:
        return None
    turns: list[Turn] = []
    place = 0
    for found in turn.finditer(text):
        _refuse_outside(text[place : found.start()])
        role, body = found.groups()
        if start.search(body):
            raise RowError(f"turn {len(turns) + 1} ({role}): its end marker is missing")
        # In the older form, one line break on either side belongs to the marker.
        turns.append(_turn_of(role, _EDGES.sub("", body) if turn is _TAGGED_TURN else body))
        place = found.end()
    _refuse_outside(text[place:])
    return turns


def _refuse_outside(gap: str) -> None:
    """Allow only blanks or an end of text between and after turns."""
    left = gap.strip()
    if left and left != END_OF_TEXT:
        raise RowError(f"text outside the turns: {left[:_SHOWN_CHARACTERS]!r}")


def _transcript_turns(text: str) -> list[Turn] | None:
    """The turns of a conversation written as "Human: … Assistant: …", separated by blank lines;
    None for other text."""
    parts = _SPEAKER.split(text)
    if len(parts) < 3 or parts[0].strip():
        return None
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [_turn_of(name.lower(), said.strip("\n")) for name, said in turns]


def _turn_of(name: str, text: str) -> Turn:
    role = known_role(name)
    if role == "tool" or name == "function_call":
        fix = "write such rows as messages, with tool_calls and the role tool"
        raise RowError(f"tools in marked text are not understood  ({fix})")
    return Turn(role, text)


# --- values as text ------------------------------------------------------------------------------


def _required_text(values: Values, column: str, columns: Columns) -> str:
    value = values.get(column)
    if value is None:
        raise _wrong_value(values, column, "text")
    return _as_text(value, column, columns)


def _wrong_value(values: Values, column: str, wanted: str) -> RowError:
    """The error for a value that is missing, null or of the wrong type."""
    if column not in values:
        return RowError(f"column {column!r} is missing; {columns_found(values)}")
    if values[column] is None:
        return RowError(f"column {column!r} is null")
    return RowError(f"column {column!r} holds {describe_type(values[column])}, not {wanted}")


def _optional_text(values: Values, column: str, columns: Columns) -> str:
    """The text of a column, "" if missing, null, NaN, blank or, unless it is JSON, an empty
    list."""
    value = values.get(column) if column else None
    is_nan = type(value) is float and math.isnan(value)  # an empty cell of a table of numbers
    if value is None or is_nan or (value in ([], {}) and not columns.json_values):
        return ""
    text = _as_text(value, column, columns)
    return "" if text.isspace() else text


def _as_text(value: Any, column: str, columns: Columns) -> str:
    """Text as it is, numbers as JSON, text parts joined; lists and objects as JSON if allowed."""
    if type(value) is str:
        return value
    is_list = isinstance(value, list | tuple)
    if is_text_part(value) or (is_list and value and all(map(is_text_part, value))):
        parts = value if is_list else [value]
        return "".join(text_of_part(part, f"column {column!r}") for part in parts)
    held = f"column {column!r} holds {describe_type(value)}, not text"
    if isinstance(value, bool):
        raise RowError(f"{held}; write what the model is to answer in words")
    if _messages_in(value) is not None:
        fix = "training.dataset.field_mapping.messages names a column with whole conversations"
        raise RowError(f"column {column!r} holds messages, not text  ({fix})")
    if isinstance(value, dict | list | tuple) and not columns.json_values:
        raise RowError(
            f"{held}  (name another column in training.dataset.field_mapping; to train on it as "
            "JSON text: training.dataset.json_values: true)"
        )
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        raise RowError(held) from None
