"""Live pages: a view is a set of HTML elements, rendered once for all tabs, and only while a tab
asks for it. Tabs ask every second for what changed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

TICK_SECONDS = 1.0
KEPT_SECONDS = 20.0
"""Views that no tab asks for are dropped after this long."""


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
        self.used = time.monotonic()
        self._next_refresh = 0.0
        self._lock = threading.Lock()

    def elements(self) -> dict[str, str]:
        """Elements that may have changed, at first all."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Make the elements again, at most once a second; called in a thread, for every tab."""
        with self._lock:
            if time.monotonic() < self._next_refresh:
                return
            now, parts = time.time_ns(), dict(self.parts)
            for name, html in self.elements().items():
                if name not in parts or parts[name][1] != html:
                    parts[name] = (now, html)
            self.parts = parts  # replaced as a whole: other tabs read it meanwhile
            self._next_refresh = time.monotonic() + TICK_SECONDS

    def html(self, name: str) -> str:
        return self.parts[name][1] if name in self.parts else ""

    @property
    def seen(self) -> int:
        """The time of the last change: a page made now shows all elements."""
        return max((at for at, _ in self.parts.values()), default=0)

    def changes_since(self, seen: str) -> dict[str, Any]:
        """The elements that changed since `seen`, and what to ask for next; text, because a script
        would round the number."""
        known, parts = int(seen) if seen.isdigit() else 0, self.parts
        fresh = {name: html for name, (at, html) in parts.items() if at > known}
        return {"seen": str(max((at for at, _ in parts.values()), default=0)), "parts": fresh}


class Hub:
    """The views that tabs show."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}

    async def view(self, key: str, make: Callable[[], View]) -> View:
        """The view of that key, with its elements as they are now."""
        now = time.monotonic()
        for name, view in list(self.views.items()):
            if now - view.used > KEPT_SECONDS:
                del self.views[name]
        if key not in self.views:
            self.views[key] = make()
        view = self.views[key]
        view.used = now
        await asyncio.to_thread(view.refresh)
        return view
