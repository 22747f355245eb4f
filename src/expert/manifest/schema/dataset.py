"""`training.dataset` and `training.decoding`: where rows come from, how answers are generated."""

from __future__ import annotations

from typing import Any, Literal

from expert.manifest.schema.file_formats import RowFormat
from expert.manifest.schema.types import (
    Count,
    Flag,
    NonNegativeInt,
    PositiveNumber,
    PositiveShare,
    Section,
    Share,
    Size,
    StrictSection,
    Temperature,
    Text,
)


class FieldMapping(StrictSection):
    """Which column of the data holds which part of an example."""

    instruction: Text | None = None
    """Column with the request."""
    input: Text | None = None
    """Column with optional context for the request."""
    response: Text | None = None
    """Column with the answer."""
    text: Text | None = None
    """Column with an already formatted example."""
    messages: Text | None = None
    """Column with whole conversations: lists of messages."""
    system: Text | None = None
    """Column with the system text."""
    tools: Text | None = None
    """Column with the tools available in a conversation."""
    rejected: Text | None = None
    """Column with rejected answers, for training on preferences; `response` has preferred ones."""
    label: Text | None = None
    """Column that says whether an answer is good, for method kto."""


class Task(Section):
    """One task of a multi-task data set, with its files."""

    train: Text
    """Training rows of the task."""
    valid: Text | None = None
    """Validation rows of the task."""
    test: Text | None = None
    """Test rows of the task."""
    weight: PositiveNumber = 1.0
    """Share of the rows used per epoch; 2: every row twice."""
    format: Literal["sft"] = "sft"
    """Kind of rows; preference rows are refused."""


class RowChecks(Section):
    """Rows that are dropped, and counted, before tokenising."""

    validate_json: Flag = False
    """Drop rows whose answer is not JSON."""
    validate_schema: Flag = False
    """Drop rows whose answer is not a valid JSON Schema."""
    deduplicate: Flag = False
    """Drop duplicate rows."""
    min_length: NonNegativeInt = 0
    """Shortest answer kept, in characters."""
    max_length: Count | None = None
    """Longest answer kept, in characters."""


class DatasetSpec(Section):
    """Where the rows come from. Paths are relative to the manifest."""

    path: Text | None = None
    """File, folder, corpus name, or hub id with `::split[::config]`."""
    validation_path: Text | None = None
    """Validation rows; without it, a share of the training rows is split off."""
    test_path: Text | None = None
    """Rows that are evaluated once, at the end."""
    validation_split: Share = 0.1
    """Share of the training rows split off for validation if no file is given; 0: none."""
    type: Literal["single", "huggingface", "multi_task"] | None = None
    """Kind of source; by default inferred from path and tasks."""
    format: RowFormat | None = None
    """File format, if the suffix does not show it."""
    encoding: Text | None = None
    """Encoding of text files that are not UTF-8, such as "cp1252"."""
    streaming: Flag = False
    """Read rows as they are needed, with bounded memory."""
    max_in_memory_samples: Count | None = None
    """Superseded: prepared tokens are memory-mapped, no rows are held in memory."""
    use_pretokenized: Flag = False
    """`path` holds tokenised rows (`input_ids`), used if they fit the tokenizer."""
    text_field: Text | None = None
    """Column with already formatted text."""
    field_mapping: FieldMapping | None = None
    """Columns of instruction, input, response, messages, … if they have other names."""
    preference_rows: Literal["preferred", "pairs", "judged", "all"] | None = None
    """Rows with chosen and rejected answers or a label: `pairs` trains on both answers (the default
    of methods like dpo, and only for them), `judged` on answers of which a label says whether they
    are good, or on pairs (the default of kto), `preferred` on the preferred answers alone; `all`
    ignores a label."""
    json_values: Flag = False
    """Train on lists and objects as JSON text; otherwise such rows are bad rows."""
    tasks: dict[str, Task] | None = None
    """Several data sets, trained together."""
    validation: RowChecks | None = None
    """Which rows are dropped."""
    augmentation: dict[str, Any] | None = None
    """Descriptive only: no augmentation is applied."""
    generation: dict[str, Any] | None = None
    """Descriptive only: rows are not generated."""
    max_chars: Count | None = None
    """Use only this many characters of a text corpus."""
    max_samples: Count | None = None
    """Use only the first N rows of each file or data set, for training and evaluation."""
    max_bad_rows: NonNegativeInt = 0
    """Unreadable rows to tolerate; each is counted and written to rejects.jsonl."""
    max_unpacked_size: Size | None = None
    """Largest unpacked size of a compressed file, such as "50GB"; null: 200 times its size, but at
    least 16 MiB. It stops zip bombs."""


class Decoding(Section):
    """How answers are generated in evaluation and sampling."""

    temperature: Temperature = 0.0
    """Sampling temperature; 0: always the most likely token."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens that make up this probability."""
    top_k: Count | None = None
    """Sample from this many most likely tokens."""
    min_p: Share = 0.0
    """Sample from tokens at least this likely, relative to the most likely one."""
    max_new_tokens: Count = 512
    """Longest answer, in tokens."""
    repetition_penalty: PositiveNumber = 1.0
    """Above 1: tokens that already occurred become less likely."""
    stop_sequences: list[Text] = []
    """Texts that end an answer."""
    validation: (
        Literal["parser", "parser-strict", "schema-strict", "tsc", "explain", "none"] | None
    ) = None
    """How strictly answers are checked."""
    validation_cmd: Text | None = None
    """Never run: commands from a manifest are not executed (see validate --judge-command)."""
    use_grammar: Flag = False
    """Answers keep to a grammar: that of grammar_file, else JSON where answers are JSON. Calls of
    tools and continued texts have none. Needs the extra `grammar`."""
    grammar_type: Text | None = None
    """What answers are judged as: json, sql, sql-postgres, cypher, typescript, text, open, …"""
    grammar_file: Text | None = None
    """With use_grammar: a JSON Schema (.json) or a Lark grammar (.lark), by its path beside the
    manifest."""
