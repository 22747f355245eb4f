"""Data sets that `save_to_disk` wrote: found by their description, read from their Arrow files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from expert.data.read.folders import unread_files
from tests.data.read.source_folders import refusal, resolve, train_of, values
from tests.each import each


def save(folder: Path, rows: list[dict[str, Any]], *, shards: int = 1, **state: Any) -> None:
    """A folder as `Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    files = [f"data-{n:05}-of-{shards:05}.arrow" for n in range(shards)]
    for number, name in enumerate(files):
        table = pa.Table.from_pylist(rows[number::shards])
        with pa.OSFile(str(folder / name), "wb") as sink:
            writer = pa.ipc.new_stream(sink, table.schema)
            writer.write_table(table)
            writer.close()
    described = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(described | state), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")


def save_splits(folder: Path, **splits: list[dict[str, Any]]) -> None:
    for name, rows in splits.items():
        save(folder / name, rows)
    described = json.dumps({"splits": list(splits)})
    (folder / "dataset_dict.json").write_text(described, encoding="utf-8")


def test_a_saved_data_set_is_read_from_its_arrow_files_in_order(tmp_path):
    save(tmp_path / "saved", [{"n": n} for n in range(5)], shards=2)
    (tmp_path / "saved" / "cache-123.arrow").write_bytes(b"left over")
    sources = resolve(tmp_path, "saved")
    assert sources.train is not None
    assert (sources.train.kind, sources.validation) == ("saved", None)
    assert values(sources.train) == [{"n": n} for n in (0, 2, 4, 1, 3)]


def test_the_splits_of_a_saved_data_set_are_found_by_their_names(tmp_path):
    save_splits(tmp_path / "saved", train=[{"n": 1}], validation=[{"n": 2}], extra=[{"n": 3}])
    sources = resolve(tmp_path, "saved")
    assert sources.train is not None
    assert sources.validation is not None
    assert values(sources.train) == [{"n": 1}]
    assert values(sources.validation) == [{"n": 2}]
    assert sources.test is None
    assert values(train_of(tmp_path, "saved::extra")) == [{"n": 3}]
    assert "the saved data set has no split 'test'; its" in refusal(tmp_path, "saved::test")
    assert unread_files(tmp_path / "saved") == ["extra/"]


VIEW = "saved: it was saved as a view of another data set  (save the data set again)"


@each(
    ("description", "text"),
    [
        ("{", "saved/state.json: it cannot be read: Expecting property name"),
        ("[]", "saved/state.json: it does not describe a data set  (save it again)"),
        ("{}", "saved/state.json: it does not name the data files  (save the data set again)"),
        ('{"_data_files": [{"filename": "../../secret.arrow"}]}', VIEW),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', VIEW),
    ],
    ids=["broken", "array", "empty", "outside", "view"],
)
def test_a_saved_data_set_with_a_damaged_description_is_refused(description, text, tmp_path):
    save(tmp_path / "saved", [{"n": 1}])
    (tmp_path / "saved" / "state.json").write_text(description, encoding="utf-8")
    assert refusal(tmp_path, "saved").startswith(f"FOLDER/{text}")


@each("splits", ['["../x"]', '["/etc"]', '[".."]', "7", "[7]", "null"])
def test_splits_outside_the_folder_of_a_saved_data_set_are_refused(splits, tmp_path):
    save_splits(tmp_path / "saved", train=[{"n": 1}])
    described = tmp_path / "saved" / "dataset_dict.json"
    described.write_text(f'{{"splits": {splits}}}', encoding="utf-8")
    assert "dataset_dict.json: it does not name the splits" in refusal(tmp_path, "saved")
