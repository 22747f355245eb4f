"""Finds a run that makes no progress, and ends it instead of letting everybody wait.

A process alone says what it does whenever that changes; one that says nothing for too long hangs.

Every rank leaves a sign of life in the store: what it does, and for how long. The first rank looks
at all signs, the others at that of the first. A process that is stopped, a machine that has gone
and a network that is cut leave no sign; a rank that is stuck does, and is found by the others
waiting for it in vain.
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
"""The longest that others wait for a rank in the middle of training: it may be compiling."""
SILENT_SHARE = 0.2
"""Of the limit: so long may a rank leave no sign. One that writes a checkpoint may take the whole
limit, because nothing else runs in a process while some libraries copy."""
SLOWER = 10.0
"""Ranks have equal shares of a step: none takes so many times what a step has ever taken here."""
SAVED_BYTES_PER_SECOND = 10e6
"""A slow network folder; what a checkpoint may take is reckoned by it."""
NO_LIMIT = -1.0
FIRST_TIMES, FIRST_SECONDS = 10, 1800.0
"""What a process alone does for the first time may take so many times the limit, but no longer than
that where the limit itself is shorter: kernels are loaded and compiled then."""
LONGEST_TIMES = 2
"""Of what it has done before; that and the limit is the longest that it may take again."""
BUSY_SHARE = 0.5
"""Of one core: a process that computes with the CPU and takes more is at work."""
PULSE_SECONDS = 0.25
PULSES = 40
"""In the limit, where that is short."""
TELL_SECONDS = 2.0
SPREAD_SECONDS = 1.0
"""Who ends first takes the others out of whatever they are in: they write that down before."""
PAUSE_SECONDS = 1.0
"""A thread that looks so much later than it wanted to has not been running."""
STACKS = "stacks.txt"
ENDED = "ended"
"""The store's key under which a rank says why all must end."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a rank says of itself."""

    doing: str = "getting ready"
    seconds: float = 0.0
    """That it has been doing it, or waiting in it."""
    extra: float = NO_LIMIT
    """Seconds that it may take longer than the limit."""
    exchanges: int = 0
    """That it has entered so far; all ranks enter the same ones."""
    waits: bool = False
    """In an exchange, for the others."""
    longest: float = 0.0
    """Seconds between any two exchanges before."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Why all ranks have to end."""

    text: str
    by: int
    """The rank that says so, and ends in its own way."""
    silent: bool = False
    """A rank does not answer: stacks show what each of the others was in."""
    blamed: int | None = None
    """That rank, where it is known."""


Found = tuple[int | None, str]
"""The rank that does not answer, where it is known, and that in words."""


def unanswered(
    signs: Mapping[int, Sign], silent: Mapping[int, float], *, limit: float, size: int
) -> Found | None:
    """Who does not answer; None while all do. `silent`: seconds since a rank has left a new sign;
    `size`: of the world, of which `signs` may be a part."""
    for rank, seconds in sorted(silent.items(), key=lambda each: -each[1]):
        sign = signs[rank]
        patience = limit + max(sign.extra, 0.0) if sign.extra else limit * SILENT_SHARE
        if seconds > patience:
            return rank, _gave_no_sign(rank, sign, seconds)
    found = _stuck(signs, limit, size)
    if found is None or found[0] is None or silent.get(found[0], 0.0) <= limit * SILENT_SHARE:
        return found
    return found[0], _gave_no_sign(found[0], signs[found[0]], silent[found[0]])


def _gave_no_sign(rank: int, sign: Sign, seconds: float) -> str:
    text = f"no sign of life for {span(seconds)}; it was last seen {sign.doing}"
    return f"rank {rank} does not answer: {text}"


def _stuck(signs: Mapping[int, Sign], limit: float, size: int) -> Found | None:
    waiting = {rank: sign for rank, sign in signs.items() if sign.waits}
    if not waiting:
        return None
    first = max(waiting, key=lambda rank: (waiting[rank].exchanges, waiting[rank].seconds))
    waiter = waiting[first]
    patience = max(limit, SLOWER * waiter.longest)
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
    """The signs of this rank, and its look at the others'."""

    def __init__(
        self, world: World, store: Any, *, limit: float = LIMIT_SECONDS, kept_by_first: bool = False
    ) -> None:
        """`kept_by_first`: the store is part of the first rank, not of who started the ranks."""
        self.world, self.limit, self._kept_by_first = world, limit, kept_by_first
        self._own = store
        self._pulse = min(PULSE_SECONDS, limit / PULSES)
        self._now = (Sign(), time.monotonic())
        self._signs: dict[int, Sign] = {}
        self._heard: dict[int, tuple[str, float]] = {}
        self._store_answered = self._looked_at = self._awake_since = time.monotonic()
        self._ended: End | None = None
        self._over, self._wake, self._left_sign = (threading.Event() for _ in range(3))
        self._threads: list[threading.Thread] = []
        self._told: Callable[[str], None] = lambda text: None
        self._folder: Path | None = None
        self._longest: dict[str, float] = {}
        self._computes, self._computed, self._idle_since = False, 0.0, 0.0

    # --- what this rank does

    def at(self, doing: str, extra: float = 0.0) -> None:
        """From now on this rank is `doing` that; it may take `extra` seconds beyond the limit."""
        self._set(doing=doing, extra=extra)

    def beat(self) -> None:
        """A part of what is being done is done."""
        self._set()

    @contextlib.contextmanager
    def work(self, doing: str, extra: float = NO_LIMIT) -> Iterator[None]:
        """Something that takes long, and is followed by what was done before."""
        before = self._now[0]
        self.at(doing, extra)
        self._leave_sign()
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

    def _leave_sign(self) -> None:
        """Let the others know at once: it may be long before another thread runs here."""
        if self._threads and self._own is not None:
            self._left_sign.clear()
            self._wake.set()
            self._left_sign.wait(TELL_SECONDS)

    def _set(self, **changed: Any) -> None:
        sign, since = self._now
        if not sign.extra:
            kind, seconds = _kind(sign), time.monotonic() - max(since, self._awake_since)
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._now = (replace(self._now[0], **changed), time.monotonic())

    @property
    def doing(self) -> str:
        return self._now[0].doing

    # --- what the others do

    def start(self) -> None:
        signs = [("signs-of-life", self._exchange_signs)] if self._own is not None else []
        for name, does in (*signs, ("watch", self._look)):
            thread = threading.Thread(target=does, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def report_to(self, folder: Path, told: Callable[[str], None]) -> None:
        """Where stacks are written when a rank does not answer, and who is told why all end."""
        self._folder, self._told = folder, told

    def watch_alone(self, limit: float, *, computes: bool) -> None:
        """Find this process hanging: without progress for so many seconds. `computes`: with the
        CPU, so that one that takes time of it is at work."""
        self.limit, self._computes = limit, computes
        self._pulse = min(PULSE_SECONDS, limit / PULSES)
        if not self._threads:
            self.start()

    def close(self) -> None:
        """No longer look at the store. A thread that is in there when the interpreter ends would
        abort the process."""
        self._over.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(TELL_SECONDS)

    def end_all(self, text: str, *, silent: bool = False) -> None:
        """Tell the others to end, wherever they are."""
        _tell(self._own, End(text=text, by=self.world.rank, silent=silent))

    def why_ended(self) -> str:
        """What a rank has said about the end of all; "" where none has."""
        if self._ended is None:
            with contextlib.suppress(RuntimeError):  # torch's errors of the network and the store
                self._ended = _told(self._own)
        return self._ended.text if self._ended is not None else ""

    def _exchange_signs(self) -> None:
        """Blocks where the process that keeps the store is stopped; `_look` never does."""
        try:
            store = self._own.clone()
            while not self._over.is_set():
                self._wake.wait(self._pulse)
                self._wake.clear()
                self._exchange_once(store)
        except (RuntimeError, ValueError):
            return  # the run is over, or nobody keeps the store any more: `_look` tells which

    def _exchange_once(self, store: Any) -> None:
        said = json.dumps(asdict(self._own_sign()))
        store.set(f"sign {self.world.rank}", said)
        self._left_sign.set()
        others = range(1, self.world.size) if self.world.is_first else (0,)
        there = [r for r in others if r in self._heard or store.check([f"sign {r}"])]
        for rank, got in zip(
            there, store.multi_get([f"sign {rank}" for rank in there]), strict=True
        ):
            text = got.decode()
            if self._heard.get(rank, ("", 0.0))[0] != text:
                self._heard[rank] = (text, time.monotonic())
                self._signs[rank] = Sign(**json.loads(text))
        self._ended = self._ended or _told(store)
        self._store_answered = time.monotonic()

    def _own_sign(self) -> Sign:
        sign, since = self._now
        return replace(sign, seconds=time.monotonic() - max(since, self._awake_since))

    def _forget_pause(self) -> None:
        """A pause of this process, or of the whole machine, is no silence of the others."""
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
                    # Who keeps the store may be the one that does not answer.
                    _within(TELL_SECONDS, partial(self._tell_others, end))
                    time.sleep(SPREAD_SECONDS)
                self._leave(end)

    def _tell_others(self, end: End) -> None:
        _tell(self._own.clone(), end)

    @property
    def _is_saving(self) -> bool:
        """What this rank is writing is finished first: it is what all continue from."""
        return self._now[0].extra > 0

    def _found(self) -> Found | None:
        if self._own is None:
            return self._hangs()
        if self._is_saving:
            return None
        now, own = time.monotonic(), self._own_sign()
        without = now - self._store_answered
        if without > self.limit * SILENT_SHARE:
            if self._kept_by_first:
                return 0, f"rank 0 does not answer: no sign of life for {span(without)}"
            # Who started the ranks may be stopped, as by Ctrl-Z, while they train.
            if own.waits and own.seconds > self.limit:
                text = f"no sign of life for {span(without)}; this rank was {own.doing}"
                return None, f"the machine of rank 0 does not answer: {text}"
            return None
        # A sign is read late where the store is slow: that is not the rank's silence.
        silent = {rank: now - at - without for rank, (_, at) in list(self._heard.items())}
        signs = {**self._signs, self.world.rank: own}
        return unanswered(signs, silent, limit=self.limit, size=self.world.size)

    def _hangs(self) -> Found | None:
        """Whether this process, alone, has done the same for too long."""
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
        """End this process, whatever its main thread is in."""
        told, code = end.text, EXIT_HUNG if end.silent else EXIT_RUN_FAILED
        if self._folder is not None and end.silent:
            path = self._write_stacks(self._folder, end.text)
            told += f"\n  what each rank was in: {path.parent}/rank-N.{STACKS}"
            if self._own is None:
                told = f"{end.text}\n  what it was in: {path}"
        record_failure(told, exit_code=code, of_another=self._own is not None, blamed=end.blamed)
        _within(TELL_SECONDS, lambda: self._told(end.text))
        for process in multiprocessing.active_children():  # one that is stopped would stay
            process.kill()
        show_cursor()
        if (
            not self.world.is_first or LAUNCH_FOLDER not in os.environ
        ):  # else shown by who started it
            with contextlib.suppress(OSError):
                os.write(2, f"{told}\n".encode())
        os._exit(code)

    def _write_stacks(self, folder: Path, text: str) -> Path:
        """Where they lie: in that folder, or where its disk does not answer in a temporary one."""
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

        _within(TELL_SECONDS, write)
        if not written.is_set():
            path = Path(tempfile.mkdtemp(prefix="expert-")) / path.name
            path.write_text(stacks, encoding="utf-8")
        return path


def _kind(sign: Sign) -> str:
    """What is done, without the number of the step that it is done for."""
    return sign.doing.partition(" ")[0]


def _within(seconds: float, does: Callable[[], None]) -> None:
    """Do something that may never end, for no longer than that."""
    thread = threading.Thread(target=does, daemon=True)
    thread.start()
    thread.join(seconds)


def _tell(store: Any, end: End) -> None:
    with contextlib.suppress(RuntimeError):  # nobody is left to be told
        store.set(ENDED, json.dumps(asdict(end)))


def _told(store: Any) -> End | None:
    return End(**json.loads(store.get(ENDED))) if store.check([ENDED]) else None
