"""Which column holds which part of an example: from the manifest, or by column name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from expert.core.text import counted
from expert.data.examples.column_survey import (
    BOOLEAN,
    CONVERSATION,
    LIST,
    MEDIA,
    MESSAGE,
    MESSAGES,
    OBJECT,
    ColumnSurvey,
)
from expert.data.records import DataError
from expert.manifest.check.problems import closest
from expert.manifest.schema.dataset import DatasetSpec, FieldMapping
from expert.manifest.schema.message_names import TOOL_COLUMNS, TRAIN_FIELDS

Kind = Literal["instruction", "messages", "text", "multi_task"]

# In the order in which they are tried if the manifest names no column.
USUAL_REQUESTS = ("instruction", "prompt", "question", "text", "sql_prompt")
USUAL_ANSWERS = ("response", "output", "answer", "completion", "text", "cypher", "sql")
# Ambiguous names come last.
INSTRUCTION_COLUMNS = (*USUAL_REQUESTS, "query", "request", "user", "human")
RESPONSE_COLUMNS = (*USUAL_ANSWERS, "reply", "assistant", "query")
SPEAKERS = frozenset({"user", "human"})
"""Columns that hold a request only next to "assistant"; otherwise they may name the speaker."""
INPUT_COLUMNS = ("input", "context", "schema", "sql_context")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
MESSAGE_COLUMNS = ("messages", "conversations")
_NAMES_OF = {
    **{"instruction": INSTRUCTION_COLUMNS, "response": RESPONSE_COLUMNS, "input": INPUT_COLUMNS},
    **{"system": SYSTEM_COLUMNS, "messages": MESSAGE_COLUMNS, "tools": TOOL_COLUMNS},
}
MEDIA_COLUMNS = frozenset(
    {
        *("image", "images", "image_url", "image_urls", "image_path", "image_paths", "img"),
        *("video", "videos", "audio", "audios", "pixel_values"),
    }
)
CONTENT_COLUMNS = frozenset(
    {
        # Which rows or answers to train on, or how much; "loss" is mostly a measurement.
        *({*TRAIN_FIELDS} - {"loss"}),
        *("weights", "mask", "masks", "loss_mask", "completion_mask", "assistant_masks"),
        *("split", "is_correct", "correct", "approved", "reward"),
        *(*INPUT_COLUMNS, *SYSTEM_COLUMNS, *MESSAGE_COLUMNS, *TOOL_COLUMNS, *USUAL_REQUESTS),
        *("system_instruction", "system_instructions", "system_content", "system_text"),
        *("sys_prompt", "sys", "persona", "documents", "apis"),
        *("available_tools", "available_functions", "tool_definitions", "function_definitions"),
        *("history", "reasoning", "reasoning_content", "thinking", "chat_template_kwargs"),
    }
)
"""Columns worth a warning if they are filled but not read."""
EXTRA_CONTENT_COLUMNS = frozenset(
    {
        *(*RESPONSE_COLUMNS, "answers", "target", "targets", "label", "labels", "label_text"),
        *("summary", "highlights", "solution", "code", "translation", "intent", "sentiment"),
        *("entities", "ner_tags", "choices", "options", "endings", "passage", "passages"),
        *("article", "document", "documents", "contexts", "paragraph", "background"),
        *("knowledge", "evidence", "dialogue", "rationale", "explanation", "thought", "thoughts"),
        *("cot", "complex_cot", "chain_of_thought", "definition"),
    }
)
"""The same, except in conversations, whose messages are complete."""
PREFERRED, PAIRS, JUDGED, ALL = "preferred", "pairs", "judged", "all"
"""Values of training.dataset.preference_rows."""
_PAIRS = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("chosen_response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
)
_MAPPING = "training.dataset.field_mapping"
_PREFERRED_KEY = f"training.dataset.preference_rows: {PREFERRED}"
_LABELS = ("label", "kto_tag")
_OPTIONAL = ("input", "system", "tools")
"""Parts that rows may lack; in a stream they may first appear after the first window."""
NAMELESS = "(no name)"
"""A column without a name, such as an index in CSV."""


class ColumnsNotFound(DataError):
    """The expected columns are not in the file."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The kind of rows, and the column of each part; "" if there is none."""

    kind: Kind
    instruction: str = ""
    input: str = ""
    response: str = ""
    system: str = ""
    text: str = ""
    messages: str = ""
    tools: str = ""
    history: str = ""
    label: str = ""
    """Marks the good answers; rows with other answers are left out."""
    judged: bool = False
    """Single answers are trained on as good or bad ones."""
    rejected: str = ""
    """The rejected answers, if pairs are trained on; the preferred ones are in `response`, or in
    `messages` with their prompt."""
    json_values: bool = False
    """Lists and objects are trained on as JSON text."""
    has_messages: bool = False
    """The request or the answer of some rows consists of messages. Answers among those of the
    request are context and not trained on."""

    def used(self) -> dict[str, str]:
        parts = (
            *("system", "history", "instruction", "input", "response", "tools"),
            *("messages", "text", "rejected", "label"),
        )
        return {part: getattr(self, part) for part in parts if getattr(self, part)}

    def unused(self, seen: ColumnSurvey) -> dict[str, int]:
        """Columns that are not read, with the number of rows that fill each."""
        taken = set(self.used().values())
        filled = {name or NAMELESS: seen.filled(name) for name in seen.names if name not in taken}
        return {name: rows for name, rows in filled.items() if rows}

    def as_text(self, seen: ColumnSurvey) -> str:
        """Which columns are used and which are not, in words."""
        used = ", ".join(f"{part}={column}" for part, column in self.used().items())
        unused = (f"{n} (in {counted(rows, 'row')})" for n, rows in self.unused(seen).items())
        left = ", ".join(unused)
        return f"{used}; not trained on: {left}" if left else used

    def unused_warning(self, seen: ColumnSurvey) -> str:
        """A warning about unused columns whose names suggest content, or a choice of rows; "" if
        there are none."""
        telling = CONTENT_COLUMNS
        telling |= frozenset() if self.kind == "messages" else EXTRA_CONTENT_COLUMNS
        if self.kind == "multi_task" and not seen.holds(self.input, OBJECT):
            telling |= {"task"}  # nothing else says what to do with the input
        of = f"{'' if seen.whole else 'the first '}{counted(seen.rows, 'row')}"
        listed = ", ".join(
            f"{name} (filled in {rows:,} of {of})"
            for name, rows in self.unused(seen).items()
            if name.strip().lower() in telling
            and (name not in RESPONSE_COLUMNS or seen.readable(name))  # Spider has parsed answers
        )
        what_to_do = (
            f"to use one, map it in {_MAPPING}, or copy its text into a column that is used; all "
            "rows are trained on, whatever a column says of them"
        )
        return f"columns that are not used: {listed}  ({what_to_do})" if listed else ""

    def preference_warning(self, preference_rows: str | None) -> str:
        """The warning if the manifest wants preferred answers and no column marks them; else ""."""
        named = {self.response.strip().lower(), self.messages.strip().lower()}
        if preference_rows != PREFERRED or self.label or named & {pair[0] for pair in _PAIRS}:
            return ""
        pairs = ", ".join(" and ".join(pair) for pair in _PAIRS)
        what = "no column says which answers are preferred, and all of them would be trained on"
        return f"{what}  (looked for {pairs}, {', '.join(_LABELS)})"


def detect_columns(seen: ColumnSurvey, spec: DatasetSpec | None = None) -> Columns:
    """The kind of rows and their columns, from the manifest or by name."""
    spec = spec or DatasetSpec()
    known = _by_lower_name(seen.names)
    for name in seen.names:
        rows = seen.filled(name)
        if rows and (name.strip().lower() in MEDIA_COLUMNS or seen.holds(name, MEDIA)):
            raise DataError(
                f"the column {name!r} holds images, video or audio (filled in {rows:,} of "
                f"{counted(seen.rows, 'row')}); only text is trained on  (choose rows without "
                "media, or remove the column and the rows that refer to it)"
            )
    requested = _requested_columns(seen, spec.field_mapping, spec.text_field)
    label, found = "", None
    if "text" in requested:
        found = Columns("text", text=requested["text"])
    else:
        label = _preferred(seen, requested, spec.preference_rows)
        found = _messages_columns(seen, requested)
        found = found or _exchange_or_text_columns(seen, requested, spec.json_values)
    if found is None:
        raise _no_columns_error(seen, known, requested)
    if spec.preference_rows == PAIRS or (spec.preference_rows == JUDGED and not label):
        rejected = requested.get("rejected") or "".join(pair_in(seen)[1:])
        if not rejected or found.kind == "text":
            pairs = ", ".join(" and ".join(pair) for pair in _PAIRS)
            raise DataError(
                f"no two columns hold a preferred and a rejected answer (looked for {pairs}); "
                f"{columns_found(seen.names)}  (name them: {_MAPPING}.response and "
                f"{_MAPPING}.rejected; or train on single answers: training.config.method: sft)"
            )
        found = replace(found, rejected=rejected)
    found = replace(found, label=label, judged=spec.preference_rows == JUDGED)
    if found.kind == "text" and "text" not in requested and {"role", "parent_id"} <= known.keys():
        what = "each row is a single message of a tree of conversations (role and parent_id)"
        raise DataError(f"{what}  (join each conversation into one row with a column messages)")
    if found.kind == "instruction":
        # Tools belong to conversations, also where the answer has its own column.
        parts = (found.instruction, found.response)
        has_messages = any(seen.holds(column, MESSAGES, MESSAGE) for column in parts)
        offered = _first(TOOL_COLUMNS, known) if has_messages else ""
        tools = requested.get("tools") or offered
        found = replace(found, tools=tools, has_messages=has_messages)
    for part, column in requested.items():
        if getattr(found, part) != column:
            names = {"text": "plain text", "messages": "conversations"}
            read_as = names.get(found.kind, found.kind)
            what = f"{column!r} is not used, since the rows are read as {read_as}"
            fix = "leave it out, or copy its text into a column that is used"
            raise DataError(f"{_MAPPING}.{part}: {what}  ({fix})")
    json_values = spec.json_values and "text" not in requested
    return replace(found, json_values=json_values)


def part_for_column(name: str) -> str | None:
    """The part of an example with this name, or whose column usually has it and no other's."""
    parts = [part for part, usual in _NAMES_OF.items() if name in usual]
    if name in FieldMapping.model_fields:
        return name
    return parts[0] if len(parts) == 1 else None


def detect_source_columns(seen: ColumnSurvey, spec: DatasetSpec) -> Columns:
    """`detect_columns`, with the file in the error."""
    try:
        return detect_columns(seen, spec)
    except DataError as error:
        raise ColumnsNotFound(f"{seen.file}: {error}") from None


def _preferred(seen: ColumnSurvey, requested: dict[str, str], rows: str | None) -> str:
    """For preference pairs, set the response in `requested` to the preferred answers; for labelled
    answers, return the label column. DataError unless the manifest wants the preferred half."""
    known, pair = _by_lower_name(seen.names), pair_in(seen)
    if pair and "response" not in requested:
        chosen, rejected = pair
        if rows not in (PREFERRED, PAIRS, JUDGED):
            raise DataError(
                f"preference rows ({chosen!r} and {rejected!r})  (to train on both: "
                "training.config.method: dpo; to train on the answers in "
                f"{chosen!r} alone: {_PREFERRED_KEY}, or expert new --preferred)"
            )
        requested["response"] = chosen
        if not requested.keys() & {"instruction", "messages"}:
            # The request is in messages before the pair, in its own column, or inside the answers.
            talks = (known[name] for name in (*MESSAGE_COLUMNS, "input") if name in known)
            talk = next((name for name in talks if seen.holds(name, MESSAGES, CONVERSATION)), "")
            request = _first((*INSTRUCTION_COLUMNS, "input"), known)
            if talk or not request or seen.holds(chosen, MESSAGES):
                requested["messages"] = talk or request or chosen
            if not talk and not request:
                del requested["response"]
        return ""
    is_answer = known.keys() & {*MESSAGE_COLUMNS, *RESPONSE_COLUMNS} - {"text"}
    label = requested.get("label") or _first(_LABELS, known)
    # Only with preference_rows: 0 and 1 may also be classes.
    is_truth = seen.holds_only(label, BOOLEAN) or (rows in (PREFERRED, JUDGED) and not pair)
    if rows == ALL or not label or not (is_answer or requested) or not is_truth:
        return ""
    if rows not in (PREFERRED, JUDGED):
        raise DataError(
            f"the column {label!r} says of each answer whether it is good, and all of them would "
            "be trained on as good  (to train on both kinds: training.config.method: kto; on those "
            f"where it is true: {_PREFERRED_KEY}, or expert new --preferred; if it means something "
            f"else: training.dataset.preference_rows: {ALL})"
        )
    return label


def pair_in(seen: ColumnSurvey) -> tuple[str, ...]:
    """The columns of preferred and rejected answers, by their names; () if there are none."""
    known = _by_lower_name(seen.names)
    names = next((pair for pair in _PAIRS if known.keys() >= {*pair}), ())
    return tuple(known[name] for name in names)


def _messages_columns(seen: ColumnSurvey, requested: Mapping[str, str]) -> Columns | None:
    """Conversations, in the named column or one with a common name."""
    plain = _by_lower_name(seen.names)
    answers_apart = "response" in requested and "messages" not in requested
    if "instruction" in requested or (answers_apart and _first(INSTRUCTION_COLUMNS, plain)):
        return None
    for known in ({name: name for name in seen.names}, plain):
        by_name = (known[name] for name in MESSAGE_COLUMNS if name in known)
        lists = (n for n in by_name if not seen.filled(n) or seen.holds(n, MESSAGES, LIST))
        column = requested.get("messages") or next(lists, "")
        if column:
            return Columns(
                "messages",
                messages=column,
                response=requested.get("response", ""),
                system=requested.get("system") or _first(SYSTEM_COLUMNS, known),
                tools=requested.get("tools") or _first(TOOL_COLUMNS, known),
            )
    return None


def _exchange_or_text_columns(
    seen: ColumnSurvey, requested: Mapping[str, str], json_values: bool
) -> Columns | None:
    """Requests and answers, or plain text.

    The strictest interpretation that finds something wins, so that adding looser ones never changes
    how common names are understood. Readable columns come before parsed structures.
    """
    written, plain = {name: name for name in seen.names}, _by_lower_name(seen.names)
    usual, wide = (USUAL_REQUESTS, USUAL_ANSWERS), (INSTRUCTION_COLUMNS, RESPONSE_COLUMNS)
    for readable in (True, False):
        for known, names in ((written, usual), (plain, usual), (plain, wide)):
            system = requested.get("system") or _first(SYSTEM_COLUMNS, known)
            if answer := _answer_of_tasks(known, requested, seen):
                return Columns("multi_task", input=known["input"], response=answer, system=system)
            any_value = json_values or not readable
            kept = {
                name: column for name, column in known.items() if any_value or seen.readable(column)
            }
            instruction, response = _exchange_columns(kept, requested, names)
            if instruction and response:
                taken = {instruction, response}
                # Earlier exchanges must be a list: a text named history is not a conversation.
                history = known.get("history", "")
                listed = not seen.filled(history) or seen.holds(history, LIST, MESSAGES)
                return Columns(
                    "instruction",
                    instruction=instruction,
                    input=requested.get("input") or _first(INPUT_COLUMNS, kept, taken),
                    response=response,
                    system=requested.get("system") or _first(SYSTEM_COLUMNS, kept),
                    history=history if listed else "",
                )
            if "text" in kept and not requested:
                return Columns("text", text=kept["text"])
    return None


def _answer_of_tasks(
    known: Mapping[str, str], requested: Mapping[str, str], seen: ColumnSurvey
) -> str:
    """The column with the answers of rows of several tasks, whose input is an object; else ""."""
    response = requested.get("response") or known.get("output", "")
    if "instruction" in {*known, *requested} or "input" not in known:
        return ""
    is_task = "task" in known and "response" not in requested
    return response if is_task or seen.holds(known["input"], OBJECT) else ""


def _by_lower_name(names: Iterable[str]) -> dict[str, str]:
    """Columns by their name in lower case without surrounding spaces, in order. If two names become
    equal, the one already written that way wins, else the first."""
    known: dict[str, str] = {}
    for name in names:
        plain = name.strip().lower()
        if plain not in known or name == plain:
            known[plain] = name
    return known


def _requested_columns(
    seen: ColumnSurvey, mapping: FieldMapping | None, text_field: str | None
) -> dict[str, str]:
    """The columns that the manifest names, by part; all of them exist."""
    names = seen.names
    mapped = {} if mapping is None else mapping.model_dump(include=set(FieldMapping.model_fields))
    # A part mapped to its own name is the default written out: automatic detection still applies.
    requested = {
        part: column
        for part, column in mapped.items()
        if column and not (part == column and column not in names)
    }
    if text_field is not None:
        requested["text"] = text_field  # rules of the manifest refuse another field_mapping.text
    for part, column in requested.items():
        if column not in names and (seen.whole or part not in _OPTIONAL):
            key = f"field_mapping.{part}" if mapped.get(part) else "text_field"
            near = closest(column, names, 0.8)
            meant = f"did you mean {near!r}? " if near else ""
            what = f"training.dataset.{key}: there is no column {column!r}"
            raise DataError(f"{what}  ({meant}{columns_found(names)})")
    whole = {"text": {"messages", "instruction", "response"}, "messages": {"instruction"}}
    if any(part in requested and requested.keys() & excluded for part, excluded in whole.items()):
        what = "either text, or messages, or instruction and response"
        raise DataError(f"{_MAPPING}: {what}  ({columns_found(names)})")
    if len(set(requested.values())) < len(requested):
        fix = f"{_MAPPING}.messages is for a column with whole conversations"
        raise DataError(f"{_MAPPING}: two parts are mapped to the same column  ({fix})")
    return requested


def _exchange_columns(
    known: Mapping[str, str],
    requested: Mapping[str, str],
    names: tuple[Sequence[str], Sequence[str]],
) -> tuple[str, str]:
    """The columns of request and answer, "" if missing."""
    taken = {column for part, column in requested.items() if part != "system"}
    doubtful = {known[name] for name in SPEAKERS & known.keys() if "assistant" not in known}
    instruction = requested.get("instruction") or _first(names[0], known, taken | doubtful)
    response = requested.get("response") or _first(names[1], known, taken | {instruction})
    if not instruction and response:
        instruction = _first(("input",), known, taken)
    return instruction, response


def _first(names: Sequence[str], known: Mapping[str, str], taken: Collection[str] = ()) -> str:
    """The first of these columns that exists and is not taken, else ""."""
    return next((known[n] for n in names if n in known and known[n] not in taken), "")


def _no_columns_error(
    seen: ColumnSurvey, known: Mapping[str, str], requested: Mapping[str, str]
) -> DataError:
    names = seen.names
    if "input_ids" in names:
        fix = "set training.dataset.use_pretokenized: true, or name the rows they were made from"
        return DataError(f"the rows are tokens already; {columns_found(names)}  ({fix})")
    candidates = (INSTRUCTION_COLUMNS, RESPONSE_COLUMNS)
    columns = _exchange_columns(known, requested, candidates)
    missing = [
        f"no column holds the {what} (looked for {', '.join(looked_for)})"
        for what, column, looked_for in zip(("request", "answer"), columns, candidates, strict=True)
        if not column
    ]
    fix = f"name them in {_MAPPING}: instruction and response, or text of formatted rows"
    conversations = (name for name in names if seen.holds(name, MESSAGES, CONVERSATION))
    by_name = next((known[name] for name in MESSAGE_COLUMNS if name in known), None)
    if by_name:
        fix = f"the column {by_name!r} holds no messages: it needs a list of them, or its JSON text"
    elif column := next(conversations, ""):
        fix = f"{_MAPPING}.messages: {column} reads its conversations"
    return DataError(f"{' and '.join(missing)}; {columns_found(names)}  ({fix})")


def columns_found(names: Iterable[str]) -> str:
    return f"columns found: {', '.join(names) or 'none'}"
