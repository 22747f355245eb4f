"""Reading rows: the same from every format, in bounded memory, and what is written reads back."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data.read.rows import FORMATS, file_format, read_rows
from expert.data.records import BadRow, DataError, Row
from tests.data import FILES
from tests.data.read.row_files import RIVERS, good, outline, write, written, zst
from tests.each import each

TWINS = sorted(FILES.glob("rivers*"))
UNPACKED_TWINS = [path for path in TWINS if path.suffix not in (".gz", ".zst")]


def test_every_format_has_a_test_file():
    assert {file_format(path) for path in FILES.iterdir()} == set(FORMATS) - {"excel"}
    assert (len(RIVERS), len(TWINS), len(UNPACKED_TWINS)) == (3, 12, 10)
    assert RIVERS[2]["instruction"] == 'Is there a river called "Þjórsá"?'


@each("path", TWINS, ids=lambda path: path.name)
def test_the_same_rows_come_out_of_every_format(path):
    assert good(path) == RIVERS


@each("path", UNPACKED_TWINS, ids=lambda path: path.name)
@each("packing", [".gz", ".zst"])
def test_the_same_rows_come_out_of_every_packed_format(path, packing, tmp_path):
    packed = tmp_path / (path.name + packing)
    if packing == ".gz":
        packed.write_bytes(gzip.compress(path.read_bytes()))
    else:
        zst(path.read_bytes(), packed)
    assert good(packed) == RIVERS


@each(
    ("name", "lines"),
    [
        ("rivers.jsonl", [1, 2, 3]),
        ("rivers.json", [2, 7, 12]),
        ("rivers_under_data.json", [4, 9, 14]),
        ("rivers.csv", [2, 3, 5]),
        ("rivers.parquet", [1, 2, 3]),
        ("rivers.arrow", [1, 2, 3]),
    ],
)
def test_a_row_knows_its_file_and_the_line_it_starts_on(name, lines):
    found = list(read_rows(FILES / name))
    assert [row.line for row in found] == lines
    assert {row.file for row in found} == {str(FILES / name)}


@each("name", ["a.parquet", "a.arrow"])
def test_a_call_in_a_table_has_no_arguments_of_other_calls(name, tmp_path):
    """A struct has the keys of all rows, and null where a row has none."""

    def calling(**arguments: int) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        tools = [{"name": "f", "parameters": {key: {"type": "integer"} for key in arguments}}]
        return {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": tools}

    rows = [{**calling(x=1), "note": {"a": None, "b": 1}}, {**calling(y=2), "note": {"a": 1}}]
    write(tmp_path / name, rows)
    rows[1]["note"] = {"a": 1, "b": None}  # what is no call is as it is
    assert good(tmp_path / name) == rows


def test_the_given_format_wins_over_the_suffix(tmp_path):
    path = written(tmp_path, "rows.txt", '{"a": 1}\n')
    assert good(path, format="jsonl") == [{"a": 1}]
    assert good(written(tmp_path, "rows.data", "a\nx\n"), format="csv") == [{"a": "x"}]
    tabs = written(tmp_path, "rows.tsv", "a\tb\nx\ty\n")
    assert good(tabs, format="csv") == [{"a": "x", "b": "y"}]
    assert good(path, format="text") == [{"text": '{"a": 1}\n'}]
    assert good(FILES / "rivers.jsonl", format="huggingface") == RIVERS


# ---- memory


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_line_of_50_mb_is_passed_over_in_bounded_memory(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as stream:
        stream.write(b'{"a": "' + b"y" * 50_000_000 + b'"}\n{"a": "x"}\n')
    found: list[Row | BadRow] = []
    # Measured peak: 10.3 MB.
    rows = read_rows(tmp_path / "a.jsonl.gz", max_unpacked=10**9)
    assert peak_bytes(lambda: found.extend(rows)) < 30_000_000
    bad, row = found
    assert isinstance(bad, BadRow)
    assert bad.reason == "50.0 MB long, the limit is 5 MB"
    assert isinstance(row, Row)
    assert row.values == {"a": "x"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.arrow"])
def test_memory_does_not_grow_with_the_rows(name, tmp_path):
    small = peak_while_reading(tmp_path, name, 500)
    large = peak_while_reading(tmp_path, name, 3_500)
    # 3,000 more rows held as values would be 1.5 MB; a window or batch more is 0.3 MB.
    assert large < small + 1_000_000


def peak_while_reading(folder: Path, name: str, count: int) -> int:
    path = folder / f"{count}{name}"
    write(path, [{"a": f"{n:0200}"} for n in range(count)])
    return peak_bytes(lambda: sum(1 for _ in read_rows(path)))


# ---- what is written reads back


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
text_rows = st.lists(
    st.fixed_dictionaries({"instruction": texts, "input": texts, "output": texts}),
    min_size=1,
    max_size=8,
)
numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(rows=text_rows, name=st.sampled_from(["a.csv", "a.tsv", "a.parquet", "a.arrow"]))
def test_rows_of_text_written_in_any_table_format_read_back_equal(tmp_path_factory, rows, name):
    path = tmp_path_factory.mktemp("rows") / name
    write(path, rows)
    assert good(path) == rows


@given(
    rows=st.lists(st.dictionaries(texts, json_values, max_size=4), max_size=6),
    name=st.sampled_from(["a.jsonl", "a.json"]),
)
def test_rows_written_as_json_read_back_equal(tmp_path_factory, rows, name):
    path = tmp_path_factory.mktemp("rows") / name
    write(path, rows)
    assert good(path) == rows


@given(
    content=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.txt"])
)
def test_any_bytes_are_rows_bad_rows_or_a_data_error(tmp_path_factory, content, name):
    path = written(tmp_path_factory.mktemp("rows"), name, content)
    try:
        found = list(read_rows(path))
    except DataError:
        return
    lines = content.count(b"\n") + content.count(b"\r") + 1
    assert all(1 <= row.line <= lines for row in found)
    json.dumps([row.raw for row in found if isinstance(row, BadRow)]).encode()


@given(text=st.text(st.sampled_from('[]{}",:\\ \n1an'), max_size=40))
def test_any_array_gives_the_rows_that_json_itself_finds(tmp_path_factory, text):
    path = written(tmp_path_factory.mktemp("rows"), "a.json", f"[{text}]")
    try:
        expected = json.loads(f"[{text}]")
    except ValueError:
        return
    found = outline(path)
    assert len(found) == len(expected)
    objects = [values for _, values in found if isinstance(values, dict)]
    assert objects == [value for value in expected if isinstance(value, dict)]
