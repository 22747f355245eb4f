"""Reads the events of a run incrementally, for its status: of log lines in a row the last is kept,
and of those read at once only the last is parsed."""

from __future__ import annotations

import os
from pathlib import Path

from expert.core.events import MAX_LINE_BYTES, Event, check_event_file_size, parse_event
from expert.core.links import open_plain

CHUNK = 8 * 2**20
_STEP = b'{"event": "step"'


class EventReader:
    """All events of a run but the log lines that another one follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reset()

    def reset(self) -> None:
        self.events: list[Event] = []
        self.damaged = 0
        self._position, self._file = 0, (0, 0)

    def read_new(self) -> None:
        try:
            stream = open(open_plain(self.path, os.O_RDONLY), "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return
        with stream:
            status = os.fstat(stream.fileno())
            file = (status.st_dev, status.st_ino)
            if file != self._file or status.st_size < self._position:
                self.reset()  # replaced or truncated
                self._file = file
            check_event_file_size(self.path)
            while True:
                stream.seek(self._position)
                raw = stream.read(min(CHUNK, status.st_size - self._position))
                end = raw.rfind(b"\n") + 1
                if end:
                    lines = raw[:end].splitlines()
                    for line, following in zip(lines, [*lines[1:], b""], strict=True):
                        if not (line.startswith(_STEP) and following.startswith(_STEP)):
                            self._add(line)
                elif len(raw) > MAX_LINE_BYTES:
                    end = len(raw)  # no event is that long
                    self.damaged += 1
                else:
                    return  # an incomplete line is read next time
                self._position += end

    def _add(self, line: bytes) -> None:
        event = parse_event(line)
        if event is None:
            self.damaged += bool(line.strip())
            return
        if event["event"] == "step" and self.events and self.events[-1]["event"] == "step":
            self.events.pop()
        self.events.append(event)
