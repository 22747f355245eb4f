"""Live pages: a view is a set of HTML elements, rendered once for all tabs, and only while a tab
shows it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from expert.jobs.serve.body import RequestError

TICK_SECONDS = 1.0
KEPT_SECONDS = 20.0
"""Views without tabs are dropped after this long."""
HEARTBEAT_SECONDS = 15.0
MAX_STREAMS = 40
"""Largest number of tabs with live updates."""


class Throttle:
    """Keeps repeated work below a share of one core: slow work is done less often."""

    def __init__(self, share: float, least: float = TICK_SECONDS) -> None:
        self._share, self._least, self._next = share, least, 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def run(self, work: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return work()
        finally:
            took = time.thread_time() - began
            self._next = time.monotonic() + max(self._least, took / self._share)


class View:
    """HTML elements of one page by id. The page shows those listed in `order`, and others if it has
    an element with that id."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, str]] = {}
        """Each element with the time of its last change, which a restarted server exceeds."""
        self.streams = 0
        self.used = time.monotonic()
        self._next_refresh = 0.0
        self._lock = threading.Lock()

    def elements(self) -> dict[str, str]:
        """Elements that may have changed, at first all."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Make the elements again, at most once a second; called in a thread, by every tab."""
        with self._lock:
            if time.monotonic() < self._next_refresh:
                return
            now, parts = time.time_ns(), dict(self.parts)
            for name, html in self.elements().items():
                if name not in parts or parts[name][1] != html:
                    parts[name] = (now, html)
            self.parts = parts  # replaced as a whole: streams read it meanwhile
            self._next_refresh = time.monotonic() + TICK_SECONDS

    def html(self, name: str) -> str:
        return self.parts[name][1] if name in self.parts else ""

    @property
    def seen(self) -> int:
        """The time of the last change: a page made now shows all elements."""
        return max((at for at, _ in self.parts.values()), default=0)


class Hub:
    """The views that tabs show."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.streams = 0
        self.closing = asyncio.Event()

    async def view(self, key: str, make: Callable[[], View]) -> View:
        """The view of that key, with all its elements."""
        now = time.monotonic()
        for name, view in list(self.views.items()):
            if not view.streams and now - view.used > KEPT_SECONDS:
                del self.views[name]
        if key not in self.views:
            self.views[key] = make()
        view = self.views[key]
        view.used = now
        await asyncio.to_thread(view.refresh)
        return view

    @contextmanager
    def place_for(self, view: View) -> Iterator[None]:
        """Count a tab that follows this view; RequestError if there are too many."""
        if self.streams >= MAX_STREAMS:
            raise RequestError(503, f"{MAX_STREAMS} pages are open; close one.")
        self.streams += 1
        view.streams += 1
        try:
            yield
        finally:
            self.streams -= 1
            view.streams -= 1
            view.used = time.monotonic()

    async def stream(self, view: View, seen: str) -> AsyncIterator[bytes]:
        """Server-sent events with the elements that changed since `seen`, in their newest state.
        If making them fails the stream ends, and the page connects again."""
        known, sent = int(seen) if seen.isdigit() else 0, time.monotonic()
        yield b"retry: 2000\n\n"
        while not self.closing.is_set():
            await asyncio.to_thread(view.refresh)
            parts, now = view.parts, time.monotonic()
            fresh = {name: html for name, (at, html) in parts.items() if at > known}
            if fresh:
                known, sent = max(at for at, _ in parts.values()), now
                data = json.dumps({"seen": str(known), "parts": fresh})
                yield f"data: {data}\n\n".encode()
            elif now - sent > HEARTBEAT_SECONDS:
                sent = now
                yield b": still here\n\n"
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self.closing.wait()
