"""Live pages: a view is a set of HTML elements, rendered once for all tabs, and only while a tab
shows it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

TICK_SECONDS = 1.0
KEPT_SECONDS = 20.0
"""Views without tabs are dropped after this long."""
HEARTBEAT_SECONDS = 15.0
MAX_STREAMS = 40
"""Largest number of tabs with live updates."""
SERVER_ID = secrets.token_hex(4)
"""Identifies this server: versions of an earlier one do not count."""


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
        self.version = 0
        self.streams = 0
        self.used = time.monotonic()
        self.changed = asyncio.Event()

    def refresh(self) -> dict[str, str]:
        """Elements that may have changed, at first all; called in a thread."""
        raise NotImplementedError

    def put(self, fresh: dict[str, str]) -> None:
        changed = {name: html for name, html in fresh.items()
                   if name not in self.parts or self.parts[name][1] != html}  # fmt: skip
        if not changed:
            return
        self.version += 1
        for name, html in changed.items():
            self.parts[name] = (self.version, html)
        self.changed.set()
        self.changed = asyncio.Event()

    def html(self, name: str) -> str:
        return self.parts[name][1] if name in self.parts else ""

    @property
    def seen(self) -> str:
        """The version of a page that shows all elements."""
        return f"{SERVER_ID}.{self.version}"


class Hub:
    """The views that tabs show, each with a task that refreshes it."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.streams = 0
        self.closing = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def view(self, key: str, make: Callable[[], View]) -> View:
        """The view of that key, with all its elements."""
        async with self._opening.setdefault(key, asyncio.Lock()):
            view = self.views.get(key)
            if view is None:
                view = make()
                view.put(await asyncio.to_thread(view.refresh))
                self.views[key] = view
                self._tasks[key] = asyncio.create_task(self._follow(key, view))
            view.used = time.monotonic()
            return view

    async def _follow(self, key: str, view: View) -> None:
        try:
            while view.streams or time.monotonic() - view.used < KEPT_SECONDS:
                await asyncio.sleep(TICK_SECONDS)
                view.put(await asyncio.to_thread(view.refresh))
        finally:
            self.views.pop(key, None)
            self._tasks.pop(key, None)

    async def stream(self, view: View, seen: str) -> AsyncIterator[bytes]:
        """Server-sent events with the elements that changed since `seen`, in their newest state."""
        server, _, number = seen.partition(".")
        known = int(number) if server == SERVER_ID and number.isdigit() else 0
        self.streams += 1
        view.streams += 1
        try:
            yield b"retry: 2000\n\n"
            # A view whose refresh failed is gone; the page then connects again to a new one.
            while not self.closing.is_set() and view in self.views.values():
                waiting, version = view.changed, view.version
                fresh = {name: html for name, (at, html) in view.parts.items() if at > known}
                if fresh:
                    data = json.dumps({"seen": view.seen, "parts": fresh})
                    yield f"data: {data}\n\n".encode()
                known = version
                if not await self._wait(waiting):
                    yield b": still here\n\n"
        finally:
            self.streams -= 1
            view.streams -= 1
            view.used = time.monotonic()

    async def _wait(self, changed: asyncio.Event) -> bool:
        """Wait for a change, the end of the server, or the time of a heartbeat (False)."""
        waits = [asyncio.ensure_future(event.wait()) for event in (changed, self.closing)]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            for wait in waits:
                wait.cancel()
