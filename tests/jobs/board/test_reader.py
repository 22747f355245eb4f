"""Events are read from where the last read ended, and long runs are thinned out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.core.links import LinkRefused
from expert.jobs.board import reader as reading
from expert.jobs.board.reader import EventReader
from tests.each import each
from tests.insight.pages import eval_event, started, step_event, usual


def written(path: Path, events: list[dict[str, Any]], mode: str = "w") -> Path:
    with path.open(mode, encoding="utf-8") as stream:
        stream.write("".join(json.dumps(event) + "\n" for event in events))
    return path


def shortened(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without log lines that another one follows."""
    kinds = [event["event"] for event in events[1:]] + [""]
    pairs = zip(events, kinds, strict=True)
    return [event for event, following in pairs if (event["event"], following) != ("step",) * 2]


def test_an_incomplete_line_is_read_later(tmp_path):
    path = written(tmp_path / "events.jsonl", [started()])
    line = json.dumps(step_event(1)).encode()
    reader = EventReader(path)
    with path.open("ab") as stream:
        stream.write(line[:20])
    reader.read_new()
    assert len(reader.events) == 1
    with path.open("ab") as stream:
        stream.write(line[20:] + b"\n")
    reader.read_new()
    assert reader.events[-1] == step_event(1)
    reader.read_new()


def test_a_truncated_or_replaced_file_is_read_again(tmp_path):
    path = written(tmp_path / "events.jsonl", usual(9))
    reader = EventReader(path)
    reader.read_new()
    written(path, usual(3))
    reader.read_new()
    assert reader.events == shortened(usual(3))
    written(tmp_path / "other", usual(4)).replace(path)
    reader.read_new()
    assert reader.events == shortened(usual(4))


def test_damaged_lines_missing_files_and_links(tmp_path):
    EventReader(tmp_path / "none").read_new()
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "started"}\nnot json\n\n{"event": 5}\n')
    reader = EventReader(path)
    reader.read_new()
    assert [event["event"] for event in reader.events] == ["started"]
    assert reader.damaged == 2
    # A line that is too long is dropped.
    path.write_bytes(b"x" * (reading.MAX_LINE_BYTES + 2))
    reader = EventReader(path)
    reader.read_new()
    assert reader.damaged == 1
    reader.read_new()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkRefused):
        EventReader(path).read_new()


@each("chunk", [500, 5_000, 2**23])
def test_of_log_lines_in_a_row_the_last_is_kept(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "CHUNK", chunk)
    events = [started()]
    for step in range(1, 301):
        events += [step_event(step)] + ([eval_event(step)] if step % 100 == 0 else [])
    reader = EventReader(written(tmp_path / "events.jsonl", [*events, step_event(301)]))
    reader.read_new()
    assert reader.events == shortened([*events, step_event(301)])
    written(reader.path, [step_event(302)], "a")
    reader.read_new()
    assert reader.events == shortened([*events, step_event(302)])
