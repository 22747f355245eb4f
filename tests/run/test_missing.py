"""Missing models, files and columns are reported before anything is prepared or downloaded."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expert.data.examples.column_survey import survey_rows
from expert.data.examples.columns import ColumnsNotFound, detect_source_columns
from expert.data.read import sources as sources_of_rows
from expert.data.read.sources import iterate, resolve_sources
from expert.manifest.reader import read_manifest
from expert.run.missing import FIRST_ROWS, find_missing
from tests.each import each

NOWHERE = {"EXPERT_HOME": "/nowhere", "HF_HOME": "/nowhere"}
ROW = '{"question": "a", "answer": "b"}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "manifest.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def doubts(folder: Path, text: str) -> list[tuple[str, str]]:
    remarks, problems = find_missing(read_manifest(written(folder, text)), environ=NOWHERE)
    assert problems == []
    return [(each.path, each.text) for each in remarks]


def test_misspelt_models_and_rows_are_all_told_with_what_was_meant(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    folder = tmp_path / "models" / "support-base"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    models = "base_models: [tinny, suport-base, Qwen3-0.6b-bse, own/weights]\n"
    rows = "training: {dataset: {path: row.jsonl, test_path: elsewhere.jsonl}}\n"
    gone, no = "is not on this machine, and is not a known model name", f"there is no {tmp_path}/"
    assert doubts(tmp_path, models + rows) == [
        ("base_models[0].name", f"tinny: {gone}  (did you mean 'tiny'?)"),
        ("base_models[1].name", f"suport-base: {gone}  (did you mean 'support-base'?)"),
        ("base_models[2].name", f"Qwen3-0.6b-bse: {gone}  (did you mean 'Qwen3-0.6B-Base'?)"),
        ("training.dataset.path", f"row.jsonl: {no}row.jsonl  (did you mean 'rows.jsonl'?)"),
        (
            "training.dataset.test_path",
            f"elsewhere.jsonl: {no}elsewhere.jsonl  (check training.dataset.path)",
        ),
    ]


@each("model", ["tiny", "Qwen/Qwen3-0.6B", "Qwen3-0.6B", "owner/new-model"])
@each("rows", ["rows.jsonl", "shakespeare", "owner/rows"])
def test_what_is_there_or_may_be_on_the_hub_raises_no_doubt(tmp_path, model, rows):
    (tmp_path / "rows.jsonl").write_text(ROW)
    assert doubts(tmp_path, f"base_model: {model}\ndataset: {rows}\n") == []
    (tmp_path / "held").mkdir(exist_ok=True)  # with validation rows alone
    (tmp_path / "held" / "validation.jsonl").write_text(ROW)
    data = "{path: rows.jsonl, validation_path: held}"
    assert doubts(tmp_path, f"base_model: tiny\ntraining: {{dataset: {data}}}\n") == []
    (tmp_path / "lines.jsonl").write_text('{"line": "a"}\n')  # characters need no columns
    assert doubts(tmp_path, "base_model: char-gpt\ndataset: lines.jsonl\n") == []


MAPPED = "field_mapping: {instruction: questiom, response: answer}"
NO_COLUMN = (
    "training.dataset.field_mapping.instruction: there is no column 'questiom'  "
    "(did you mean 'question'? columns found: question, answer)"
)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_a_column_that_the_rows_do_not_have_is_told_in_the_words_of_the_run(tmp_path, name):
    file = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), file)
    else:
        file.write_text({"csv": "question,answer\na,b\n"}.get(name.split(".")[1], ROW))
    text = f"base_model: tiny\ntraining: {{dataset: {{path: {name}, {MAPPED}}}}}\n"
    assert doubts(tmp_path, text) == [("training.dataset.path", f"{file}: {NO_COLUMN}")]
    read = read_manifest(tmp_path / "manifest.yaml")
    source = resolve_sources(read.manifest.training.dataset, read.folder).train
    with pytest.raises(ColumnsNotFound, match=re.escape(f"{file}: {NO_COLUMN}")):
        detect_source_columns(survey_rows(iterate(source)), read.manifest.training.dataset)


def test_columns_are_looked_for_in_every_file_and_missing_files_are_told_beside_them(tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "held.jsonl").write_text('{"ask": "a", "answer": "b"}\n')
    rows = "path: rows.jsonl, validation_path: held.jsonl, test_path: elsewhere.jsonl"
    mapped = "field_mapping: {instruction: question, response: answer}"
    text = f"base_model: tiny\ntraining: {{dataset: {{{rows}, {mapped}}}}}\n"
    told = dict(doubts(tmp_path, text))
    assert list(told) == ["training.dataset.validation_path", "training.dataset.test_path"]
    assert "there is no column 'question'" in told["training.dataset.validation_path"]
    assert "there is no" in told["training.dataset.test_path"]


def test_only_the_first_rows_are_read_to_know_the_columns(tmp_path, monkeypatch):
    broken = "{\n" * (5 * FIRST_ROWS)
    (tmp_path / "rows.jsonl").write_text(broken + ROW)
    (tmp_path / "book.txt").write_text("once upon a time\n" * 100_000)
    asked = []
    read = sources_of_rows.read_rows

    def counted(path, **how):
        for row in read(path, **how):
            asked.append(row)
            yield row

    monkeypatch.setattr(sources_of_rows, "read_rows", counted)
    text = f"base_model: tiny\ntraining: {{dataset: {{path: rows.jsonl, {MAPPED}}}}}\n"
    assert doubts(tmp_path, text) == []  # the run tells of the rows
    assert len(asked) <= FIRST_ROWS + 1
    asked.clear()
    assert doubts(tmp_path, "base_model: tiny\ndataset: book.txt\n") == []
    assert [len(row.values["text"]) for row in asked] == [1]
