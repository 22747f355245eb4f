"""Rows of the hub: ids, slices and streams, and what each failure says."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from typing import Any

import pyarrow as pa
import pytest

from expert.data.read import hub as reader
from expert.data.read.sources import Source, content_hash, iterate
from expert.data.records import Row
from tests.data.read.source_folders import (
    fill,
    names,
    refusal,
    refusal_while_reading,
    train_of,
    values,
)
from tests.each import each

CHECK_NETWORK = (
    "check the network; or download the data set elsewhere and name its folder as "
    "path, or set HF_HOME to a cache that holds it"
)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks the real hub, and no test has the answers of another."""
    monkeypatch.setattr(reader, "_answers", lambda: True)
    forget()


def forget() -> None:
    reader._opened.cache_clear()


@each(
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
def test_an_id_of_the_hub_carries_split_slice_and_configuration(path, expected, tmp_path):
    source = train_of(tmp_path, path)
    assert source.kind == "hub"
    assert (source.name, source.split, source.config) == expected


def test_a_manifest_that_says_huggingface_means_the_hub_unless_a_folder_is_there(tmp_path):
    assert train_of(tmp_path, "imdb", type="huggingface").kind == "hub"
    assert train_of(tmp_path, "imdb", format="huggingface").kind == "hub"
    assert "imdb: there is no FOLDER/imdb  (check" in refusal(tmp_path, "imdb")
    assert "a/b::c::d::e: too many '::'  (write id::split or " in refusal(tmp_path, "a/b::c::d::e")
    fill(tmp_path, "owner/name/train.jsonl", "owner/name/test.jsonl")
    source = train_of(tmp_path, "owner/name::test", format="huggingface")
    assert (source.kind, names(source, tmp_path)) == ("files", ["owner/name/test.jsonl"])


class FakeHub(types.ModuleType):
    """Stands for the package `datasets`: five rows under any name, or a failure."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("datasets")
        self.failure = failure
        self.config = types.SimpleNamespace(HF_HUB_OFFLINE=False)
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

    def iter(self, *, batch_size: int) -> Any:
        for number in self.rows:
            yield pa.table({"n": [number]})


def hub(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> FakeHub:
    module = FakeHub(failure)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_rows_of_the_hub_are_numbered_under_their_name_and_hashed_by_their_fingerprint(
    monkeypatch, tmp_path
):
    module = hub(monkeypatch)
    source = train_of(tmp_path, "a/b::train[:5]::c")
    assert list(iterate(source)) == [Row({"n": n}, "a/b::train[:5]", n + 1) for n in range(5)]
    assert module.asked == [("a/b", "c", "train[:5]", False)]
    assert content_hash(source) == hashlib.sha256(b"a/b c train[:5]").hexdigest()
    module.asked.clear()
    streamed = [train_of(tmp_path, f"a/b::{split}", streaming=True) for split in ("train", "test")]
    assert len({*map(content_hash, streamed)}) == 2
    assert module.asked == [], "of a stream the name"


CHECK_ID = (
    "check the id, the split and the configuration: id::split::configuration; a private or gated "
    "data set needs HF_TOKEN in the environment"
)


@each(
    ("failure", "what", "fix"),
    [
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub (LocalEntryNotFoundError)"),
            "the hub could not be reached: Couldn't reach 'a/b' on the Hub",
            CHECK_NETWORK,
        ),
        (
            ValueError('Unknown split\n"dev".' + "x" * 400),
            'it could not be loaded from the hub: Unknown split "dev".' + "x" * 280 + " …",
            CHECK_ID,
        ),
        (RuntimeError(), "it could not be loaded from the hub: RuntimeError", CHECK_ID),
    ],
    ids=["network", "split", "silent"],
)
def test_a_failure_of_the_hub_is_told_in_words(failure, what, fix, monkeypatch, tmp_path):
    hub(monkeypatch, failure)
    told = refusal_while_reading(train_of(tmp_path, "a/b::dev"))
    assert told.startswith(f"a/b::dev: {what}")
    assert told.endswith(f"  ({fix})")


def test_of_a_hub_that_does_not_answer_only_the_cache_is_used(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(reader, "_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    module = hub(monkeypatch)
    assert len(values(train_of(tmp_path, "a/b"))) == 5  # it had them in its cache
    assert module.config.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE


@each("streaming", [False, True])
def test_the_hub_is_asked_once_for_a_data_set_however_often_it_is_opened(
    streaming, monkeypatch, tmp_path
):
    forget()
    module = hub(monkeypatch)
    source = train_of(tmp_path, "a/b", streaming=streaming)
    assert values(source) == values(source)
    assert content_hash(source) == content_hash(source)
    assert len(module.asked) == 1
    values(train_of(tmp_path, "a/b::test", streaming=streaming))
    values(train_of(tmp_path, "c/d", streaming=streaming))
    assert len(module.asked) == 3


def test_the_package_datasets_reads_rows_and_slices_as_the_hub_does(monkeypatch, tmp_path):
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
    assert values(source("train", streaming=True)) == rows
    sliced = refusal_while_reading(source("train[:2]", streaming=True))
    assert sliced.endswith("streamed rows cannot be sliced  (set max_samples, or streaming: false)")
    assert content_hash(source("train")) == content_hash(source("train"))
    assert content_hash(source("train")) != content_hash(source("train[:5]"))
