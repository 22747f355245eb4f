"""Hashes of data are computed once for every state of the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import expert.data.examples.cached_results as row_cache
from expert.data.examples.cached_results import cached_content_hash
from expert.data.read.sources import Source, content_hash


@pytest.fixture
def source(tmp_path: Path) -> Source:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": 1}\n', encoding="utf-8")
    return Source("a.jsonl", "files", (file,))


def test_the_hash_is_that_of_the_content_and_files_that_did_not_change_are_not_read_again(
    source, tmp_path, monkeypatch
):
    first = cached_content_hash(source, tmp_path / "cache")
    assert first == content_hash(source)
    (tmp_path / "cache" / row_cache.HASHES_FILE).write_text("{", encoding="utf-8")  # is forgotten
    assert cached_content_hash(source, tmp_path / "cache") == first
    with monkeypatch.context() as patch:
        patch.setattr(row_cache, "content_hash", lambda _: pytest.fail("read again"))
        assert cached_content_hash(source, tmp_path / "cache") == first
    source.files[0].write_text('{"a": 2}\n', encoding="utf-8")  # of the same size
    os.utime(source.files[0], ns=(1, 1))
    assert cached_content_hash(source, tmp_path / "cache") != first


def test_a_read_only_cache_only_costs_time(source, tmp_path):
    (tmp_path / "cache" / row_cache.HASHES_FILE).mkdir(parents=True)
    assert cached_content_hash(source, tmp_path / "cache") == content_hash(source)
