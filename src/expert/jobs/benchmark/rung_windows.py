"""A rung that is ready: it trains a window of updates when it is told to, else it stands still.

It stands still inside the loop, where the next update is asked for: the model, the optimizer and
the feed stay as they are, and neither a core nor the card is used. So another process can be timed
in the meantime, and the next window begins without loading or warming up anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from expert.telemetry.meter import Meter

NVML_LOOKS_BACK = 1.0
"""Seconds: the use of a card that NVML tells is that of a sixth of a second up to one before."""
FIRST_UPDATES = 3
"""Enough to compile, to fill caches, and to know how long an update takes."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Updates that were timed together, the device idle before and after them."""

    first: int
    """Updates of the run before it."""
    updates: int
    tokens: int
    """Real ones, without padding."""
    examples: int
    seconds: float
    others: float
    """Cores that processes of others used in the meantime."""
    use: float | None = None
    """Of the card in percent, by NVML at the end of it; None where it was too short to be told."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to be done next: a window of so many updates after some that nobody times, telling
    what was seen, or leaving."""

    do: str
    updates: int = 0
    skip: int = 0


class Gate:
    """Lets updates pass to the loop while a window lasts; asks for orders in between."""

    def __init__(
        self,
        orders: Callable[[], Order | None],
        answer: Callable[[Window], None],
        *,
        device: torch.device,
        meter: Callable[[], Meter],
        fresh: int = 0,
        use: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`fresh`: updates of a feed that has just begun, which are never timed. `use` asks how
        much the card is used at this moment."""
        self._orders, self._answer, self._fresh, self._use = orders, answer, fresh, use
        self._device, self._meter, self._clock = device, meter, clock
        self._order: Order | None = None
        self.windows: list[Window] = []
        self.last: Order | None = None
        """The order that ended it; None where nobody is there to give any."""
        self.left = False

    def __call__(self, updates: Iterable[Any]) -> Iterator[Any]:
        """The updates of one feed; an order that a feed could not finish is begun anew."""
        coming, fresh = iter(updates), self._fresh
        while True:
            order = self._order or self._next_order()
            if order is None:
                return
            self._order = order
            skip, fresh = max(order.skip, fresh), 0
            for _ in range(skip):
                fed = next(coming, None)
                if fed is None:
                    return
                yield fed
            timing, tokens, examples = _Timing(self._device, self._clock), 0, 0
            first: int | None = None
            for _ in range(order.updates):
                fed = next(coming, None)
                if fed is None:
                    return
                tokens += fed.counts.real_tokens
                examples += fed.counts.examples
                first = fed.update.done if first is None else first
                yield fed
            window = Window(
                first=first or 0,
                updates=order.updates,
                tokens=tokens,
                examples=examples,
                **timing.ended(self._use),
            )
            self._order = None
            self.windows.append(window)
            self._answer(window)

    def _next_order(self) -> Order | None:
        """Stand still until there is a window to be timed; None where there will be none."""
        with self._meter().paused():
            order = self._orders()
        if order is not None and order.do == "window":
            return order
        self.last, self.left = order, True
        return None


class _Timing:
    """From an idle device to an idle device, with what others did to the cores."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._wait()
        self._busy, self._own = _busy_and_own()
        self._began = clock()

    def ended(self, use: Callable[[], float | None]) -> dict[str, Any]:
        self._wait()
        seconds = self._clock() - self._began
        used = use() if seconds >= NVML_LOOKS_BACK else None
        busy, own = _busy_and_own()
        others = (busy - self._busy - (own - self._own)) / seconds if seconds > 0 else 0.0
        return {"seconds": seconds, "others": max(0.0, others), "use": used}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)


def _busy_and_own() -> tuple[float, float]:
    """Seconds that the cores worked, and of them those of this process and of what it started:
    processes that make batches are no neighbours."""
    import psutil

    from expert.telemetry.cpu import busy_seconds, own_seconds

    own = own_seconds()
    for child in psutil.Process().children(recursive=True):
        try:
            used = child.cpu_times()
        except psutil.Error:  # it has just ended, and is counted with its parent
            continue
        own += used.user + used.system
    return busy_seconds(), own


def window_facts(window: Window) -> dict[str, Any]:
    """A window as it travels."""
    return asdict(window)
