"""Pages that follow what happens: a view is a few pieces of HTML, made once however many tabs show
them, and only while one does."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

TICK_SECONDS = 1.0
KEPT_SECONDS = 20.0
"""A view that nobody looks at is forgotten after this long."""
HEARTBEAT_SECONDS = 15.0
MOST_STREAMS = 40
"""Tabs that are told of changes at the same time; others show what they have."""
STARTED = secrets.token_hex(4)
"""Of this server: versions of an earlier one say nothing."""


class Pace:
    """Keeps repeated work below a share of one core: what took long is done less often."""

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
    """Pieces of one page by the id of their element. A page shows those that `order` names, and
    others where it has a place for them."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[int, str]] = {}
        self.version = 0
        self.streams = 0
        self.used = time.monotonic()
        self.changed = asyncio.Event()

    def refresh(self) -> dict[str, str]:
        """Pieces that may have changed, made in a thread; the first time all of them."""
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
        """What a page that shows all this has seen."""
        return f"{STARTED}.{self.version}"


class Hub:
    """The views that somebody looks at, each with one task that follows it."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.streams = 0
        self.closing = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opening: dict[str, asyncio.Lock] = {}

    async def view(self, key: str, make: Callable[[], View]) -> View:
        """The view of that name with all its pieces."""
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
        """Server-sent events: every piece that changed since, always in its newest state."""
        server, _, number = seen.partition(".")
        known = int(number) if server == STARTED and number.isdigit() else 0
        self.streams += 1
        view.streams += 1
        try:
            yield b"retry: 2000\n\n"
            while not self.closing.is_set():
                waiting, version = view.changed, view.version
                fresh = {name: html for name, (made, html) in view.parts.items() if made > known}
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
        """Until something changed, the server ends or it is time for a sign of life."""
        waits = [asyncio.ensure_future(one.wait()) for one in (changed, self.closing)]
        try:
            done, _ = await asyncio.wait(
                waits, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            for one in waits:
                one.cancel()
