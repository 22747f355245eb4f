"""JSON from untrusted sources is validated, and errors name the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expert.core.events import read_events
from expert.core.links import LinkRefused
from expert.core.stored_json import (
    MAX_BYTES,
    InvalidFileError,
    read_object,
    read_object_or_empty,
    read_stored_json,
)
from tests.each import each


@each(
    ("raw", "what"),
    [
        (b"", "is not JSON as Expert writes it: "),
        (b"{", "is not JSON as Expert writes it: "),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "a number is too large"),
        (b'{"a": ' + b"9" * 400 + b"}", "a number is too large"),
        (b"[" * 101 + b"]" * 101, "it is nested more than 100 deep"),
        (b"[" * 90_000, "it is nested more than 100 deep"),
        (b'{"a": "\xff"}', " of the file is not UTF-8"),
        (b"[1]", "expected an object"),
        (b"null", "expected an object"),
    ],
)
def test_a_damaged_file_is_refused_by_name(raw: bytes, what: str, tmp_path: Path):
    file = tmp_path / "plan.json"
    file.write_bytes(raw)
    with pytest.raises(InvalidFileError, match=what) as refused:
        read_object(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert read_object_or_empty(file) == {}


def test_only_plain_files_of_a_sane_size_are_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", MAX_BYTES + 1)
    for name, error in (
        ("pipe", LinkRefused),
        ("loop", LinkRefused),
        ("folder", IsADirectoryError),
        ("large", InvalidFileError),
        ("gone", FileNotFoundError),
    ):
        with pytest.raises(error):
            read_stored_json(tmp_path / name)
        assert read_object_or_empty(tmp_path / name) == {}


@each(
    "line",
    [
        b'{"event": ["step"], "time": 1}',
        b'{"event": "step", "step": -1}',
        b'{"event": "step", "step": 1.5}',
        b'{"event": "step", "step": true}',
        b'{"event": "step", "loss": "much"}',
        b'{"event": "step", "loss": NaN}',
        b'{"event": "step", "time": 1e300}',
        b'{"event": "saved", "path": 5}',
        b'{"event": "resumed", "changed": "all"}',
        b'{"event": "step", "text": "' + b"x" * 2**21 + b'"}',
    ],
)
def test_an_event_with_a_field_of_another_kind_counts_as_a_damaged_line(
    line: bytes, tmp_path: Path
):
    file = tmp_path / "events.jsonl"
    sound = b'{"event": "step", "time": 1, "step": 1, "loss": "nan"}\n'
    file.write_bytes(sound + line + b"\n" + sound)
    events = read_events(file)
    assert len(list(events)) == 2
    assert events.damaged == 1
