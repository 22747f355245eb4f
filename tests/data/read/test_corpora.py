"""Texts that come by name: Shakespeare, fetched once and checked, and Python's own library."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from expert.data.read import corpora
from expert.data.read.corpora import SHAKESPEARE_ADDRESS
from expert.data.read.sources import content_hash
from tests.data.read.source_folders import refusal_while_reading, train_of, values
from tests.each import each


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user without corpora, with an empty cache."""
    monkeypatch.delenv("EXPERT_CORPORA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def test_shakespeare_is_the_users_own_file_where_there_is_one(home, monkeypatch):
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


def test_shakespeare_is_fetched_once_and_its_checksum_checked(home, monkeypatch):
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
    "put the text at corpora/shakespeare.txt beside the manifest, or at "
    "$EXPERT_CORPORA/shakespeare.txt"
)


@each(
    ("failure", "reason"),
    [
        (urllib.error.URLError(OSError("Name or service not known")), "Name or service not known"),
        (TimeoutError("timed out"), "timed out"),
        (ConnectionResetError(104, "Connection reset"), "[Errno 104] Connection reset"),
    ],
    ids=["name", "slow", "reset"],
)
def test_shakespeare_without_a_network_or_another_text_says_where_to_put_the_file(
    failure, reason, home, monkeypatch
):
    answer_with(monkeypatch, b"<html>not found</html>")
    told = refusal_while_reading(train_of(home, "shakespeare"))
    assert f"from {SHAKESPEARE_ADDRESS} has a wrong checksum  ({GIVE_IT})" in told
    assert not (home / "cache").exists()
    answer_with(monkeypatch, failure)
    told = refusal_while_reading(train_of(home, "shakespeare"))
    assert f"could not be fetched from {SHAKESPEARE_ADDRESS}: {reason}  ({GIVE_IT})" in told


def test_the_standard_library_is_real_text_and_the_same_every_time(tmp_path):
    source = train_of(tmp_path, "python-stdlib", max_chars=500_000)
    (row,) = values(source)
    assert len(row["text"]) == 500_000
    assert "def " in row["text"]
    assert content_hash(source) == hashlib.sha256(row["text"].encode()).hexdigest()
