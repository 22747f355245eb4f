"""Rows of somebody else: what is endless, huge or ambiguous is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.inputs import FEW, REFUSED, ROW, hostile_rows, write_manifest
from tests.hostile.limits import MOST_MEMORY, limited

NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]


@pytest.mark.fault(20)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_rows_are_refused(name: str, tmp_path: Path):
    hostile_rows(name, tmp_path)
    ended = limited("pretokenize", "-m", "manifest.json", folder=tmp_path)
    assert ended.code == 2, ended.text
    assert not ended.is_fault, ended.text
    assert ended.memory < MOST_MEMORY


@pytest.mark.fault(20)
@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "train", "diagnose"])
@pytest.mark.parametrize("name", ["a pipe", "a device without end", "a cell of 1.2 GB"])
def test_no_command_waits_for_rows_that_never_end(command: str, name: str, tmp_path: Path):
    hostile_rows(name, tmp_path)
    ended = limited(command, "-m", "manifest.json", folder=tmp_path)
    assert ended.code in (0, 2), ended.text  # a plan says what it does not know
    assert not ended.is_fault, ended.text
    assert ended.memory < MOST_MEMORY


@pytest.mark.slow
def test_rows_that_unpack_to_much_are_read_where_that_is_asked_for(tmp_path: Path):
    import gzip

    row = ROW.strip()[:-1] + b', "more": "' + b"x" * 100_000 + b'"}\n'
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(row * 1000))
    write_manifest(tmp_path, {"path": "rows.jsonl.gz"})
    words = ("pretokenize", "-m", "manifest.json")
    assert limited(*words, folder=tmp_path).code == 2
    asked = ("--set", "training.dataset.max_unpacked_size=1GB")
    assert limited(*words, *asked, folder=tmp_path).code == 0
