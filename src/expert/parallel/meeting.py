"""Rendezvous of the ranks at the address of rank 0, with a message about who is missing.

It uses torch's store, hosted by rank 0 or by the launcher. Each rank signs in there and keeps
sending heartbeats; rank 0 decides when all have come.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.text import counted, span
from expert.core.world import World
from expert.parallel.launch import MasterAddress, WorldError, named_ranks

POLL_SECONDS = 0.1
REPORT_AFTER_SECONDS = 5.0
REPORT_AGAIN_SECONDS = 60.0
CONNECT_SECONDS = 20.0
"""A store answers immediately: what has not done so by then is another program."""
PRESENT_SECONDS = 3.0
"""Waiting processes send heartbeats; one that has sent none for this long has ended."""
EXTRA_WAIT_SECONDS = 10.0
"""Rank 0 reports who is missing; other ranks wait this much longer, then report it themselves."""
STORE_DAYS = 30
ADDRESS_IN_USE = "EADDRINUSE"
COMPLETE, REFUSED, READ, ARRIVALS = "complete", "refused", "read", "arrivals"

Tell = Callable[[str], None]
_hosted_stores: list[Any] = []
"""Stores hosted by this process until it ends."""


class RendezvousFailed(ExpertError):
    """The ranks did not find each other in time."""

    exit_code = EXIT_RUN_FAILED


@dataclass(frozen=True)
class Arrival:
    """A process that has signed in."""

    rank: int
    size: int
    """World size according to this process."""
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def meet(
    world: World,
    point: MasterAddress,
    *,
    limit: float,
    hosted_by_rank_0: bool,
    name: str,
    tell: Tell,
) -> Any:
    """Wait until all ranks have come; returns the store. Raises on all ranks if some do not come
    within `limit` seconds, or if those that came do not form a world.

    `hosted_by_rank_0`: otherwise the store exists already. `name`: of this start, in a store that
    outlives restarts.
    """
    ends = time.monotonic() + limit
    opened = _open(
        world, point, limit=limit, ends=ends, keep=hosted_by_rank_0 and world.is_first, tell=tell
    )
    store = dist.PrefixStore(name, opened)  # type: ignore[attr-defined]
    try:
        _Rendezvous(world, point, store, limit=limit, ends=ends, tell=tell).wait()
    except (dist.DistNetworkError, dist.DistStoreError):
        text = f"rank 0 has ended while this rank, {world.rank}, waited for the others"
        raise RendezvousFailed(f"{text}  (see its output)") from None
    return store


# --- the store ------------------------------------------------------------------------------------


def _open(
    world: World, point: MasterAddress, *, limit: float, ends: float, keep: bool, tell: Tell
) -> Any:
    """Connect to the store by its address, also from the rank that hosts it.

    torch's constructor never returns if another program listens there, so it runs in a thread with
    a timeout. It would end the process if a store cannot reach itself.
    """
    if keep:
        _hosted_stores.append(_hosted(point))
    _reach(world, point, limit=limit, ends=ends, tell=tell)
    clients: list[Any] = []
    long = datetime.timedelta(days=STORE_DAYS)

    def connect() -> None:
        with contextlib.suppress(RuntimeError):  # torch's network errors
            client = TCPStore(
                point.address, point.port, is_master=False, wait_for_workers=False, timeout=long
            )
            clients.append(client)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(min(limit, CONNECT_SECONDS))
    if clients:
        return clients[0]
    text = f"another program is listening at {_named(point)}"
    fix = "give all ranks the MASTER_ADDR and MASTER_PORT of rank 0, and a port that is free"
    raise WorldError(f"rank {world.rank} cannot meet the others", [f"{text}  ({fix})"])


def _hosted(point: MasterAddress) -> Any:
    try:
        return TCPStore(
            "127.0.0.1", point.port, is_master=True, wait_for_workers=False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if ADDRESS_IN_USE not in str(error):
            raise
    fix = "end what uses it, or set another MASTER_PORT for all ranks"
    text = f"port {point.port} is in use on this machine  ({fix})"
    raise WorldError(f"rank 0 cannot be met at {_named(point)}", [text])


def _reach(world: World, point: MasterAddress, *, limit: float, ends: float, tell: Tell) -> None:
    """Wait until something listens there: rank 0 may start later than this rank."""
    waits = _WaitReporter(tell)
    while True:
        try:
            with socket.create_connection((point.address, point.port), timeout=2.0):
                return
        except OSError as error:
            why = error.strerror or str(error) or "no answer"
        if time.monotonic() >= ends:
            fix = (
                "start rank 0 on the machine of that address; MASTER_ADDR and MASTER_PORT must be "
                "the same for all ranks, and no firewall may be in between"
            )
            text = f"rank 0 could not be reached at {_named(point)} within {span(limit)}: {why}"
            raise RendezvousFailed(f"{text}  ({fix})")
        waits.tell(f"rank {world.rank} waits for rank 0 at {_named(point)}: {why}", limit)
        time.sleep(POLL_SECONDS)


def _named(point: MasterAddress) -> str:
    return f"{point.address}:{point.port}"


class _WaitReporter:
    """Reports after a while what is being waited for, and again every minute."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._next = tell, time.monotonic() + REPORT_AFTER_SECONDS

    def tell(self, text: str, limit: float) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_AGAIN_SECONDS
            self._tell(f"{text} (at most {span(limit)})")


# --- who has come ---------------------------------------------------------------------------------


def arrival_problems(present: Sequence[Arrival], size: int) -> list[str]:
    """Why these processes cannot form a world of `size`."""
    problems = []
    for rank in sorted({arrival.rank for arrival in present}):
        same = [arrival for arrival in present if arrival.rank == rank]
        if len(same) > 1:
            where = " and ".join(f"process {arrival.pid} on {arrival.host}" for arrival in same)
            fix = "give each process its own RANK or --node-rank"
            problems.append(f"rank {rank} was started {len(same)} times: {where}  ({fix})")
    for arrival in present:
        if arrival.size != size:
            problems.append(f"{arrival} has WORLD_SIZE={arrival.size}, but it is {size} on rank 0")
    return problems


class _Rendezvous:
    """The arrivals in a store, as seen by one rank."""

    def __init__(
        self,
        world: World,
        point: MasterAddress,
        store: Any,
        *,
        limit: float,
        ends: float,
        tell: Tell,
    ) -> None:
        self._world, self._point, self._store = world, point, store
        self._limit, self._ends, self._waits = limit, ends, _WaitReporter(tell)
        self._refused = False
        """By this process."""
        self._arrivals: dict[int, Arrival] = {}
        self._shown: dict[int, tuple[bytes, float, float]] = {}
        """Of each arrival: its last heartbeat, when that was seen, and when the first was."""

    def wait(self) -> None:
        own = Arrival(self._world.rank, self._world.size, socket.gethostname(), os.getpid())
        number = self._store.add(ARRIVALS, 1)
        self._store.set(f"beat {number}", "0")
        self._store.set(f"arrival {number}", json.dumps(asdict(own)))
        beats = 0
        while True:
            beats += 1
            self._store.set(f"beat {number}", str(beats))
            self._look()
            if self._store.check([REFUSED]):
                self._raise_refused()
            if self._store.check([COMPLETE]):
                self._check_included(own, number)
                return
            if self._world.is_first:
                self._decide()
            elif time.monotonic() >= self._ends + EXTRA_WAIT_SECONDS:
                raise RendezvousFailed(self._missing_message(self._present()))
            self._waits.tell(self._waiting_for(), self._limit)
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        now = time.monotonic()
        for number in range(1, self._store.add(ARRIVALS, 0) + 1):
            if number not in self._arrivals and self._store.check([f"arrival {number}"]):
                self._arrivals[number] = Arrival(**json.loads(self._store.get(f"arrival {number}")))
                self._shown[number] = (b"", now, now)
        for number, (before, _, first) in list(self._shown.items()):
            beat = self._store.get(f"beat {number}")
            if beat != before:
                self._shown[number] = (beat, now, first)

    def _present(self) -> dict[int, Arrival]:
        """Arrivals that are still alive, by number."""
        since = time.monotonic() - PRESENT_SECONDS
        return {n: arrival for n, arrival in self._arrivals.items() if self._shown[n][1] >= since}

    def _decide(self) -> None:
        present, size = self._present(), self._world.size
        ranks = [arrival.rank for arrival in present.values()]
        problems = arrival_problems(list(present.values()), size)
        # If two processes claim the same rank, one may have ended: that shows in a moment.
        settled = time.monotonic() - PRESENT_SECONDS
        if problems and all(self._shown[number][2] < settled for number in present):
            self._refuse({"problems": problems})
        elif not problems and sorted(ranks) == list(range(size)):
            self._store.set(COMPLETE, json.dumps(sorted(present)))
        elif time.monotonic() >= self._ends:
            self._refuse({"missing": self._missing_message(present)})

    def _refuse(self, why: dict[str, Any]) -> None:
        """Tell all ranks, and wait for them to read it: the store ends with this rank."""
        if self._store.check([REFUSED]):  # by another process that claims to be rank 0
            return
        self._refused = True
        self._store.set(REFUSED, json.dumps(why))
        others, end = len(self._present()) - 1, time.monotonic() + PRESENT_SECONDS
        while self._store.add(READ, 0) < others and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _raise_refused(self) -> None:
        why = json.loads(self._store.get(REFUSED))
        if not self._refused:
            with contextlib.suppress(RuntimeError):
                self._store.add(READ, 1)
        if "problems" in why:
            raise WorldError("these ranks cannot train together", why["problems"])
        raise RendezvousFailed(why["missing"])

    def _check_included(self, own: Arrival, number: int) -> None:
        """Raise if the others have started without this process."""
        numbers = json.loads(self._store.get(COMPLETE))
        if number in numbers:
            return
        ranks = [self._arrivals[arrived] for arrived in numbers]
        problems = arrival_problems([*ranks, own], ranks[0].size)
        head = f"the {counted(len(ranks), 'rank')} at {_named(self._point)} are complete without it"
        raise WorldError(f"{own}: {head}", problems or ["they have started already"])

    def _absent(self, present: dict[int, Arrival]) -> str:
        came = {arrival.rank for arrival in present.values()}
        absent = [rank for rank in range(self._world.size) if rank not in came]
        return named_ranks(absent) if absent else ""

    def _waiting_for(self) -> str:
        present, size = self._present(), self._world.size
        here = f"{len(present)} of {size} ranks are at {_named(self._point)}"
        return f"waiting for {self._absent(present) or 'rank 0'}; {here}"

    def _missing_message(self, present: dict[int, Arrival]) -> str:
        absent = self._absent(present)
        head = f"{absent} did not come to {_named(self._point)} within {span(self._limit)}"
        lines = [
            f"  - {arrival} is waiting here"
            for arrival in sorted(present.values(), key=lambda a: a.rank)
        ]
        fix = (
            f"  (start {absent} with the same MASTER_ADDR and MASTER_PORT; no firewall may close "
            f"port {self._point.port} of {self._point.address})"
        )
        return "\n".join([head, *lines, fix])
