"""The processes of a run talk to each other: numbers, agreements, failures.

Every exchange has the same form, whatever it is for. So a rank that fails can take part in the
exchange that the others are waiting in, wherever that is, and all of them learn of it there.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.text import span
from expert.core.world import ALONE, World
from expert.parallel.launch import meeting_point
from expert.parallel.meeting import NotAllCame, meet
from expert.parallel.watch import LIMIT_SECONDS, NO_LIMIT, Watch

HEAD = 4
"""Numbers that are in every exchange."""
NUMBERS = 6
"""Room for numbers in an exchange."""
EXCHANGE_DAYS = 30
"""No limit: a first rank may write a large checkpoint meanwhile. A rank that does not answer is
found by the watch."""
POLL_SECONDS = 0.2
FAILED = 1
SAVE = 1
"""In the place of a signal's exit code: somebody asks for a checkpoint."""

Made = TypeVar("Made")


class PeerFailed(ExpertError):
    """Another rank failed; `failure` is what that means for the plan, None where nothing helps."""

    exit_code = EXIT_RUN_FAILED
    of_another = True

    def __init__(self, rank: int | None, failure: Any, text: str) -> None:
        self.rank, self.failure, self.text = rank, failure, text
        who = "" if text.startswith("rank ") else "another rank failed: "
        super().__init__(f"{who}{text}" if rank is None else f"rank {rank} failed: {text}")


TIMED_OUT = "Timed out waiting"
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", TIMED_OUT)
"""What gloo and NCCL say when another process has ended or does not answer."""


class Group:
    """All ranks of a run. One process alone is a group too, and its exchanges are its own numbers.

    `signal` is the exit code that a signal to any rank asks for, as all ranks know it since the
    last exchange: whoever decides by it decides the same everywhere.
    """

    def __init__(
        self, world: World = ALONE, *, talks: bool | None = None, watch: Watch | None = None
    ) -> None:
        """`talks`: whether numbers go over the network; None: where there are several ranks."""
        self.world = world
        self.talks = world.size > 1 if talks is None else talks
        self._requested: Callable[[], int | None] = lambda: None
        self._signal: int | None = None
        self._wanted: Callable[[], bool] = lambda: False
        self._save = False
        self._busy: Callable[[], float] = lambda: 0.0
        self._paces: list[float] = []
        self._waits = 0
        self._found: Any = None
        self._any_found = False
        self._watch = watch
        # Of its own, so that nothing said here meets a sum that another rank is in the middle of.
        self._talk: Any = None
        if self.talks:
            long = datetime.timedelta(days=EXCHANGE_DAYS)
            self._talk = dist.new_group(backend="gloo", timeout=long)

    def listen(
        self,
        requested: Callable[[], int | None],
        busy: Callable[[], float] = lambda: 0.0,
        wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """From now on tell the others what a signal to this rank asks for, how many seconds of a
        step it was busy, and whether a checkpoint is `wanted`, which is asked once."""
        self._requested, self._busy, self._wanted = requested, busy, wanted

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

    def at(self, doing: str, extra: float = 0.0) -> None:
        """From now on this rank is `doing` that, for those who would wait for it in vain."""
        if self._watch is not None:
            self._watch.at(doing, extra)

    def work(self, doing: str, extra: float = NO_LIMIT) -> AbstractContextManager[None]:
        """Something for which the others wait longer than the limit, by `extra` seconds or as long
        as this process lives."""
        return nullcontext() if self._watch is None else self._watch.work(doing, extra)

    def watch_over(
        self, folder: Path, told: Callable[[str], None], *, limit: float, computes: bool
    ) -> None:
        """From now on write into that run folder what this process was in when the run hangs, and
        give `told` the message before it ends. `limit`: seconds, for a process alone; 0: never;
        `computes`: with the CPU."""
        if self._watch is None:
            return
        self._watch.report_to(folder / "ranks" if self.talks else folder, told)
        if not self.talks and limit:
            self._watch.watch_alone(limit, computes=computes)

    @property
    def signal(self) -> int | None:
        return self._signal if self.talks else self._requested()

    def take_save(self) -> bool:
        """Whether somebody has asked for a checkpoint since the last time: same on all ranks."""
        if not self.talks:
            return self._wanted()
        asked, self._save = self._save, False
        return asked

    def total(self, *numbers: int) -> tuple[int, ...]:
        """Each number summed over all ranks."""
        if not self.talks:
            return numbers
        return tuple(map(sum, zip(*self.exchange(*numbers), strict=True)))

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every rank; raises PeerFailed where one of them has failed."""
        if not self.talks:
            if self._watch is not None:
                self._watch.beat()
            return [numbers]
        found = self._all(0, numbers)
        if any(each[0] == FAILED for each in found):
            raise PeerFailed(*self._first_failure(None))
        return [each[HEAD : HEAD + len(numbers)] for each in found]

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
        return self._gathered(mine)

    def first_of(self, mine: Any) -> Any:
        """What the lowest rank has that has anything but None; all ranks ask together. The others
        learn of it in the next exchange, whatever that is for, so it is given when they ask again.
        """
        if not self.talks:
            return mine
        self._found = mine if self._found is None else self._found
        if not self._any_found:
            return None
        given, self._found = self._found, None
        return next(each for each in self.gather(given) if each is not None)

    def end_all(self, text: str) -> None:
        """Tell the others to end, wherever they are: for a failure in the middle of something that
        they cannot do without this rank, and would wait in."""
        if self._watch is not None:
            self._watch.end_all(f"rank {self.world.rank} failed: {text}")

    def lost(self, error: BaseException) -> PeerFailed | None:
        """What is said where another rank has gone in the middle of an exchange or a sum."""
        chain: list[BaseException | None] = [error, error.__cause__]
        if not self.talks or not any(map(_is_of_a_peer, chain)):
            return None
        told = self._watch.why_ended() if self._watch is not None else ""
        if not told and self._watch is not None and any(TIMED_OUT in str(each) for each in chain):
            waited, doing = span(self._watch.limit), self._watch.doing
            told = f"rank {self.world.rank} has waited {waited} for the sums of the others, {doing}"
            self._watch.end_all(told, silent=True)
        return PeerFailed(None, None, told or "it has ended or does not answer any more")

    def leave_together(self) -> None:
        """Wait until the first rank has nothing left to write or show: it may keep the store, and
        who started the ranks may end all of them when one has ended."""
        with self.work("leaving"):
            self.made_by_first(lambda: None)
            self.agree()

    def close(self) -> None:
        """No longer look at the store. A thread that is in there when the interpreter ends would
        abort the process."""
        if self._watch is not None:
            self._watch.close()

    def _all(self, status: int, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """An exchange as it is: status, signal, pace, whether it has found something, and numbers
        of every rank."""
        assert len(numbers) <= NUMBERS
        pace = round(self._busy() * 1e6)
        asked = self._requested() or (SAVE if self._wanted() else 0)
        message = [status, asked, pace, int(self._found is not None), *numbers]
        message += [0] * (NUMBERS - len(numbers))
        sent = torch.tensor(message, dtype=torch.int64)
        got = [torch.empty_like(sent) for _ in range(self.world.size)]
        with self._waiting():
            dist.all_gather(got, sent, group=self._talk)
        found = [tuple(each.tolist()) for each in got]
        asked = max(each[1] for each in found)
        self._signal = asked if asked > SAVE else None
        self._save = self._save or asked == SAVE
        self._paces = [each[2] / 1e6 for each in found]
        if any(each[0] == FAILED for each in found):
            self._found = None  # it was about a plan that is over
        self._any_found = any(each[3] for each in found) and not any(each[0] for each in found)
        return found

    def _first_failure(self, mine: tuple[int, Any, str] | None) -> tuple[int, Any, str]:
        """What failed, the same on every rank: of several failures the lowest rank's."""
        first: tuple[int, Any, str] = next(
            each for each in self._gathered(mine) if each is not None
        )
        return first

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.world.size
        with self._waiting():
            dist.all_gather_object(found, mine, group=self._talk)
        return found

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.waiting()


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
    world: World,
    *,
    device: str,
    share_card: bool = False,
    limit: float = LIMIT_SECONDS,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Group]:
    """The group of this run's ranks, by the addresses in the environment; one rank needs none.

    Tensors of a card go over NCCL, unless ranks share a card, which NCCL refuses; gloo takes them
    through the host then. Everything else goes over gloo. `limit`: seconds after which a rank that
    does not come or does not answer counts as lost; `tell` is given what is being waited for.
    """
    if world.size == 1:
        with contextlib.closing(Group(world, watch=Watch(world, None))) as group:
            yield group
        return
    backend = "gloo"
    if device == "cuda":
        # One card is seen where a cluster gives each process its own; or ranks share one.
        cards = torch.cuda.device_count()
        torch.cuda.set_device(world.local_rank % cards)
        backend = "gloo" if share_card else "cpu:gloo,cuda:nccl"
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # The store of torch elastic outlives its ranks: those of a restart must not find the addresses
    # of the ones before.
    name = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = meet(world, meeting_point(), limit=limit, kept=kept, name=name, tell=tell)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=limit),
        )
        watch = Watch(world, store, limit=limit, kept_by_first=kept)
        group = Group(world, watch=watch)
    except RuntimeError as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "set GLOO_SOCKET_IFNAME to the interface that joins the machines"
        raise NotAllCame(
            f"all ranks have come, but cannot talk to each other: {said}  ({fix})"
        ) from error
    watch.start()
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()
