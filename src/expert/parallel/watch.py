"""Detects a run that hangs, and ends it.

A single process records what it is doing; if that does not change for too long, it hangs.

Every rank publishes a heartbeat in the store: what it is doing, and for how long. Rank 0 checks all
heartbeats, the others check rank 0's. A stopped process, a lost machine or a cut network sends
none; a stuck rank still does, and is found because the others wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from expert.core.errors import EXIT_HUNG, EXIT_RUN_FAILED
from expert.core.files import write_text_atomically
from expert.core.interrupts import show_cursor
from expert.core.text import span
from expert.core.world import World, record_failure
from expert.parallel.launch import LAUNCH_FOLDER

LIMIT_SECONDS = 600.0
"""How long ranks wait for another one during training, which may be compiling."""
SILENT_SHARE = 0.2
"""Fraction of the limit without a heartbeat. A rank that writes a checkpoint may take the whole
limit, because some libraries block all threads while they copy."""
SLOW_FACTOR = 10.0
"""Ranks have equal shares of a step: none takes this many times the longest step so far."""
SAVED_BYTES_PER_SECOND = 10e6
"""A slow network folder, to estimate how long a checkpoint may take."""
NO_LIMIT = -1.0
FIRST_TIMES, FIRST_SECONDS = 10, 1800.0
"""In a single process, a first occurrence may take this many times the limit, but not more than
these seconds (if the limit is shorter): kernels are loaded and compiled then."""
LONGEST_TIMES = 2
"""A later occurrence may take the limit plus this many times the longest one so far."""
BUSY_SHARE = 0.5
"""Of one core: a process computing on the CPU that uses more than this is working."""
HEARTBEAT_SECONDS = 0.25
HEARTBEATS_PER_LIMIT = 40
"""Per limit, if that is short."""
TELL_SECONDS = 2.0
SPREAD_SECONDS = 1.0
"""The first rank to end interrupts the others, which need time to record what they were doing."""
PAUSE_SECONDS = 1.0
"""A thread that wakes up this much late was not running."""
STACKS = "stacks.txt"
ENDED = "ended"
"""The store's key for why all ranks must end."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a rank publishes about itself."""

    doing: str = "getting ready"
    seconds: float = 0.0
    """For how long it has been doing or waiting for this."""
    extra: float = NO_LIMIT
    """Seconds it may take beyond the limit."""
    exchanges: int = 0
    """Number of exchanges entered so far; all ranks enter the same ones."""
    waits: bool = False
    """For the others, in an exchange."""
    longest: float = 0.0
    """Longest time between two exchanges so far."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Why all ranks must end."""

    text: str
    by: int
    """The rank that reports this, and ends in its own way."""
    silent: bool = False
    """A rank does not answer, so all others write their stack traces."""
    blamed: int | None = None
    """That rank, if known."""


Found = tuple[int | None, str]
"""The rank that does not answer, if known, and a message."""


def unresponsive_rank(
    signs: Mapping[int, Heartbeat], silent: Mapping[int, float], *, limit: float, size: int
) -> Found | None:
    """Which rank does not answer; None if all do. `silent`: seconds since a rank's last heartbeat;
    `size`: of the world, of which `signs` may be a part."""
    for rank, seconds in sorted(silent.items(), key=lambda item: -item[1]):
        sign = signs[rank]
        patience = limit + max(sign.extra, 0.0) if sign.extra else limit * SILENT_SHARE
        if seconds > patience:
            return rank, _no_heartbeat(rank, sign, seconds)
    found = _stuck(signs, limit, size)
    if found is None or found[0] is None or silent.get(found[0], 0.0) <= limit * SILENT_SHARE:
        return found
    return found[0], _no_heartbeat(found[0], signs[found[0]], silent[found[0]])


def _no_heartbeat(rank: int, sign: Heartbeat, seconds: float) -> str:
    text = f"no sign of life for {span(seconds)}; it was last seen {sign.doing}"
    return f"rank {rank} does not answer: {text}"


def _stuck(signs: Mapping[int, Heartbeat], limit: float, size: int) -> Found | None:
    waiting = {rank: sign for rank, sign in signs.items() if sign.waits}
    if not waiting:
        return None
    first = max(waiting, key=lambda rank: (waiting[rank].exchanges, waiting[rank].seconds))
    waiter = waiting[first]
    patience = max(limit, SLOW_FACTOR * waiter.longest)
    behind = {rank: sign for rank, sign in signs.items() if sign.exchanges < waiter.exchanges}
    for rank, sign in behind.items():
        if sign.extra == NO_LIMIT or waiter.seconds <= patience + sign.extra:
            continue
        text = f"it has been {sign.doing} for {span(sign.seconds)}"
        waits = f"rank {first} has waited {span(waiter.seconds)} for it, {waiter.doing}"
        return rank, f"rank {rank} does not answer: {text}; {waits}"
    if not behind and len(signs) == size and waiter.seconds > patience:
        text = f"all have waited {span(waiter.seconds)} for each other, {waiter.doing}"
        return None, f"the network between the ranks does not answer: {text}"
    return None


class Watch:
    """Publishes this rank's heartbeats and checks the others'."""

    def __init__(
        self,
        world: World,
        store: Any,
        *,
        limit: float = LIMIT_SECONDS,
        hosted_by_rank_0: bool = False,
    ) -> None:
        """`hosted_by_rank_0`: rank 0 hosts the store, not the launcher."""
        self.world, self.limit, self._kept_by_first = world, limit, hosted_by_rank_0
        self._own = store
        self._pulse = min(HEARTBEAT_SECONDS, limit / HEARTBEATS_PER_LIMIT)
        self._now = (Heartbeat(), time.monotonic())
        self._heartbeats: dict[int, Heartbeat] = {}
        self._heard: dict[int, tuple[str, float]] = {}
        self._store_answered = self._looked_at = self._awake_since = time.monotonic()
        self._ended: End | None = None
        self._over, self._wake, self._heartbeat_published = (threading.Event() for _ in range(3))
        self._threads: list[threading.Thread] = []
        self._report: Callable[[str], None] = lambda text: None
        self._folder: Path | None = None
        self._longest: dict[str, float] = {}
        self._computes, self._computed, self._idle_since = False, 0.0, 0.0

    # --- this rank

    def at(self, doing: str, extra: float = 0.0) -> None:
        """Record what this rank is doing; it may take `extra` seconds beyond the limit."""
        self._set(doing=doing, extra=extra)

    def beat(self) -> None:
        """Record progress in the current activity."""
        self._set()

    @contextlib.contextmanager
    def work(self, doing: str, extra: float = NO_LIMIT) -> Iterator[None]:
        """Do something that takes long, then return to the previous activity."""
        before = self._now[0]
        self.at(doing, extra)
        self._publish_heartbeat()
        try:
            yield
        finally:
            self.at(before.doing, before.extra)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """An exchange: this rank waits for all others."""
        now, since = self._now
        longest = max(now.longest, time.monotonic() - since) if not now.extra else now.longest
        self._set(waits=True, exchanges=now.exchanges + 1, longest=longest)
        try:
            yield
        finally:
            self._set(waits=False)

    def _publish_heartbeat(self) -> None:
        """Publish a heartbeat now: it may be long before another thread runs here."""
        if self._threads and self._own is not None:
            self._heartbeat_published.clear()
            self._wake.set()
            self._heartbeat_published.wait(TELL_SECONDS)

    def _set(self, **changed: Any) -> None:
        sign, since = self._now
        if not sign.extra:
            kind, seconds = _kind(sign), time.monotonic() - max(since, self._awake_since)
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._now = (replace(self._now[0], **changed), time.monotonic())

    @property
    def doing(self) -> str:
        return self._now[0].doing

    # --- the others

    def start(self) -> None:
        signs = [("signs-of-life", self._exchange_heartbeats)] if self._own is not None else []
        for name, run in (*signs, ("watch", self._look)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def report_to(self, folder: Path, report: Callable[[str], None]) -> None:
        """Set the folder for stack traces, and what gets the message before all ranks end."""
        self._folder, self._report = folder, report

    def watch_single_process(self, limit: float, *, computes: bool) -> None:
        """Detect that this process hangs: no progress for `limit` seconds. `computes`: on the CPU,
        so that using it counts as progress."""
        self.limit, self._computes = limit, computes
        self._pulse = min(HEARTBEAT_SECONDS, limit / HEARTBEATS_PER_LIMIT)
        if not self._threads:
            self.start()

    def close(self) -> None:
        """Stop using the store. A thread inside it when the interpreter ends would abort the
        process."""
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(TELL_SECONDS)

    def end_all(self, text: str, *, silent: bool = False) -> None:
        """Tell the other ranks to end, whatever they are doing."""
        _publish_end(self._own, End(text=text, by=self.world.rank, silent=silent))

    def why_ended(self) -> str:
        """Why all ranks end, as published by a rank; "" if none has."""
        if self._ended is None:
            with contextlib.suppress(RuntimeError):  # torch's network and store errors
                self._ended = _published_end(self._own)
        return self._ended.text if self._ended is not None else ""

    def _exchange_heartbeats(self) -> None:
        """Blocks if the process that hosts the store is stopped; `_look` never does."""
        try:
            store = self._own.clone()
            while not self._over.is_set():
                self._wake.wait(self._pulse)
                self._wake.clear()
                self._exchange_once(store)
        except (RuntimeError, ValueError):
            return  # the run is over or the store is gone: `_look` finds out which

    def _exchange_once(self, store: Any) -> None:
        heartbeat = json.dumps(asdict(self._own_heartbeat()))
        store.set(f"sign {self.world.rank}", heartbeat)
        self._heartbeat_published.set()
        others = range(1, self.world.size) if self.world.is_first else (0,)
        present = [r for r in others if r in self._heard or store.check([f"sign {r}"])]
        for rank, value in zip(
            present, store.multi_get([f"sign {rank}" for rank in present]), strict=True
        ):
            text = value.decode()
            if self._heard.get(rank, ("", 0.0))[0] != text:
                self._heard[rank] = (text, time.monotonic())
                self._heartbeats[rank] = Heartbeat(**json.loads(text))
        self._ended = self._ended or _published_end(store)
        self._store_answered = time.monotonic()

    def _own_heartbeat(self) -> Heartbeat:
        sign, since = self._now
        return replace(sign, seconds=time.monotonic() - max(since, self._awake_since))

    def _forget_pause(self) -> None:
        """A pause of this process or of the machine is not a silence of the others."""
        now = time.monotonic()
        if now - self._looked_at > self._pulse + PAUSE_SECONDS:
            self._awake_since = self._store_answered = now
            for rank, (text, _) in list(self._heard.items()):
                self._heard[rank] = (text, now)
        self._looked_at = now

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        while not self._over.wait(self._pulse):
            self._forget_pause()
            if self._ended is not None and self._ended.by != self.world.rank:
                self._leave(self._ended)
            found = self._found() if self._ended is None else None
            if found is not None:
                blamed, text = found
                end = End(text=text, by=self.world.rank, silent=True, blamed=blamed)
                if self._own is not None:
                    # The host of the store may be the one that does not answer.
                    _run_with_timeout(TELL_SECONDS, partial(self._tell_others, end))
                    time.sleep(SPREAD_SECONDS)
                self._leave(end)

    def _tell_others(self, end: End) -> None:
        _publish_end(self._own.clone(), end)

    def _found(self) -> Found | None:
        if self._own is None:
            return self._find_hang()
        if self._now[0].extra > 0:  # a save is finished first: all ranks continue from it
            return None
        now, own = time.monotonic(), self._own_heartbeat()
        without = now - self._store_answered
        if without > self.limit * SILENT_SHARE:
            if self._kept_by_first:
                return 0, f"rank 0 does not answer: no sign of life for {span(without)}"
            # The launcher may be stopped, as by Ctrl-Z, while the ranks train.
            if own.waits and own.seconds > self.limit:
                text = f"no sign of life for {span(without)}; this rank was {own.doing}"
                return None, f"the machine of rank 0 does not answer: {text}"
            return None
        # With a slow store, heartbeats are read late: that is not the rank's silence.
        silent = {rank: now - at - without for rank, (_, at) in list(self._heard.items())}
        signs = {**self._heartbeats, self.world.rank: own}
        return unresponsive_rank(signs, silent, limit=self.limit, size=self.world.size)

    def _find_hang(self) -> Found | None:
        """Whether this single process has been doing the same for too long."""
        sign, since = self._now
        now, computed = time.monotonic(), time.process_time()
        if self._computes and computed - self._computed > BUSY_SHARE * self._pulse:
            self._idle_since = now
        self._computed = computed
        seconds = now - max(since, self._awake_since, self._idle_since)
        longest = self._longest.get(_kind(sign))
        patience = self.limit + LONGEST_TIMES * (longest or 0.0)
        if longest is None:
            patience = max(self.limit, min(FIRST_TIMES * self.limit, FIRST_SECONDS))
        if sign.extra == NO_LIMIT or seconds <= patience + sign.extra:
            return None
        fix = "--resume continues after the last checkpoint; hang_timeout sets the limit"
        return None, f"the run hangs: it has been {sign.doing} for {span(now - since)}  ({fix})"

    # --- the end

    def _leave(self, end: End) -> None:
        """End this process, whatever its main thread is doing."""
        message, code = end.text, EXIT_HUNG if end.silent else EXIT_RUN_FAILED
        if self._folder is not None and end.silent:
            path = self._write_stacks(self._folder, end.text)
            message += f"\n  stack traces of each rank are in {path.parent}/rank-N.{STACKS}"
            if self._own is None:
                message = f"{end.text}\n  stack traces are in {path}"
        record_failure(message, exit_code=code, of_another=self._own is not None, blamed=end.blamed)
        _run_with_timeout(TELL_SECONDS, lambda: self._report(end.text))
        for process in multiprocessing.active_children():  # a stopped one would stay
            process.kill()
        show_cursor()
        # The launcher shows the message of rank 0.
        if not self.world.is_first or LAUNCH_FOLDER not in os.environ:
            with contextlib.suppress(OSError):
                os.write(2, f"{message}\n".encode())
        os._exit(code)

    def _write_stacks(self, folder: Path, text: str) -> Path:
        """Write them to the folder, or to a temporary one if its disk does not answer."""
        path = folder / (STACKS if self._own is None else f"rank-{self.world.rank}.{STACKS}")
        with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
            stream.seek(0)
            who = "the run" if self._own is None else f"rank {self.world.rank}"
            stacks = f"{who}, {self.doing}; {text}\n\n{stream.read()}"
        written = threading.Event()

        def write() -> None:
            with contextlib.suppress(OSError):
                write_text_atomically(path, stacks)
                written.set()

        _run_with_timeout(TELL_SECONDS, write)
        if not written.is_set():
            path = Path(tempfile.mkdtemp(prefix="expert-")) / path.name
            path.write_text(stacks, encoding="utf-8")
        return path


def _kind(sign: Heartbeat) -> str:
    """The activity without the step number."""
    return sign.doing.partition(" ")[0]


def _run_with_timeout(seconds: float, run: Callable[[], None]) -> None:
    """Run something that may hang, for at most this long."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def _publish_end(store: Any, end: End) -> None:
    with contextlib.suppress(RuntimeError):  # no rank is left
        store.set(ENDED, json.dumps(asdict(end)))


def _published_end(store: Any) -> End | None:
    return End(**json.loads(store.get(ENDED))) if store.check([ENDED]) else None
