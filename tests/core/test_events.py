"""Events are written completely, in full precision and without secrets, and never stop training."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert.core.events import EventLog, follow, plain, read_events
from expert.core.secrets import known_secrets, redacted
from tests.each import each
from tests.faults.counting import case


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_an_event_is_one_flat_line_with_its_time_and_step_first(path: Path):
    with EventLog(path, clock=lambda: 12.5) as log:
        log.emit("step", step=3, loss=0.25)
        log.emit("started", expert="sql")
    assert path.read_text() == (
        '{"event": "step", "time": 12.5, "step": 3, "loss": 0.25, "crc32": "d9d5d4ae"}\n'
        '{"event": "started", "time": 12.5, "expert": "sql", "crc32": "ffac09e7"}\n'
    )


def test_a_line_is_in_the_file_before_the_log_is_closed(path: Path):
    path.write_text('{"event": "a"}\n{"event": "b", "lo')  # torn by an earlier process
    log = EventLog(path)
    log.emit("c")
    found = read_events(path)
    assert [event["event"] for event in found] == ["a", "c"]
    assert found.damaged == 1
    log.close()
    log.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_their_full_precision(number: float):
    assert json.loads(json.dumps(plain({"x": number})))["x"].hex() == number.hex()


@each(
    ("value", "stored"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (np.float32("nan"), "nan"),
        (np.float32(0.1), 0.10000000149011612),
        (np.int64(7), 7),
        (True, True),
        (None, None),
        (2**80, 2**80),
        (Path("/a/b"), "/a/b"),
        ((1, float("nan")), [1, "nan"]),
        ({"a": float("inf")}, {"a": "inf"}),
        ("é\u2028\n\ud800", "é\u2028\n\ud800"),
    ],
)
def test_every_line_is_valid_json(tmp_path: Path, value: object, stored: object):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("step", value=value)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    content = path.read_bytes()
    assert content.count(b"\n") == 1
    found = json.loads(content, parse_constant=refuse)["value"]
    assert (type(found), found) == (type(stored), stored)


def test_a_sink_that_fails_is_reported_to_the_others_once_and_does_not_stop_anything(path: Path):
    seen: list[str] = []
    refused: list[str] = []

    def broken(event: dict[str, Any]) -> None:
        refused.append(event["event"])
        raise RuntimeError("no terminal")

    def watching(event: dict[str, Any]) -> None:
        seen.append(event["event"])

    with EventLog(path, [broken, watching]) as log:
        log.emit("a")
        log.emit("b")
    assert [event["event"] for event in lines(path)] == ["a", "log_failed", "b"]
    assert "broken failed" in lines(path)[1]["what"]
    assert "no terminal" in lines(path)[1]["because"]
    assert seen == ["log_failed", "a", "b"]
    assert refused == ["a", "b"]


@pytest.mark.fault(7)
def test_a_full_disk_gives_one_warning_and_the_lines_follow_when_there_is_room(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[dict[str, Any]] = []
    full = False
    real_write = os.write

    def write(descriptor: int, content: bytes) -> int:
        if not full:
            return real_write(descriptor, content)
        if len(content) > 10:
            return real_write(descriptor, content[:10])  # a part still fits
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    log = EventLog(path, [seen.append])
    log.emit("a")
    full = True
    log.emit("b" * 3)
    log.emit("c")
    full = False
    log.emit("d")
    log.close()
    monkeypatch.undo()
    assert [event["event"] for event in seen] == ["a", "log_failed", "bbb", "c", "d"]
    assert "No space left" in seen[1]["because"]
    assert str(path) in seen[1]["because"]
    found = read_events(path)
    assert [event["event"] for event in found] == ["a", "bbb", "c", "d"]
    assert found.damaged >= 1  # the partial lines


def test_threads_write_whole_lines(path: Path):
    got: list[Any] = []
    with EventLog(path, [got.append]) as log:

        def work(number: int) -> None:
            for step in range(200):
                log.emit("step", step=step, thread=number, text="x" * 300)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read_events(path)
    everything = list(found)
    assert found.damaged == 0
    assert everything == got  # the sinks see the order of the file
    for number in range(4):
        steps = [event["step"] for event in everything if event["thread"] == number]
        assert steps == list(range(200))


def test_secrets_of_the_environment_become_stars(path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    def broken(event: dict[str, Any]) -> None:
        raise RuntimeError("hf_canary0123")

    monkeypatch.setenv("HF_TOKEN", "hf_canary0123")
    with EventLog(path, [seen.append, broken]) as log:
        monkeypatch.setenv("OTHER_API_KEY", "canary/with space")  # set after the log was made
        log.emit(
            "failed",
            why="GET https://x?t=hf_canary0123 said no",
            url="https://x?k=canary%2Fwith%20space",
            more=["hf_canary0123", {"deep": "a hf_canary0123 b"}],
            error=ValueError("hf_canary0123"),
        )
    assert "canary" not in path.read_text()
    assert "canary" not in str(seen)
    assert lines(path)[0]["why"] == "GET https://x?t=*** said no"
    assert lines(path)[0]["more"] == ["***", {"deep": "a *** b"}]


@each(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "12345678", True),
        ("WANDB_API_KEY", "12345678", True),
        ("AWS_SECRET_ACCESS_KEY", "12345678", True),
        ("MY_SECRET_2", "12345678", True),
        ("PGPASSWORD", "12345678", True),
        ("api_key", "12345678", True),
        ("TOKENS", "12345678", True),
        ("HF_TOKEN", "1234567", False),
        ("HF_TOKEN", "  1234567  ", False),
        ("TOKENIZERS_PARALLELISM", "12345678", False),
        ("KEYBOARD", "12345678", False),
        ("PATH", "12345678", False),
        ("SSH_KEY_PATH", "/root/.ssh", False),
        ("TOKEN_FILE", "/root/token", False),
    ],
)
def test_which_variables_are_secrets(name: str, value: str, secret: bool, monkeypatch: Any):
    monkeypatch.setattr("expert.core.secrets._manifest_secrets", set())  # of other tests
    assert bool(known_secrets({name: value})) is secret
    both = known_secrets({"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-ijkl"})
    assert redacted("abcdefgh-ijkl abcdefgh", both) == "*** ***", "the longer one first"


@each(
    ("content", "found", "damaged"),
    [
        (b"", [], 0),
        (b'{"event": "a"}\n{"event": "b"}\n', ["a", "b"], 0),
        (b'{"event": "a"}\n{"event": "b', ["a"], 0),
        (b'{"event": "a"}\n{"event": "b"}', ["a", "b"], 0),
        (b'{"event": "a"}\n\n{"event": "b"}\n', ["a", "b"], 0),
        (b'{"event": "a"}\n{"eve\n{"event": "b"}\n', ["a", "b"], 1),
        (b'\x00\x00\x00\n\xff\xfe\n[]\n{}\n"event"\n{"event": "b"}\n', ["b"], 5),
        (b"[" * 100_000 + b'\n{"event": "b"}\n', ["b"], 1),
        # A line without a checksum, as another program writes it.
        (b'{"event": "step", "time": 12.5, "step": 3, "loss": 0.25}\n', ["step"], 0),
    ],
)
def test_a_torn_last_line_is_left_out_and_damaged_lines_are_counted(
    tmp_path: Path, content: bytes, found: list[str], damaged: int
):
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    stored = read_events(path)
    assert [event["event"] for event in stored] == found
    assert stored.damaged == damaged


def followed(path: Path, changes: list[Callable[[], object]]) -> list[str]:
    """The events read while the file changes between two reads, and after the last change."""
    left = list(changes)
    found = follow(path, lambda: not left, 0.25, sleep=lambda seconds: (left.pop(0)(), None)[1])
    return [event["event"] for event in found]


def test_following_gives_each_line_once_when_it_is_whole(path: Path):
    parts = [b"", b'{"event": "a"}\n{"eve', b'nt": "b"}', b"\nrubbish\n", b'{"event": "c"}\n']

    def add(part: bytes) -> None:
        with path.open("ab") as stream:
            stream.write(part)

    assert followed(path, [partial(add, part) for part in parts]) == ["a", "b", "c"]
    # A file that became shorter is read from its start.
    assert followed(path, [lambda: path.write_text('{"event": "new"}\n')]) == [*"abc", "new"]


def test_what_was_written_before_the_end_is_still_given(path: Path):
    answers = iter([False, True])

    def stop() -> bool:
        answer = next(answers)
        if answer:
            path.write_text('{"event": "last"}\n')  # just before the end is announced
        return answer

    got = [event["event"] for event in follow(path, stop, sleep=lambda seconds: None)]
    assert got == ["last"]


@pytest.mark.fault(8)
def test_a_flip_of_any_bit_of_a_line_is_counted_and_never_read_as_another_number(path: Path):
    with EventLog(path, clock=lambda: 12.5) as log:
        for step, loss in ((1, 0.75), (2, 0.25), (3, 0.125)):
            log.emit("step", step=step, loss=loss)
    good, expected = path.read_bytes(), list(read_events(path))
    start, end = good.index(b"\n") + 1, good.rindex(b"\n", 0, -1)
    for place in range(start, end):
        for bit in range(8):
            line = bytearray(good)
            line[place] ^= 1 << bit
            path.write_bytes(line)
            with case():
                events = read_events(path)
                found = list(events)
                assert [found[0], found[-1]] == [expected[0], expected[-1]]
                assert events.damaged or [event["loss"] for event in found] == [0.75, 0.25, 0.125]
