"""Formats of data files and their file endings."""

from __future__ import annotations

from typing import Literal, get_args

RowFormat = Literal[
    "jsonl", "json", "csv", "tsv", "txt", "text", "parquet", "arrow", "excel", "huggingface"
]
MARKDOWN = (".md", ".markdown")
ENDINGS: dict[str, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "txt": (".txt", *MARKDOWN),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "excel": (".xlsx", ".xls", ".xlsb", ".xlsm", ".ods"),
}
COMPRESSED = (".gz", ".zst")
"""Endings that may follow, of compressed files."""
PACKED = (*COMPRESSED, *ENDINGS["parquet"], *ENDINGS["arrow"])
"""Endings of files whose size says little about their rows."""
ALL_ENDINGS = (*(ending for endings in ENDINGS.values() for ending in endings), *COMPRESSED)
WITHOUT_ROWS = {
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("metadata.json", "license.txt", "readme.txt", "requirements.txt"),
    *("license.md", "readme.md", "changelog.md", "contributing.md"),
    *("manifest.json", "test_cases.json"),  # of an expert in the same folder
}
"""Names of files that have such an ending, and describe something."""

assert {*ENDINGS} == {*get_args(RowFormat)} - {"text", "huggingface"}
