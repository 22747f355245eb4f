"""Reads the events of a run incrementally. Of a long run, only as many log lines are kept as a
screen can show, each of them standing for the steps since the one before."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from expert.core.events import MAX_LINE_BYTES, Event, check_event_file_size, parse_event
from expert.core.links import open_plain

WHOLE_BYTES = 1_500_000
"""Up to this size every line is read: about 2,500 log lines, 0.1 s."""
CHUNK = 8 * 2**20
_NOT_STEP = re.compile(rb'\n(?!\{"event": "step")[^\n]+')
"""Also matches lines whose keys are in another order; all of them are parsed."""
_SUMS = ("tokens", "targets", "examples", "seconds", "updates")
MAX_OTHER_EVENTS = 5_000
"""Events that are not log lines; the newest are kept."""


class EventReader:
    """Reads the events of a run; `look` reads what is new."""

    def __init__(self, path: Path, most: int = 600) -> None:
        self.path = path
        self.most = most
        """Up to twice as many log lines are kept, then every second is dropped."""
        self.reset()

    def reset(self) -> None:
        self.events: list[Event] = []
        self.damaged = 0
        self.sampled = False
        """Whether log lines were skipped."""
        self._position, self._file, self._steps = 0, (0, 0), 0
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
            if status.st_size <= self._position:
                return False
            check_event_file_size(self.path)
            stream.seek(self._position)
            before = self._position
            if status.st_size - before > WHOLE_BYTES:
                self._read_sampled(stream, status.st_size)
            else:
                self._take(stream.read(status.st_size - before))
            self._shorten()
        return self._position > before

    def _take(self, raw: bytes) -> None:
        """Add all complete lines; the rest is read next time."""
        end = raw.rfind(b"\n") + 1
        if not end and len(raw) > MAX_LINE_BYTES:
            self._position += len(raw)  # no event is that long
            self.damaged += 1
            return
        self._position += end
        for line in raw[:end].splitlines():
            self._add(line)

    def _read_sampled(self, stream: BinaryIO, size: int) -> None:
        """Read a long file: log lines at regular positions, and all other events."""
        stride = max(1, (size - self._position) // self.most)
        wanted = self._position + stride
        rest = b""
        while raw := stream.read(min(CHUNK, size - self._position - len(rest))):
            chunk = rest + raw
            end = chunk.rfind(b"\n") + 1
            whole, rest = b"\n" + chunk[:end], chunk[end:]
            is_last = self._position + len(chunk) >= size
            wanted = self._pick(whole, wanted, stride, is_last=is_last)
            self._position += end
            if len(rest) > MAX_LINE_BYTES:
                self._position += len(rest)
                self.damaged, rest = self.damaged + 1, b""

    def _pick(self, whole: bytes, wanted: int, stride: int, *, is_last: bool) -> int:
        """Add the events to keep of a chunk, which starts with a line break; returns the position
        of the next log line."""
        lines = {found.start() + 1: found[0][1:] for found in _NOT_STEP.finditer(whole)}
        base = self._position - 1
        places = list(range(wanted - base, len(whole) - 1, stride))
        for place in [*places, *([len(whole) - 1] if is_last else [])]:
            start = whole.rfind(b"\n", 0, place) + 1
            lines[start] = whole[start : whole.find(b"\n", start)]
        self.sampled = True
        for _, line in sorted(lines.items()):
            self._add(line, is_sampled=True)
        return base + (places[-1] if places else wanted - base - stride) + stride

    def _add(self, line: bytes, *, is_sampled: bool = False) -> None:
        event = parse_event(line)
        if event is None:
            self.damaged += bool(line.strip())
            return
        if event["event"] == "step":
            step = event.get("step") or 0
            if is_sampled and step > self._last_step:
                event = scaled_to_steps(event, step - self._last_step)
            self._last_step = step
            self._steps += 1
        self.events.append(event)

    def _shorten(self) -> None:
        while self._steps > 2 * self.most:
            self.events = halved(self.events)
            self._steps = sum(event["event"] == "step" for event in self.events)
            self.sampled = True
        others = len(self.events) - self._steps
        if others > MAX_OTHER_EVENTS:
            self.events = _newest(self.events, others - MAX_OTHER_EVENTS)


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
        if place in dropped:
            continue
        step = event.get("step") or 0
        if event["event"] == "step":
            kept.append(scaled_to_steps(event, step - last))
            last = step
        else:
            kept.append(event)
    return kept


def _newest(events: list[Event], excess: int) -> list[Event]:
    """Events without the `excess` oldest ones that are neither log lines nor the start."""
    kept = []
    for event in events:
        if excess and event["event"] not in ("step", "started"):
            excess -= 1
        else:
            kept.append(event)
    return kept
