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


def total(reader: EventReader, key: str) -> float:
    return sum(event.get(key) or 0 for event in reader.events if event["event"] == "step")


def test_an_incomplete_line_is_read_later(tmp_path):
    path = written(tmp_path / "events.jsonl", [started()])
    line = json.dumps(step_event(1)).encode()
    reader = EventReader(path)
    with path.open("ab") as stream:
        stream.write(line[:20])
    assert reader.read_new()
    assert len(reader.events) == 1
    with path.open("ab") as stream:
        stream.write(line[20:] + b"\n")
    assert reader.read_new()
    assert reader.events[-1] == step_event(1)
    assert not reader.read_new()


def test_a_truncated_or_replaced_file_is_read_again(tmp_path):
    path = written(tmp_path / "events.jsonl", usual(9))
    reader = EventReader(path)
    reader.read_new()
    written(path, usual(3))
    assert reader.read_new()
    assert reader.events == usual(3)
    written(tmp_path / "other", usual(4)).replace(path)
    assert reader.read_new()
    assert reader.events == usual(4)


def test_damaged_lines_missing_files_and_links(tmp_path):
    assert not EventReader(tmp_path / "none").read_new()
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
    assert not reader.read_new()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LinkRefused):
        EventReader(path).read_new()


def test_a_growing_run_keeps_few_lines_and_all_sums(tmp_path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(path, most=50)
    for first in range(1, 1000, 30):
        written(path, [step_event(n) for n in range(first, first + 30)], "a")
        reader.read_new()
        assert len(reader.events) <= 100
    last = reader.events[-1]["step"]
    assert total(reader, "updates") == last
    assert total(reader, "tokens") == 1000 * last
    assert reader.sampled


@each("chunk", [5_000, 2**23])
def test_log_lines_of_a_long_file_are_sampled(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "WHOLE_BYTES", 10_000)
    monkeypatch.setattr(reading, "CHUNK", chunk)
    events = [started()]
    for step in range(1, 801):
        events.append(step_event(step))
        if step % 100 == 0:
            events.append(eval_event(step))
    path = written(
        tmp_path / "events.jsonl", [*events, {"time": 1.0, "event": "odd"}, step_event(801)]
    )
    reader = EventReader(path, most=40)
    assert reader.read_new()
    kinds = [event["event"] for event in reader.events]
    assert kinds.count("eval") == 8
    assert kinds.count("odd") == 1
    assert 30 <= kinds.count("step") <= 80
    steps = [event["step"] for event in reader.events if event["event"] == "step"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 801
    assert total(reader, "updates") == 801
    assert total(reader, "tokens") == pytest.approx(801_000)
    evals = [place for place, kind in enumerate(kinds) if kind == "eval"]
    for place in evals:  # in the order of the file
        before = [event["step"] for event in reader.events[:place] if event["event"] == "step"]
        assert max(before, default=0) <= reader.events[place]["step"]
    assert not reader.read_new()
    written(path, [step_event(802)], "a")
    assert reader.read_new()
    assert reader.events[-1] == step_event(802)
