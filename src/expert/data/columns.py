"""Which column of a data set holds which part of an example: as the manifest says, or by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from expert.data.records import DataError, Row
from expert.manifest.dataset import DatasetSpec, FieldMapping
from expert.manifest.slips import neighbour_of

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
TOOL_COLUMNS = ("tools", "functions")
MESSAGES_READ = 3
"""Changes with how messages are understood: what was prepared before is made anew."""
_TRUTHS = ("true", "false")

PREFERENCE = "preference rows need DPO; only supervised fine-tuning is built"
ONLY_CHOSEN = "training.dataset.field_mapping: response: chosen learns the preferred answers alone"
JUDGED = (
    "the column {!r} says of every answer whether it is good, and all of them would be learnt as "
    "good; only supervised fine-tuning is built"
)
ONLY_GOOD = (
    "keep the rows whose {!r} is true, and take the column out of them; to learn them all, name "
    "the columns in training.dataset.field_mapping: instruction and response"
)


class ColumnsNotFound(DataError):
    """A file whose columns do not hold what is looked for."""


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
    tools: str = ""
    history: str = ""

    def __str__(self) -> str:
        """What decides how a row is read: prepared tokens are kept by it. Parts that came later
        stand in it only where they are used."""
        names = ("kind", "instruction", "input", "response", "system", "text", "messages")
        later = tuple(name for name in ("tools", "history") if getattr(self, name))
        told = [f"{name}={getattr(self, name)!r}" for name in (*names, *later)]
        told += [f"read={MESSAGES_READ}"] if self.kind == "messages" else []
        return f"Columns({', '.join(told)})"

    def used(self) -> dict[str, str]:
        """Which part of an example is in which column."""
        parts = (
            "system",
            "history",
            "instruction",
            "input",
            "response",
            "tools",
            "messages",
            "text",
        )
        return {part: getattr(self, part) for part in parts if getattr(self, part)}

    def unused(self, names: Iterable[str]) -> tuple[str, ...]:
        """The columns that nothing is read from."""
        taken = set(self.used().values())
        return tuple(name for name in names if name not in taken)


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
            return _with_history(found, known, first_row)
    raise _not_understood(names, plain, asked)


def columns_of(row: Row, spec: DatasetSpec) -> Columns:
    """The columns of the rows that this one is the first of, as the manifest's data set says;
    what is wrong with them names the file."""
    try:
        return understand_columns(
            list(row.values), row.values, mapping=spec.field_mapping, text_field=spec.text_field
        )
    except DataError as error:
        raise ColumnsNotFound(f"{row.file}: {error}") from None


def _other_kinds(known: Mapping[str, str], first_row: Mapping[str, Any]) -> Columns | None:
    """Messages, or rows of several tasks; rows that say which answer is good are refused."""
    system = known.get("system", "")
    if {"chosen", "rejected"} <= known.keys():
        raise DataError(f"{PREFERENCE}  ({ONLY_CHOSEN}; {columns_found(known.values())})")
    judged = known.get("label") or known.get("kto_tag")
    is_answer = known.keys() & {"messages", "conversations", *RESPONSE_COLUMNS} - {"text"}
    if judged and is_answer and _says_yes_or_no(first_row.get(judged)):
        raise DataError(f"{JUDGED.format(judged)}  ({ONLY_GOOD.format(judged)})")
    for name in MESSAGE_COLUMNS:
        column = known.get(name)
        if column and isinstance(first_row.get(column), list | tuple | None):
            tools = next((known[name] for name in TOOL_COLUMNS if name in known), "")
            return Columns("messages", messages=column, system=system, tools=tools)
    if _is_multi_task(known, first_row):
        return Columns("multi_task", input=known["input"], response=known["output"], system=system)
    return None


def _says_yes_or_no(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in _TRUTHS)


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
            near = near_column(column, names)
            meant = f"did you mean {near!r}? " if near else ""
            raise DataError(
                f"training.dataset.{key}: there is no column {column!r}  "
                f"({meant}{columns_found(names)})"
            )
    if "text" in asked and asked.keys() & {"instruction", "response"}:
        raise DataError(
            "training.dataset.field_mapping: either text, or instruction and response  "
            f"({columns_found(names)})"
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


def _with_history(
    columns: Columns, known: Mapping[str, str], first_row: Mapping[str, Any]
) -> Columns:
    """Earlier exchanges stand in a list; a text of that name is no conversation."""
    column = known.get("history", "")
    listed = isinstance(first_row.get(column), list | tuple | None)
    if columns.kind != "instruction" or not column or not listed:
        return columns
    return replace(columns, history=column)


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
    if "input_ids" in names:
        return DataError(
            f"the rows are tokens already; {columns_found(names)}  (set "
            "training.dataset.use_pretokenized: true, or name the rows they were made from)"
        )
    candidates = (INSTRUCTION_COLUMNS, RESPONSE_COLUMNS)
    columns = _exchange_columns(known, asked, *candidates)
    missing = [
        f"no column holds the {what} (looked for {', '.join(looked_for)})"
        for what, column, looked_for in zip(("request", "answer"), columns, candidates, strict=True)
        if not column
    ]
    return DataError(
        f"{' and '.join(missing)}; {columns_found(names)}  (name them in "
        "training.dataset.field_mapping: instruction and response, or text where the rows are "
        "already formatted)"
    )


def near_column(column: str, names: Iterable[str]) -> str | None:
    """The column whose name is nearly this one."""
    by_letters = {name.lower(): name for name in names}
    near = neighbour_of(column.lower(), by_letters)
    return by_letters[near] if near is not None else None


def columns_found(names: Iterable[str]) -> str:
    """The columns that there are, in words."""
    return f"columns found: {', '.join(names) or 'none'}"
