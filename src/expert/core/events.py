"""Events of a run, one flat JSON object per line: written here, and read here by every consumer."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, Self

from expert.core.errors import ExpertError
from expert.core.links import open_plain
from expert.core.secrets import HIDDEN, is_secret, known_secrets, redacted
from expert.core.stored_json import InvalidFileError, parse_json
from expert.core.text import gib

Event = dict[str, Any]
Sink = Callable[[Event], None]

MAX_LINE_BYTES = 2**20  # a step takes about 600 bytes, a changed plan a few thousand
MAX_FILE_BYTES = 2 * 2**30  # more than three million steps
_SEAL = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\n?$')
WAITING_LINES = 10_000  # about 3 MB of step events, buffered while the disk rejects writes


class EventLog:
    """Writes events to a file and passes each to the sinks. Failures never stop training.

    While the file cannot be written, the sinks get one `log_failed`, lines are buffered, and every
    later event retries. Numbers keep full precision; NaN and infinities are written as "nan", "inf"
    and "-inf", which float() parses.
    """

    def __init__(
        self, path: Path, sinks: Sequence[Sink] = (), clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._sinks = tuple(sinks)
        self._clock = clock
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque(maxlen=WAITING_LINES)
        self._descriptor: int | None = None
        self._torn = False
        self._failing: set[int] = set()

    def emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Append one line and pass the event to the sinks."""
        assert "time" not in fields, "the time is set here"
        with self._lock:
            fact: Event = {"event": event, "time": self._clock()}
            values = fields if step is None else {"step": step, **fields}
            fact |= plain(values, known_secrets() if _has_text(fields) else ())
            self._put(fact)
            self._send(fact)

    def close(self) -> None:
        """Write the buffered lines if possible, and close the file."""
        with self._lock:
            self._write_waiting()
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _put(self, fact: Event) -> None:
        text = json.dumps(fact, ensure_ascii=False, allow_nan=False)
        raw = text[:-1].encode("utf-8", "backslashreplace")
        # A checksum of the rest ends the line: a flipped digit must not be shown as the loss.
        self._waiting.append(raw + b', "crc32": "%08x"}\n' % zlib.crc32(raw))
        self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except (OSError, ExpertError) as error:
            why = f"{self.path}: {getattr(error, 'strerror', None) or error}"
            self._warn(-1, "the event file cannot be written; training continues", why)
        else:
            self._failing.discard(-1)

    def _append(self, line: bytes) -> None:
        """Append one line; after a partial write the next attempt starts on a new line."""
        if self._descriptor is None:
            self._descriptor = open_plain(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            size = os.fstat(self._descriptor).st_size
            os.lseek(self._descriptor, max(0, size - 1), os.SEEK_SET)
            self._torn = os.read(self._descriptor, 1) not in (b"", b"\n")
        rest = b"\n" + line if self._torn else line
        while rest:
            written = os.write(self._descriptor, rest)
            self._torn = written < len(rest)
            rest = rest[written:]

    def _send(self, fact: Event) -> None:
        for index, sink in enumerate(self._sinks):
            try:
                sink(dict(fact))
            except Exception as error:  # noqa: BLE001 - a display that fails must not stop training
                name = getattr(sink, "__qualname__", type(sink).__qualname__)
                self._warn(index, f"{name} failed; training continues", f"{error!r}")
            else:
                self._failing.discard(index)

    def _warn(self, failed: int, what: str, why: str) -> None:
        """Report the first of consecutive failures to the other sinks; -1 means the file."""
        if failed in self._failing:
            return
        self._failing.add(failed)
        fact = {"event": "log_failed", "time": self._clock()}
        fact |= plain({"what": what, "because": why}, known_secrets())
        if failed >= 0:
            self._put(fact)
        for index, sink in enumerate(self._sinks):
            if index not in self._failing:
                try:
                    sink(dict(fact))
                except Exception:  # noqa: BLE001 - reported when its own next event fails
                    continue


def plain(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Convert a value to JSON types: no NaN, no objects, "***" in place of secrets."""
    if isinstance(value, str):
        return redacted(value, secrets)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):  # NumPy registers its integers there
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {
            redacted(str(key), secrets): HIDDEN if is_secret(key, item) else plain(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, secrets) for item in value]
    return redacted(str(value), secrets)


class StoredEvents(Iterable[Event]):
    """The events of a file, oldest first; none if there is no file. Invalid lines are skipped and
    counted in `damaged`; an incomplete last line is ignored."""

    def __init__(self, path: Path) -> None:
        self.damaged = 0
        self._path = path

    def __iter__(self) -> Iterator[Event]:
        if not self._path.is_file():
            return
        with _opened(self._path) as stream:
            for line, _ in _lines(stream):
                event = parse_event(line)
                if event is not None:
                    yield event
                elif line.endswith(b"\n") and line.strip():
                    self.damaged += 1


read_events = StoredEvents


def follow(
    path: Path,
    stop: Callable[[], bool],
    poll: float = 0.5,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Yield events as they are written, from the first; ends once `stop` is true and all are read.

    The file may not exist yet. Only complete lines are read; a file that became shorter was
    replaced and is read from its start.
    """
    position = 0
    while True:
        ending = stop()
        position = 0 if _size(path) < position else position
        if path.exists():
            with _opened(path) as stream:
                stream.seek(position)
                for line, length in _lines(stream):
                    if not line.endswith(b"\n"):
                        break
                    position += length
                    event = parse_event(line)
                    if event is not None:
                        yield event
        if ending:
            return
        sleep(poll)


def _opened(path: Path) -> BinaryIO:
    check_event_file_size(path)
    return open(open_plain(path, os.O_RDONLY), "rb")


def check_event_file_size(path: Path) -> None:
    """Raise if a file is too large for an event log."""
    size = _size(path)
    if size > MAX_FILE_BYTES:
        raise InvalidFileError(
            f"{path}: has {gib(size)}, at most {gib(MAX_FILE_BYTES)} are read  (no run writes that "
            "much; move the file away)"
        )


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Lines and their lengths; the text of an overlong line is replaced."""
    while line := stream.readline(MAX_LINE_BYTES):
        length = len(line)
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MAX_LINE_BYTES)
            length += len(line)
        if length > MAX_LINE_BYTES:
            line = b"too long\n" if line.endswith(b"\n") else b"too long"
        yield line, length


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def is_as_written(line: bytes) -> bool:
    """Whether a line is an event that ends with the checksum of its text."""
    return _SEAL.search(line) is not None and parse_event(line) is not None


def parse_event(line: bytes) -> Event | None:
    """Parse a line; None if it is not an event, its checksum does not match, or a field has the
    wrong type: all readers rely on the types in `_FIELDS`. A line without a checksum is read."""
    sealed = _SEAL.search(line)
    if sealed:
        if int(sealed[1], 16) != zlib.crc32(line[: sealed.start()]):
            return None
        line = line[: sealed.start()] + b"}"
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    for name, value in event.items():
        if value is not None and name in _KINDS and not _KINDS[name](value):
            return None
    return event


def _is_number(value: Any) -> bool:
    """Numbers, and the text of those JSON cannot hold: "nan"."""
    return type(value) in (int, float) or value in ("nan", "inf", "-inf")


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "expert model device run manifest path final reason error split folder index because": (
        lambda value: isinstance(value, str)
    ),
    "step total_steps from_step to_step": lambda n: type(n) is int and 0 <= n < 2**53,
    "loss smoothed_loss eval_loss last_eval_loss test_loss rate epoch epochs seconds tokens "
    "tokens_per_second median_tokens_per_second steps_per_second samples_per_second "
    "eta_seconds gpu_utilization": _is_number,
    # Seconds within the range of calendar dates.
    "time": lambda value: _is_number(value) and 0 <= float(value) < 1e11,
    "changes changed lines": lambda value: isinstance(value, list),
}
_KINDS = {name: is_kind for names, is_kind in _FIELDS.items() for name in names.split()}


def _has_text(value: Any) -> bool:
    """Whether a value could contain a secret; spares the numbers of a step the search."""
    if isinstance(value, Mapping):
        return any(map(_has_text, value.values()))
    return not (value is None or isinstance(value, Real))
