"""Reads the events of a run incrementally. Of a long run, only as many log lines are kept as a
screen can show, each of them standing for the steps since the one before."""

from __future__ import annotations

import os
from pathlib import Path

from expert.core.events import MAX_LINE_BYTES, Event, check_event_file_size, parse_event
from expert.core.links import open_plain

WHOLE_BYTES = 2_500
"""Up to this size for each log line that is kept every line is parsed, for a run's own page about
2,500 lines in 0.1 s. Of more, every n-th."""
CHUNK = 8 * 2**20
MAX_OTHER_EVENTS = 5_000
"""Events that are not log lines; the newest are kept."""
_STEP = b'{"event": "step"'
_SUMS = ("tokens", "targets", "examples", "seconds", "updates")


class EventReader:
    """Up to twice `most` log lines of a run, and its other events."""

    def __init__(self, path: Path, most: int = 600) -> None:
        self.path = path
        self.most = most
        self.reset()

    def reset(self) -> None:
        self.events: list[Event] = []
        self.damaged = 0
        self.sampled = False
        """Whether log lines were skipped."""
        self._position, self._file = 0, (0, 0)
        self._last_step = 0.0

    def read_new(self) -> bool:
        """Read new events; returns whether there were any."""
        try:
            stream = open(open_plain(self.path, os.O_RDONLY), "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return False
        with stream:
            status = os.fstat(stream.fileno())
            file = (status.st_dev, status.st_ino)
            if file != self._file or status.st_size < self._position:
                self.reset()  # replaced or truncated
                self._file = file
            check_event_file_size(self.path)
            before = self._position
            every = 1 + (status.st_size - before) // (WHOLE_BYTES * self.most)
            while True:
                stream.seek(self._position)
                raw = stream.read(min(CHUNK, status.st_size - self._position))
                end = raw.rfind(b"\n") + 1
                if end:
                    self._add_lines(raw[:end].splitlines(), every)
                elif len(raw) > MAX_LINE_BYTES:
                    end = len(raw)  # no event is that long
                    self.damaged += 1
                else:
                    break  # an incomplete line is read next time
                self._position += end
                self._shorten()
        return self._position > before

    def _add_lines(self, lines: list[bytes], every: int) -> None:
        """Add every n-th log line, the last one before any other event, and all other events."""
        skipped = b""
        for place, line in enumerate(lines):
            if line.startswith(_STEP) and place % every and place < len(lines) - 1:
                skipped = line
                continue
            if skipped and not line.startswith(_STEP):
                self._add(skipped, every)
            self._add(line, every)
            skipped = b""

    def _add(self, line: bytes, every: int) -> None:
        event = parse_event(line)
        if event is None:
            self.damaged += bool(line.strip())
            return
        if event["event"] == "step":
            step = event.get("step") or 0
            if every > 1 and step > self._last_step:
                event, self.sampled = scaled_to_steps(event, step - self._last_step), True
            self._last_step = step
        self.events.append(event)

    def _shorten(self) -> None:
        steps = sum(event["event"] == "step" for event in self.events)
        while steps > 2 * self.most:
            self.events = halved(self.events)
            steps = sum(event["event"] == "step" for event in self.events)
            self.sampled = True
        excess = len(self.events) - steps - MAX_OTHER_EVENTS
        if excess > 0:
            kept = []
            for event in self.events:
                if excess and event["event"] not in ("step", "started"):
                    excess -= 1
                else:
                    kept.append(event)
            self.events = kept


def scaled_to_steps(event: Event, updates: float) -> Event:
    """A log line scaled to represent `updates` steps."""
    own = event.get("updates")
    factor = updates / (own if type(own) in (int, float) and own else 1)
    if factor <= 1:
        return event
    sums = {
        key: value * factor
        for key, value in event.items()
        if (key in _SUMS or key.startswith("time_")) and type(value) in (int, float)
    }
    return {**event, **sums, "updates": updates}


def halved(events: list[Event]) -> list[Event]:
    """Events without every second log line; the last one stays."""
    steps = [place for place, event in enumerate(events) if event["event"] == "step"]
    dropped = set(steps[-2::-2])
    kept, last = [], 0.0
    for place, event in enumerate(events):
        if event["event"] != "step":
            kept.append(event)
        elif place not in dropped:
            step = event.get("step") or 0
            kept.append(scaled_to_steps(event, step - last))
            last = step
    return kept
