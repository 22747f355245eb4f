"""Sources: paths, folders, saved data sets, hub ids and corpora, and what each failure says."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.data import corpora
from expert.data.corpora import SHAKESPEARE_ADDRESS, SHAKESPEARE_SHA256, python_stdlib_text
from expert.data.records import BadRow, DataError, Row
from expert.data.sources import (
    Source,
    Sources,
    content_hash,
    iterate,
    resolve_sources,
    split_rows,
)
from expert.manifest.dataset import DatasetSpec, Task

FILES = Path(__file__).parent / "files"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def resolve(folder: Path, path: str | None = None, **fields: Any) -> Sources:
    return resolve_sources(DatasetSpec(path=path, **fields), folder)


def train_of(folder: Path, path: str, **fields: Any) -> Source:
    source = resolve(folder, path, **fields).train
    assert source is not None
    return source


def refusal(folder: Path, path: str | None = None, **fields: Any) -> str:
    with pytest.raises(DataError) as caught:
        resolve(folder, path, **fields)
    return str(caught.value).replace(str(folder), "FOLDER").replace(os.sep, "/")


def names(source: Source | None, folder: Path) -> list[str] | None:
    if source is None:
        return None
    return [path.relative_to(folder).as_posix() for path in source.files]


def values(source: Source) -> list[dict[str, Any]]:
    found = list(iterate(source))
    assert [str(row) for row in found if isinstance(row, BadRow)] == []
    return [dict(row.values) for row in found if isinstance(row, Row)]


def fill(folder: Path, *files: str) -> None:
    """Files of one row each, which holds the file's own name."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"from": name}) + "\n", encoding="utf-8")


# ---- files and folders


def test_a_path_is_relative_to_the_folder_of_the_manifest(tmp_path: Path):
    fill(tmp_path, "datasets/train.jsonl", "datasets/valid.jsonl", "held/back.jsonl")
    sources = resolve(
        tmp_path,
        "datasets/train.jsonl",
        validation_path="datasets/valid.jsonl",
        test_path="held/back.jsonl",
    )
    assert names(sources.train, tmp_path) == ["datasets/train.jsonl"]
    assert names(sources.validation, tmp_path) == ["datasets/valid.jsonl"]
    assert names(sources.test, tmp_path) == ["held/back.jsonl"]
    assert sources.tasks == ()
    assert sources.train is not None
    assert values(sources.train) == [{"from": "datasets/train.jsonl"}]


def test_windows_separators_and_absolute_paths_work(tmp_path: Path):
    fill(tmp_path, "datasets/train.jsonl")
    assert train_of(tmp_path, "datasets\\train.jsonl").files == (
        tmp_path / "datasets" / "train.jsonl",
    )
    absolute = str(tmp_path / "datasets" / "train.jsonl")
    assert train_of(Path("elsewhere"), absolute).files == (Path(absolute),)


def test_a_file_alone_has_no_validation_and_no_test(tmp_path: Path):
    fill(tmp_path, "train.jsonl", "valid.jsonl", "test.jsonl")
    sources = resolve(tmp_path, "train.jsonl")
    assert (sources.validation, sources.test) == (None, None)


def test_the_format_of_the_manifest_reads_a_file_without_a_suffix(tmp_path: Path):
    (tmp_path / "rows").write_text("a,b\n1,2\n", encoding="utf-8")
    assert values(train_of(tmp_path, "rows", format="csv")) == [{"a": "1", "b": "2"}]
    assert refusal(tmp_path, "rows") == (
        "FOLDER/rows: the name does not tell the format"
        "  (set training.dataset.format to one of jsonl, json, csv, tsv, txt, parquet, arrow)"
    )


@pytest.mark.parametrize(
    ("files", "train", "validation", "test"),
    [
        (["b.jsonl", "a.jsonl", "sub/c.jsonl"], ["a.jsonl", "b.jsonl", "sub/c.jsonl"], None, None),
        (
            ["train.jsonl", "valid.jsonl", "test.jsonl.gz", "metadata.json", "notes.md"],
            ["train.jsonl"],
            ["valid.jsonl"],
            ["test.jsonl.gz"],
        ),
        (
            ["sql_train.csv", "sql-dev.csv"],
            ["sql_train.csv"],
            ["sql-dev.csv"],
            None,
        ),
        (
            ["train/0.json", "train/1.json", "validation/0.json", "test/x/deep.json"],
            ["train/0.json", "train/1.json"],
            ["validation/0.json"],
            None,
        ),
        (
            ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "eval.jsonl"],
            ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
            ["eval.jsonl"],
            None,
        ),
        (["train.jsonl", "more.jsonl", "latest.jsonl"], ["latest.jsonl", "more.jsonl",
         "train.jsonl"], None, None),
        ([".hidden.jsonl", ".git/x.jsonl", "a.jsonl"], ["a.jsonl"], None, None),
    ],
)  # fmt: skip
def test_files_of_a_folder_become_the_splits_they_are_named_for(
    files: list[str],
    train: list[str],
    validation: list[str] | None,
    test: list[str] | None,
    tmp_path: Path,
):
    fill(tmp_path, *(f"rows/{name}" for name in files))
    sources = resolve(tmp_path, "rows")
    root = tmp_path / "rows"
    assert names(sources.train, root) == train
    assert names(sources.validation, root) == validation
    assert names(sources.test, root) == test


def test_a_named_validation_file_wins_and_the_folders_own_is_not_trained_on(tmp_path: Path):
    fill(tmp_path, "rows/train.jsonl", "rows/valid.jsonl", "own.jsonl")
    sources = resolve(tmp_path, "rows", validation_path="own.jsonl")
    assert names(sources.train, tmp_path) == ["rows/train.jsonl"]
    assert names(sources.validation, tmp_path) == ["own.jsonl"]


def test_a_folder_for_validation_gives_its_files_whatever_they_are_called(tmp_path: Path):
    fill(tmp_path, "train.jsonl", "held/part1.jsonl", "both/train.jsonl", "both/valid.jsonl")
    fill(tmp_path, "odd/test.jsonl")
    held = resolve(tmp_path, "train.jsonl", validation_path="held", test_path="both")
    assert names(held.validation, tmp_path) == ["held/part1.jsonl"]
    assert names(held.test, tmp_path) == ["both/train.jsonl", "both/valid.jsonl"]
    both = resolve(tmp_path, "train.jsonl", validation_path="both", test_path="both::train")
    assert names(both.validation, tmp_path) == ["both/valid.jsonl"]
    assert names(both.test, tmp_path) == ["both/train.jsonl"]


def test_a_folder_of_several_formats_needs_the_format_said(tmp_path: Path):
    fill(tmp_path, "rows/a.jsonl", "rows/b.jsonl", "rows/c.csv", "rows/README.txt")
    assert refusal(tmp_path, "rows") == (
        "FOLDER/rows: files of several formats: 1 csv, 2 jsonl"
        "  (say which are the rows with training.dataset.format)"
    )
    source = train_of(tmp_path, "rows", format="jsonl")
    assert names(source, tmp_path) == ["rows/a.jsonl", "rows/b.jsonl"]
    assert values(source) == [{"from": "rows/a.jsonl"}, {"from": "rows/b.jsonl"}]


def test_a_folder_without_training_files_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    fill(tmp_path, "held/test.jsonl")
    fix = "put .jsonl, .csv, .parquet or other data files there"
    assert refusal(tmp_path, "empty") == (
        f"empty: the folder has no data files for 'train'  ({fix})"
    )
    assert refusal(tmp_path, "held") == f"held: the folder has no data files for 'train'  ({fix})"
    assert refusal(tmp_path, "held::dev") == (
        f"held::dev: the folder has no data files for 'dev'  ({fix})"
    )


def test_a_path_that_is_not_there_is_refused_with_what_is(tmp_path: Path):
    fill(tmp_path, "datasets/train.jsonl")
    assert refusal(tmp_path, "datasets/train.json1") == (
        "datasets/train.json1: there is no FOLDER/datasets/train.json1"
        "  (did you mean 'train.jsonl'?)"
    )
    assert refusal(tmp_path, "datasets/zzz.csv") == (
        "datasets/zzz.csv: there is no FOLDER/datasets/zzz.csv  (check training.dataset.path)"
    )
    assert refusal(tmp_path, "nowhere/train.jsonl") == (
        "nowhere/train.jsonl: there is no FOLDER/nowhere/train.jsonl"
        "  (paths are relative to the folder of the manifest)"
    )


def test_splits_of_a_file_and_a_data_set_without_a_path_are_refused(tmp_path: Path):
    fill(tmp_path, "train.jsonl")
    assert refusal(tmp_path, "train.jsonl::test") == (
        "train.jsonl::test: a file has no splits  (leave out what follows '::')"
    )
    assert refusal(tmp_path) == "training.dataset: it names no rows  (set path or tasks)"


def test_tasks_keep_their_names_weights_and_files(tmp_path: Path):
    fill(tmp_path, "repair/train.jsonl", "repair/valid.jsonl", "schema/train.jsonl", "schema/t.csv")
    sources = resolve(
        tmp_path,
        type="multi_task",
        tasks={
            "repair": Task(train="repair/train.jsonl", valid="repair/valid.jsonl", weight=0.4),
            "schema": Task(train="schema\\train.jsonl", test="schema/t.csv"),
        },
    )
    assert sources.train is None
    repair, schema = sources.tasks
    assert (repair.name, repair.weight, repair.test) == ("repair", 0.4, None)
    assert names(repair.train, tmp_path) == ["repair/train.jsonl"]
    assert names(repair.validation, tmp_path) == ["repair/valid.jsonl"]
    assert (schema.name, schema.weight, schema.validation) == ("schema", 1.0, None)
    assert names(schema.train, tmp_path) == ["schema/train.jsonl"]
    assert names(schema.test, tmp_path) == ["schema/t.csv"]


def test_a_broken_row_of_a_source_keeps_its_own_file_and_line(tmp_path: Path):
    fill(tmp_path, "rows/a.jsonl")
    (tmp_path / "rows" / "b.jsonl").write_text('{"n": 1}\n\nnull\n', encoding="utf-8")
    found = list(iterate(train_of(tmp_path, "rows")))
    assert [type(row) for row in found] == [Row, Row, BadRow]
    assert str(found[2]) == (
        f"{tmp_path / 'rows' / 'b.jsonl'}:3: the line holds null, not a JSON object"
    )


def test_max_chars_is_spent_over_the_text_files_together(tmp_path: Path):
    for name, text in (("a.txt", "12345"), ("b.txt", "67890"), ("c.txt", "never")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert values(train_of(tmp_path, ".", max_chars=8)) == [{"text": "12345"}, {"text": "678"}]
    assert len(values(train_of(tmp_path, "."))) == 3
    assert len(values(train_of(FILES, "rivers.jsonl", max_chars=8))) == 3


# ---- saved data sets


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


def test_a_saved_data_set_is_read_from_its_arrow_files_in_order(tmp_path: Path):
    save(tmp_path / "saved", [{"n": n} for n in range(5)], shards=2)
    (tmp_path / "saved" / "cache-123.arrow").write_bytes(b"left over")
    sources = resolve(tmp_path, "saved")
    assert sources.train is not None
    assert (sources.train.kind, sources.validation) == ("saved", None)
    assert values(sources.train) == [{"n": n} for n in (0, 2, 4, 1, 3)]


def test_the_splits_of_a_saved_data_set_are_found_by_their_names(tmp_path: Path):
    save_splits(tmp_path / "saved", train=[{"n": 1}], validation=[{"n": 2}], extra=[{"n": 3}])
    sources = resolve(tmp_path, "saved")
    assert sources.train is not None
    assert sources.validation is not None
    assert values(sources.train) == [{"n": 1}]
    assert values(sources.validation) == [{"n": 2}]
    assert sources.test is None
    assert values(train_of(tmp_path, "saved::extra")) == [{"n": 3}]
    assert refusal(tmp_path, "saved::test") == (
        "saved::test: the saved data set has no split 'test'; its splits: train, validation, extra"
        "  (name one: path::split)"
    )


def test_what_the_package_datasets_saved_reads_back_equal(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"text": f"row {n}", "n": n} for n in range(25)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict(train=whole, test=whole.select([3, 4])).save_to_disk(str(tmp_path / "two"))
    assert values(train_of(tmp_path, "one")) == rows
    sources = resolve(tmp_path, "two")
    assert sources.train is not None
    assert sources.test is not None
    assert values(sources.train) == rows
    assert values(sources.test) == rows[3:5]


@pytest.mark.parametrize(
    ("description", "text"),
    [
        ("{", "saved/state.json: it cannot be read: Expecting property name"),
        ("[]", "saved/state.json: it is no description of a data set  (save it again)"),
        ("{}", "saved/state.json: it does not name the data files  (save the data set again)"),
        (
            '{"_data_files": [{"filename": "../../secret.arrow"}]}',
            "saved: it was saved as a view of another data set  (save the data set again)",
        ),
        (
            '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}',
            "saved: it was saved as a view of another data set  (save the data set again)",
        ),
    ],
    ids=["broken", "array", "empty", "outside", "view"],
)
def test_a_saved_data_set_with_a_damaged_description_is_refused(
    description: str, text: str, tmp_path: Path
):
    save(tmp_path / "saved", [{"n": 1}])
    (tmp_path / "saved" / "state.json").write_text(description, encoding="utf-8")
    assert refusal(tmp_path, "saved").startswith(f"FOLDER/{text}")


@pytest.mark.parametrize("splits", ['["../x"]', '["/etc"]', '[".."]', "7", "[7]", "null"])
def test_splits_outside_the_folder_of_a_saved_data_set_are_refused(splits: str, tmp_path: Path):
    save_splits(tmp_path / "saved", train=[{"n": 1}])
    described = tmp_path / "saved" / "dataset_dict.json"
    described.write_text(f'{{"splits": {splits}}}', encoding="utf-8")
    assert refusal(tmp_path, "saved") == (
        "FOLDER/saved/dataset_dict.json: it does not name the splits  (save it again)"
    )


# ---- the hub


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("b-mc2/sql-create-context", ("b-mc2/sql-create-context", "train", None)),
        ("owner/name::test", ("owner/name", "test", None)),
        ("owner/name::train[:1000]", ("owner/name", "train[:1000]", None)),
        ("owner/name::train[10%:20%]::main", ("owner/name", "train[10%:20%]", "main")),
        ("owner/name::::main", ("owner/name", "train", "main")),
        ("squad::train", ("squad", "train", None)),
    ],
)
def test_an_id_of_the_hub_carries_split_slice_and_configuration(
    path: str, expected: tuple[str, str, str | None], tmp_path: Path
):
    source = train_of(tmp_path, path)
    assert source.kind == "hub"
    assert (source.name, source.split, source.config) == expected


def test_a_manifest_that_says_huggingface_means_the_hub(tmp_path: Path):
    assert train_of(tmp_path, "imdb", type="huggingface").kind == "hub"
    assert train_of(tmp_path, "imdb", format="huggingface").kind == "hub"
    assert refusal(tmp_path, "imdb") == (
        "imdb: there is no FOLDER/imdb  (check training.dataset.path)"
    )
    assert refusal(tmp_path, "a/b::c::d::e") == (
        "a/b::c::d::e: too many '::'  (write id::split or id::split::configuration)"
    )


def test_a_local_folder_wins_over_an_id_of_the_hub(tmp_path: Path):
    fill(tmp_path, "owner/name/train.jsonl", "owner/name/test.jsonl")
    source = train_of(tmp_path, "owner/name::test", format="huggingface")
    assert (source.kind, names(source, tmp_path)) == ("files", ["owner/name/test.jsonl"])


class FakeHub(types.ModuleType):
    """Stands for the package `datasets`: five rows under any name, or a failure."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("datasets")
        self.failure = failure
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        self.asked.append((name, config, split, streaming))
        if self.failure:
            raise self.failure
        return FakeDataset(range(5), f"{name} {config} {split}")


class FakeDataset:
    def __init__(self, rows: range, fingerprint: str) -> None:
        self.rows = rows
        self._fingerprint = fingerprint

    def with_format(self, kind: str) -> FakeDataset:
        assert kind == "arrow"
        return self

    def skip(self, count: int) -> FakeDataset:
        return FakeDataset(self.rows[count:], "")

    def take(self, count: int) -> FakeDataset:
        return FakeDataset(self.rows[:count], "")

    def iter(self, *, batch_size: int) -> Any:
        for number in self.rows:
            yield pa.table({"n": [number]})


def hub(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> FakeHub:
    module = FakeHub(failure)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_rows_of_the_hub_are_numbered_under_their_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module = hub(monkeypatch)
    found = list(iterate(train_of(tmp_path, "a/b::train[:5]::c")))
    assert found == [Row({"n": n}, "a/b::train[:5]", n + 1) for n in range(5)]
    assert module.asked == [("a/b", "c", "train[:5]", False)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", [0, 1, 2, 3, 4]),
        ("train[:2]", [0, 1]),
        ("train[3:]", [3, 4]),
        ("train[1:3]", [1, 2]),
        ("train[3:1]", []),
    ],
)
def test_streamed_rows_are_cut_as_the_slice_says(
    split: str, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module = hub(monkeypatch)
    source = train_of(tmp_path, f"a/b::{split}", streaming=True)
    assert [row["n"] for row in values(source)] == expected
    assert module.asked == [("a/b", None, "train", True)]


def hub_refusal(source: Source) -> str:
    with pytest.raises(DataError) as caught:
        list(iterate(source))
    return str(caught.value)


def test_a_share_of_streamed_rows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    hub(monkeypatch)
    assert hub_refusal(train_of(tmp_path, "a/b::train[:10%]", streaming=True)) == (
        "a/b::train[:10%]: streamed rows can be cut by their numbers only"
        "  (write the slice as [start:end], or set streaming: false)"
    )


def test_the_hub_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = "a/b: reading from the hub needs the package 'datasets'  (pip install 'expert-cli[hub]')"
    assert hub_refusal(train_of(tmp_path, "a/b")) == text
    with pytest.raises(DataError, match="needs the package 'datasets'"):
        content_hash(train_of(tmp_path, "a/b"))


@pytest.mark.parametrize(
    ("failure", "what", "fix"),
    [
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)"),
            "the hub could not be reached: Couldn't reach 'a/b' on the Hub "
            "(LocalEntryNotFoundError)",
            "check the network, or download the data set elsewhere and name its folder as path",
        ),
        (
            FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub\nor cannot be accessed."),
            "the hub does not give it: Dataset 'a/b' doesn't exist on the Hub or cannot be "
            "accessed.",
            "check the id; a private or gated data set needs HF_TOKEN in the environment",
        ),
        (
            ValueError('Unknown split "dev".' + "x" * 400),
            'it could not be loaded from the hub: Unknown split "dev".' + "x" * 280 + " …",
            "check the id, the split and the configuration: id::split::configuration",
        ),
        (
            RuntimeError(),
            "it could not be loaded from the hub: RuntimeError",
            "check the id, the split and the configuration: id::split::configuration",
        ),
    ],
    ids=["network", "missing", "split", "silent"],
)
def test_a_failure_of_the_hub_is_told_in_words(
    failure: Exception, what: str, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    hub(monkeypatch, failure)
    assert hub_refusal(train_of(tmp_path, "a/b::dev")) == f"a/b::dev: {what}  ({fix})"


def test_a_network_lost_while_streaming_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    class Lost(FakeDataset):
        def iter(self, *, batch_size: int) -> Any:
            yield pa.table({"n": [1]})
            raise OSError("Connection reset by peer")

    module = hub(monkeypatch)
    monkeypatch.setattr(module, "load_dataset", lambda *_, **__: Lost(range(1), ""))
    assert hub_refusal(train_of(tmp_path, "a/b", streaming=True)) == (
        "a/b::train: the hub could not be reached: Connection reset by peer"
        "  (check the network, or download the data set elsewhere and name its folder as path)"
    )


def test_the_package_datasets_reads_rows_and_slices_as_the_hub_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"text": f"row {n}", "n": n} for n in range(10)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")

    def source(split: str, *, streaming: bool = False) -> Source:
        return Source(str(folder), "hub", split=split, streaming=streaming)

    assert values(source("train")) == rows
    assert values(source("train[20%:50%]")) == rows[2:5]
    assert values(source("train[2:5]", streaming=True)) == rows[2:5]
    assert content_hash(source("train")) == content_hash(source("train"))
    assert content_hash(source("train")) != content_hash(source("train[:5]"))


# ---- corpora


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without corpora, with an empty cache."""
    monkeypatch.delenv("EXPERT_CORPORA", raising=False)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    return tmp_path


def answer_with(monkeypatch: pytest.MonkeyPatch, content: bytes | Exception) -> list[str]:
    asked: list[str] = []

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        if isinstance(content, Exception):
            raise content
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_shakespeare_is_the_users_own_file_where_there_is_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = answer_with(monkeypatch, AssertionError("nothing is fetched"))
    (home / "corpora").mkdir()
    (home / "corpora" / "shakespeare.txt").write_text("beside the manifest", encoding="utf-8")
    assert values(train_of(home, "shakespeare")) == [{"text": "beside the manifest"}]
    (home / "own").mkdir()
    monkeypatch.setenv("EXPERT_CORPORA", str(home / "own"))
    assert values(train_of(home, "shakespeare")) == [{"text": "beside the manifest"}]
    (home / "own" / "shakespeare.txt").write_text("from the environment", encoding="utf-8")
    assert values(train_of(home, "shakespeare", max_chars=4)) == [{"text": "from"}]
    assert asked == []


def test_shakespeare_is_fetched_once_and_its_checksum_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    content = b"To be, or not to be.\n"
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    asked = answer_with(monkeypatch, content)
    source = train_of(home, "shakespeare")
    assert asked == []
    assert values(source) == [{"text": content.decode()}]
    assert content_hash(source) == content_hash(train_of(home, "shakespeare"))
    assert asked == [SHAKESPEARE_ADDRESS]
    cached = home / "cache" / "expert" / "corpora" / "shakespeare.txt"
    assert cached.read_bytes() == content
    cached.write_bytes(b"damaged")
    assert values(source) == [{"text": content.decode()}]
    assert asked == [SHAKESPEARE_ADDRESS] * 2


GIVE_IT = (
    "put the text at corpora/shakespeare.txt beside the manifest, "
    "or at $EXPERT_CORPORA/shakespeare.txt"
)


def test_another_text_under_the_address_of_shakespeare_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    answer_with(monkeypatch, b"<html>not found</html>")
    assert hub_refusal(train_of(home, "shakespeare")) == (
        f"shakespeare: what came from {SHAKESPEARE_ADDRESS} is not the known file: "
        f"wrong checksum  ({GIVE_IT})"
    )
    assert not (home / "cache").exists()


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (urllib.error.URLError(OSError("Name or service not known")), "Name or service not known"),
        (TimeoutError("timed out"), "timed out"),
        (ConnectionResetError(104, "Connection reset"), "[Errno 104] Connection reset"),
    ],
    ids=["name", "slow", "reset"],
)
def test_shakespeare_without_a_network_says_where_to_put_the_file(
    failure: Exception, reason: str, home: Path, monkeypatch: pytest.MonkeyPatch
):
    answer_with(monkeypatch, failure)
    assert hub_refusal(train_of(home, "shakespeare")) == (
        f"shakespeare: it could not be fetched from {SHAKESPEARE_ADDRESS}: {reason}  ({GIVE_IT})"
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside the checkout")
def test_the_known_checksum_is_that_of_the_real_file():
    real = (SHARED / "shakespeare" / "input.txt").read_bytes()
    assert hashlib.sha256(real).hexdigest() == SHAKESPEARE_SHA256


def test_the_standard_library_is_real_text_and_the_same_every_time(tmp_path: Path):
    source = train_of(tmp_path, "python-stdlib", max_chars=500_000)
    (row,) = values(source)
    assert len(row["text"]) == 500_000
    assert "def " in row["text"]
    assert values(source) == [row]
    assert content_hash(source) == content_hash(source)
    assert content_hash(source) != content_hash(train_of(tmp_path, "python-stdlib", max_chars=99))


def test_the_standard_library_is_sorted_and_leaves_out_tests_and_installed_packages(tmp_path: Path):
    library = {
        "b.py": b"B = 1",
        "a/z.py": b"Z\r\n",
        "a.py": b"A\n",
        "broken.py": b"\xff\n",
        "notes.txt": b"text\n",
        "test/test_a.py": b"no\n",
        "a/tests/t.py": b"no\n",
        "site-packages/x.py": b"no\n",
        "a/__pycache__/c.py": b"no\n",
    }
    for name, content in library.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert python_stdlib_text(library=tmp_path) == "A\nZ\nB = 1\n"
    assert python_stdlib_text(4, library=tmp_path) == "A\nZ\n"
    assert python_stdlib_text(3, library=tmp_path) == "A\nZ"


def test_a_python_without_sources_is_told(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        python_stdlib_text(library=tmp_path)
    assert str(caught.value) == (
        f"python-stdlib: no sources of the standard library below {tmp_path}  (name a text file)"
    )


# ---- hashes


def test_a_hash_depends_on_the_content_and_not_on_the_name(tmp_path: Path):
    fill(tmp_path, "a.jsonl")
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "copy.jsonl").write_bytes(content)
    first = content_hash(train_of(tmp_path, "a.jsonl"))
    assert len(first) == 64
    assert content_hash(train_of(tmp_path, "copy.jsonl")) == first
    (tmp_path / "a.jsonl").write_bytes(content.replace(b"from", b"form"))
    assert content_hash(train_of(tmp_path, "a.jsonl")) != first


def test_a_hash_depends_on_how_the_bytes_are_read_and_where_files_end(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"xy")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for name, content in (("one/a", b"x"), ("one/b", b"yz"), ("two/a", b"xy"), ("two/b", b"z")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"xy"))
    hashes = [
        content_hash(train_of(tmp_path, "a.txt")),
        content_hash(train_of(tmp_path, "a.txt", format="csv")),
        content_hash(train_of(tmp_path, "a.txt", max_chars=1)),
        content_hash(train_of(tmp_path, "one")),
        content_hash(train_of(tmp_path, "two")),
        content_hash(train_of(tmp_path, "packed.txt.gz")),
    ]
    assert len(set(hashes)) == len(hashes)


def test_hashing_a_file_that_went_away_is_refused(tmp_path: Path):
    fill(tmp_path, "a.jsonl")
    source = train_of(tmp_path, "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        content_hash(source)
    assert str(caught.value) == (
        f"{tmp_path / 'a.jsonl'}: it cannot be read: No such file or directory"
    )


def test_the_hash_of_the_hub_is_the_fingerprint_or_the_name_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    module = hub(monkeypatch)
    loaded = content_hash(train_of(tmp_path, "a/b::train"))
    assert loaded == hashlib.sha256(b"a/b None train").hexdigest()
    assert module.asked
    module.asked.clear()
    streamed = content_hash(train_of(tmp_path, "a/b", streaming=True))
    assert streamed != content_hash(train_of(tmp_path, "a/b::test", streaming=True))
    assert module.asked == []


# ---- the split


def test_the_split_is_the_same_for_the_same_seed_and_another_for_another():
    first = split_rows(1000, 0.1, 42)
    assert (split_rows(1000, 0.1, 42) == first).all()
    assert (split_rows(1000, 0.1, 43) != first).any()
    # Pinned: a run that is resumed later must hold back the rows it held back before.
    assert np.flatnonzero(split_rows(40, 0.1, 42)).tolist() == [7, 18, 32, 39]


@given(count=st.integers(0, 500), hundredths=st.integers(0, 100), seed=st.integers(0, 2**32 - 1))
def test_exactly_the_asked_share_is_split_off_rounded_up(count: int, hundredths: int, seed: int):
    marks = split_rows(count, hundredths / 100, seed)
    assert marks.shape == (count,)
    assert marks.dtype == np.bool_
    assert int(marks.sum()) == -(-count * hundredths // 100)


def test_the_split_touches_no_shared_random_state():
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    split_rows(100, 0.5, 7)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
