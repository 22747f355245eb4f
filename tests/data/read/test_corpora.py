"""Texts that come by name: Shakespeare, fetched once and checked, and Python's own library."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from expert.data.read import corpora
from expert.data.read.corpora import SHAKESPEARE_ADDRESS, SHAKESPEARE_SHA256, python_stdlib_text
from expert.data.read.sources import content_hash
from expert.data.records import DataError
from tests.data import SHARED
from tests.data.read.source_folders import refusal_while_reading, train_of, values
from tests.each import each


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
    assert refusal_while_reading(train_of(home, "shakespeare")) == (
        f"shakespeare: the file downloaded from {SHAKESPEARE_ADDRESS} has a wrong "
        f"checksum  ({GIVE_IT})"
    )
    assert not (home / "cache").exists()
    answer_with(monkeypatch, failure)
    assert (
        refusal_while_reading(train_of(home, "shakespeare"))
        == f"shakespeare: it could not be fetched from {SHAKESPEARE_ADDRESS}: {reason}  ({GIVE_IT})"
    )


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside the checkout")
def test_the_known_checksum_is_that_of_the_real_file():
    real = (SHARED / "shakespeare" / "input.txt").read_bytes()
    assert hashlib.sha256(real).hexdigest() == SHAKESPEARE_SHA256


def test_the_standard_library_is_real_text_and_the_same_every_time(tmp_path):
    source = train_of(tmp_path, "python-stdlib", max_chars=500_000)
    (row,) = values(source)
    assert len(row["text"]) == 500_000
    assert "def " in row["text"]
    assert content_hash(source) == hashlib.sha256(row["text"].encode()).hexdigest()


def test_the_standard_library_is_sorted_and_leaves_out_tests_and_installed_packages(tmp_path):
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
    none = tmp_path / "none"
    with pytest.raises(DataError) as caught:
        python_stdlib_text(library=none)
    assert (
        str(caught.value)
        == f"python-stdlib: no sources of the standard library below {none}  (name a text file)"
    )
