"""The processes of a run talk to each other: numbers, agreements, failures.

Every exchange has the same form, whatever it is for. So a rank that fails can take part in the
exchange that the others are waiting in, wherever that is, and all of them learn of it there.
"""

from __future__ import annotations

import atexit
import datetime
import os
import pickle
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.world import ALONE, World

NUMBERS = 6
"""Room for numbers in an exchange."""
WAIT_SECONDS = 600
"""The longest that a rank waits for the others between two exchanges: one may be compiling, or
writing a large checkpoint. Preparing data has no limit, it waits in another way."""
POLL_SECONDS = 0.2
CLOSE_SECONDS = 5
FAILED = 1
ENDED = "ended"
"""The store's key under which a rank says why all must end."""

Made = TypeVar("Made")


class PeerFailed(ExpertError):
    """Another rank failed; `failure` is what that means for the plan, None where nothing helps."""

    exit_code = EXIT_RUN_FAILED
    of_another = True

    def __init__(self, rank: int | None, failure: Any, text: str) -> None:
        self.rank, self.failure, self.text = rank, failure, text
        who = "" if text.startswith("rank ") else "another rank failed: "
        super().__init__(f"{who}{text}" if rank is None else f"rank {rank} failed: {text}")


LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""What gloo and NCCL say when another process has ended or does not answer."""


class Group:
    """All ranks of a run. One process alone is a group too, and its exchanges are its own numbers.

    `signal` is the exit code that a signal to any rank asks for, as all ranks know it since the
    last exchange: whoever decides by it decides the same everywhere.
    """

    def __init__(self, world: World = ALONE, *, talks: bool | None = None) -> None:
        """`talks`: whether numbers go over the network; None: where there are several ranks."""
        self.world = world
        self.talks = world.size > 1 if talks is None else talks
        self._requested: Callable[[], int | None] = lambda: None
        self._signal: int | None = None
        self._busy: Callable[[], float] = lambda: 0.0
        self._paces: list[float] = []
        self._waits = 0
        self._over = threading.Event()
        self._watch: threading.Thread | None = None
        # Of its own, so that nothing said here meets a sum that another rank is in the middle of.
        self._talk: Any = dist.new_group(backend="gloo") if self.talks else None

    def listen(
        self, requested: Callable[[], int | None], busy: Callable[[], float] = lambda: 0.0
    ) -> None:
        """From now on tell the others what a signal to this rank asks for, and how many seconds of
        a step it was busy."""
        self._requested, self._busy = requested, busy

    def rank_fields(self) -> dict[str, Any]:
        """Which rank takes longest to compute its share of a step, and how long the middle one."""
        if not self.talks or not any(self._paces):
            return {}
        slowest = max(self._paces)
        return {
            "slowest_rank": self._paces.index(slowest),
            "slowest_rank_seconds": slowest,
            "median_rank_seconds": statistics.median(self._paces),
        }

    @property
    def signal(self) -> int | None:
        return self._signal if self.talks else self._requested()

    def total(self, *numbers: int) -> tuple[int, ...]:
        """Each number summed over all ranks."""
        if not self.talks:
            return numbers
        return tuple(map(sum, zip(*self.exchange(*numbers), strict=True)))

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every rank; raises PeerFailed where one of them has failed."""
        if not self.talks:
            return [numbers]
        found = self._all(0, numbers)
        if any(each[0] == FAILED for each in found):
            raise PeerFailed(*self._first_failure(None))
        return [each[3 : 3 + len(numbers)] for each in found]

    def agree(self) -> None:
        """Go on together, or raise PeerFailed."""
        self.exchange()

    def failed(self, failure: Any, text: str) -> Any:
        """Tell the others that this rank failed; the failure that all of them answer: that of the
        first rank which has one. Raises PeerFailed where that is one that nothing helps against."""
        if not self.talks:
            return failure
        self._all(FAILED, ())
        rank, agreed, why = self._first_failure((self.world.rank, failure, text))
        if agreed is None and rank != self.world.rank:
            raise PeerFailed(rank, None, why)
        return agreed

    def made_by_first(self, make: Callable[[], Made]) -> Made:
        """What the first rank makes, which may take hours; the others wait for it."""
        if not self.talks:
            return make()
        store, key = _store(), f"made by first {self._waits}"
        self._waits += 1

        def tell(found: Any) -> None:
            store.set(key, pickle.dumps(found))

        if self.world.is_first:
            try:
                made = make()
            except BaseException as error:
                tell((None, f"{error}" or type(error).__name__))
                raise
            tell((made, ""))
            return made
        try:
            while not store.check([key]):
                time.sleep(POLL_SECONDS)
            made, failed = pickle.loads(store.get(key))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerFailed(0, None, "it ended without a word") from error
        if failed:
            raise PeerFailed(0, None, failed)
        return made

    def gather(self, mine: Any) -> list[Any]:
        """What every rank has made."""
        if not self.talks:
            return [mine]
        self.agree()
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, mine, group=self._talk)
        return found

    def first_of(self, mine: Any) -> Any:
        """What the lowest rank has that has anything but None."""
        (some,) = self.total(int(mine is not None))
        if not some or not self.talks:
            return mine
        return next(each for each in self.gather(mine) if each is not None)

    def end_all(self, text: str) -> None:
        """Tell the others to end, wherever they are: for a failure in the middle of something that
        they cannot do without this rank, and would wait in."""
        _store().set(ENDED, f"rank {self.world.rank} failed: {text}")

    def lost(self, error: BaseException) -> PeerFailed | None:
        """What is said where another rank has gone in the middle of an exchange or a sum."""
        chain: list[BaseException | None] = [error, error.__cause__]
        if not self.talks or not any(map(_is_of_a_peer, chain)):
            return None
        try:
            told = _store().get(ENDED).decode() if _store().check([ENDED]) else ""
        except (dist.DistNetworkError, dist.DistStoreError):
            told = ""
        return PeerFailed(None, None, told or "it has ended or does not answer any more")

    def end_with_others(self, told: Callable[[str], None]) -> None:
        """From now on, end this process when another rank says so; `told` gets its message."""

        def watch() -> None:
            while not self._over.wait(POLL_SECONDS):
                try:
                    if not _store().check([ENDED]):
                        continue
                    text = _store().get(ENDED).decode()
                except (dist.DistNetworkError, dist.DistStoreError, ValueError):
                    return  # the run is over, or the process that kept the store has gone
                if not text.startswith(f"rank {self.world.rank} "):
                    told(text)
                    os._exit(EXIT_RUN_FAILED)

        if self.talks:
            self._watch = threading.Thread(target=watch, name="end-with-others", daemon=True)
            self._watch.start()

    def leave_together(self) -> None:
        """Wait until the first rank has nothing left to write or show: it may keep the store, and
        who started the ranks may end all of them when one has ended."""
        self.made_by_first(lambda: None)
        self.agree()

    def close(self) -> None:
        """No longer look at the store. A thread that is in there when the interpreter ends would
        abort the process."""
        self._over.set()
        if self._watch is not None:
            self._watch.join(CLOSE_SECONDS)

    def _all(self, status: int, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """An exchange as it is: status, signal, pace and numbers of every rank."""
        assert len(numbers) <= NUMBERS
        pace = round(self._busy() * 1e6)
        message = [status, self._requested() or 0, pace, *numbers]
        message += [0] * (NUMBERS - len(numbers))
        sent = torch.tensor(message, dtype=torch.int64)
        got = [torch.empty_like(sent) for _ in range(self.world.size)]
        dist.all_gather(got, sent, group=self._talk)
        found = [tuple(each.tolist()) for each in got]
        self._signal = max(each[1] for each in found) or None
        self._paces = [each[2] / 1e6 for each in found]
        return found

    def _first_failure(self, mine: tuple[int, Any, str] | None) -> tuple[int, Any, str]:
        """What failed, the same on every rank: of several failures the lowest rank's."""
        found: list[Any] = [None] * self.world.size
        dist.all_gather_object(found, mine, group=self._talk)
        first: tuple[int, Any, str] = next(each for each in found if each is not None)
        return first


def open_alone(device: torch.device) -> None:
    """A process group of this process alone, where it has none: shards want one, even of one."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    made: Any = dist
    made.init_process_group(backend, rank=0, world_size=1, store=made.HashStore())
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _is_of_a_peer(error: BaseException | None) -> bool:
    kinds = dist.DistBackendError | dist.DistNetworkError
    return isinstance(error, kinds) or any(words in str(error) for words in LOST)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def open_group(
    world: World, *, device: str, share_card: bool = False, limit: float = WAIT_SECONDS
) -> Iterator[Group]:
    """The group of this run's ranks, by the addresses in the environment; one rank needs none.

    Tensors of a card go over NCCL, unless ranks share a card, which NCCL refuses; gloo takes them
    through the host then. Everything else goes over gloo.
    """
    if world.size == 1:
        yield Group()
        return
    backend = "gloo"
    if device == "cuda":
        # One card is seen where a cluster gives each process its own; or ranks share one.
        cards = torch.cuda.device_count()
        torch.cuda.set_device(world.local_rank % cards)
        backend = "gloo" if share_card else "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=limit)
    found = rendezvous("env://", rank=world.rank, world_size=world.size, timeout=timeout)
    store, _, _ = next(found)
    # The store of torch elastic outlives its ranks: those of a restart must not find the addresses
    # of the ones before.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"start {start}", store),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
    group = Group(world)
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()
