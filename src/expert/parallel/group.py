"""Communication between the ranks of a run: numbers, decisions, failures.

Every exchange has the same format, whatever it is for. So a rank that fails can join the exchange
in which the others are waiting, and all of them learn of the failure there.
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
from expert.core.world import SINGLE_PROCESS, World
from expert.parallel.launch import master_address
from expert.parallel.meeting import RendezvousFailed, meet
from expert.parallel.watch import LIMIT_SECONDS, NO_LIMIT, Watch

HEAD = 4
"""Numbers in the header of every exchange."""
NUMBERS = 6
"""Maximum number of payload numbers."""
EXCHANGE_DAYS = 30
"""Practically unlimited: rank 0 may be writing a large checkpoint. The watch finds ranks that do
not answer."""
POLL_SECONDS = 0.2
FAILED = 1
SAVE = 1
"""In the field of a signal's exit code: a checkpoint is requested."""

Made = TypeVar("Made")


class PeerFailed(ExpertError):
    """Another rank failed; `failure`: its meaning for the plan, None if no other plan helps."""

    exit_code = EXIT_RUN_FAILED
    of_another = True

    def __init__(self, rank: int | None, failure: Any, text: str) -> None:
        self.rank, self.failure, self.text = rank, failure, text
        who = "" if text.startswith("rank ") else "another rank failed: "
        super().__init__(f"{who}{text}" if rank is None else f"rank {rank} failed: {text}")


TIMED_OUT = "Timed out waiting"
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", TIMED_OUT)
"""Parts of error messages of gloo and NCCL when another process has ended or does not answer."""


class Group:
    """All ranks of a run. A single process is a group too, and exchanges only with itself.

    `signal` is the exit code requested by a signal to any rank, as of the last exchange: the same
    on all ranks, so that all decide the same.
    """

    def __init__(
        self,
        world: World = SINGLE_PROCESS,
        *,
        is_distributed: bool | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`is_distributed`: whether to use the network; None: if there are several ranks."""
        self.world = world
        self.is_distributed = world.size > 1 if is_distributed is None else is_distributed
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
        # A separate group, so that these messages never mix with a sum in progress.
        self._message_group: Any = None
        if self.is_distributed:
            long = datetime.timedelta(days=EXCHANGE_DAYS)
            self._message_group = dist.new_group(backend="gloo", timeout=long)

    def listen(
        self,
        requested: Callable[[], int | None],
        busy: Callable[[], float] = lambda: 0.0,
        wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Report to the other ranks, from now on: requests by signals to this rank, the seconds of
        a step it was busy, and whether a checkpoint is `wanted` (called once per exchange)."""
        self._requested, self._busy, self._wanted = requested, busy, wanted

    def rank_fields(self) -> dict[str, Any]:
        """The rank that takes longest for its share of a step, and the median of all."""
        if not self.is_distributed or not any(self._paces):
            return {}
        slowest = max(self._paces)
        return {
            "slowest_rank": self._paces.index(slowest),
            "slowest_rank_seconds": slowest,
            "median_rank_seconds": statistics.median(self._paces),
        }

    def at(self, doing: str, extra: float = 0.0) -> None:
        """Record what this rank is doing, for the watch."""
        if self._watch is not None:
            self._watch.at(doing, extra)

    def work(self, doing: str, extra: float = NO_LIMIT) -> AbstractContextManager[None]:
        """Something for which the others wait longer than the limit: by `extra` seconds, or as long
        as this process lives."""
        return nullcontext() if self._watch is None else self._watch.work(doing, extra)

    def watch_for_hangs(
        self, folder: Path, report: Callable[[str], None], *, limit: float, computes: bool
    ) -> None:
        """If the run hangs, write stack traces to its folder and pass the message to `report`
        before this process ends. `limit`: seconds, for a single process; 0: never; `computes`: on
        the CPU."""
        if self._watch is None:
            return
        self._watch.report_to(folder / "ranks" if self.is_distributed else folder, report)
        if not self.is_distributed and limit:
            self._watch.watch_single_process(limit, computes=computes)

    @property
    def signal(self) -> int | None:
        return self._signal if self.is_distributed else self._requested()

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call; the same on all ranks."""
        if not self.is_distributed:
            return self._wanted()
        asked, self._save = self._save, False
        return asked

    def total(self, *numbers: int) -> tuple[int, ...]:
        if not self.is_distributed:
            return numbers
        return tuple(map(sum, zip(*self.exchange(*numbers), strict=True)))

    def exchange(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every rank; raises PeerFailed if one of them has failed."""
        if not self.is_distributed:
            if self._watch is not None:
                self._watch.beat()
            return [numbers]
        messages = self._all(0, numbers)
        if any(message[0] == FAILED for message in messages):
            raise PeerFailed(*self._first_failure(None))
        return [message[HEAD : HEAD + len(numbers)] for message in messages]

    def barrier(self) -> None:
        """Continue together, or raise PeerFailed."""
        self.exchange()

    def failed(self, failure: Any, text: str) -> Any:
        """Tell the other ranks that this one failed; returns the failure that all act on: that of
        the lowest rank that has one. Raises PeerFailed if no other plan helps against it."""
        if not self.is_distributed:
            return failure
        self._all(FAILED, ())
        rank, agreed, why = self._first_failure((self.world.rank, failure, text))
        if agreed is None and rank != self.world.rank:
            raise PeerFailed(rank, None, why)
        return agreed

    def run_on_rank_0(self, make: Callable[[], Made]) -> Made:
        """The result of `make` on rank 0, which may take hours; the others wait."""
        if not self.is_distributed:
            return make()
        store, key = _store(), f"made by first {self._waits}"
        self._waits += 1

        def publish(result: Any) -> None:
            store.set(key, pickle.dumps(result))

        if self.world.is_first:
            try:
                made = make()
            except BaseException as error:
                publish((None, f"{error}" or type(error).__name__))
                raise
            publish((made, ""))
            return made
        try:
            while not store.check([key]):
                time.sleep(POLL_SECONDS)
            made, failed = pickle.loads(store.get(key))
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerFailed(0, None, "it ended without a message") from error
        if failed:
            raise PeerFailed(0, None, failed)
        return made

    def gather(self, mine: Any) -> list[Any]:
        if not self.is_distributed:
            return [mine]
        self.barrier()
        return self._gathered(mine)

    def first_not_none(self, mine: Any) -> Any:
        """The value of the lowest rank that has one (not None); all ranks call this together. Ranks
        learn in the next exchange, of any kind, that there is a value, so the call after that
        returns it."""
        if not self.is_distributed:
            return mine
        self._found = mine if self._found is None else self._found
        if not self._any_found:
            return None
        value, self._found = self._found, None
        return next(gathered for gathered in self.gather(value) if gathered is not None)

    def end_all(self, text: str) -> None:
        """Tell the other ranks to end, whatever they are doing: for failures during something that
        they cannot finish without this rank."""
        if self._watch is not None:
            self._watch.end_all(f"rank {self.world.rank} failed: {text}")

    def lost(self, error: BaseException) -> PeerFailed | None:
        """The error to report if `error` means that another rank is gone."""
        chain: list[BaseException | None] = [error, error.__cause__]
        if not self.is_distributed or not any(map(_is_peer_error, chain)):
            return None
        why = self._watch.why_ended() if self._watch is not None else ""
        if not why and self._watch is not None and any(TIMED_OUT in str(part) for part in chain):
            waited, doing = span(self._watch.limit), self._watch.doing
            why = f"rank {self.world.rank} has waited {waited} for the sums of the others, {doing}"
            self._watch.end_all(why, silent=True)
        return PeerFailed(None, None, why or "it has ended or does not answer any more")

    def exit_barrier(self) -> None:
        """Wait until rank 0 has finished writing: it may host the store, and the launcher may end
        all ranks when one has ended."""
        with self.work("leaving"):
            self.run_on_rank_0(lambda: None)
            self.barrier()

    def close(self) -> None:
        """Stop using the store. A thread inside it when the interpreter ends would abort the
        process."""
        if self._watch is not None:
            self._watch.close()

    def _all(self, status: int, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """A raw exchange: status, signal, pace, whether something was found, and numbers of every
        rank."""
        assert len(numbers) <= NUMBERS
        pace = round(self._busy() * 1e6)
        asked = self._requested() or (SAVE if self._wanted() else 0)
        message = [status, asked, pace, int(self._found is not None), *numbers]
        message += [0] * (NUMBERS - len(numbers))
        sent = torch.tensor(message, dtype=torch.int64)
        got = [torch.empty_like(sent) for _ in range(self.world.size)]
        with self._waiting():
            dist.all_gather(got, sent, group=self._message_group)
        messages = [tuple(fields.tolist()) for fields in got]
        asked = max(fields[1] for fields in messages)
        self._signal = asked if asked > SAVE else None
        self._save = self._save or asked == SAVE
        self._paces = [fields[2] / 1e6 for fields in messages]
        if any(fields[0] == FAILED for fields in messages):
            self._found = None  # it concerned a plan that is over
        self._any_found = any(fields[3] for fields in messages) and not any(
            fields[0] for fields in messages
        )
        return messages

    def _first_failure(self, mine: tuple[int, Any, str] | None) -> tuple[int, Any, str]:
        """The failure of the lowest rank, the same on every rank."""
        first: tuple[int, Any, str] = next(
            failure for failure in self._gathered(mine) if failure is not None
        )
        return first

    def _gathered(self, mine: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        with self._waiting():
            dist.all_gather_object(values, mine, group=self._message_group)
        return values

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.waiting()


def open_single_process_group(device: torch.device) -> None:
    """Open a process group of this process alone, unless there is one: FSDP needs a group."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed: Any = dist
    distributed.init_process_group(backend, rank=0, world_size=1, store=distributed.HashStore())
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _is_peer_error(error: BaseException | None) -> bool:
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
    """Open the group of this run's ranks, by the addresses in the environment.

    GPU tensors use NCCL, unless ranks share a GPU, which NCCL refuses: then gloo, through the host.
    Everything else uses gloo. `limit`: seconds after which a rank that does not come or answer is
    considered lost; `tell` gets messages about what is being waited for.
    """
    if world.size == 1:
        with contextlib.closing(Group(world, watch=Watch(world, None))) as group:
            yield group
        return
    backend = "gloo"
    if device == "cuda":
        # One GPU is visible if the cluster gives each process its own, or if ranks share it.
        cards = torch.cuda.device_count()
        torch.cuda.set_device(world.local_rank % cards)
        backend = "gloo" if share_card else "cpu:gloo,cuda:nccl"
    hosted_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torch elastic's store outlives its ranks: after a restart, ranks must not find the addresses
    # of the previous ones.
    name = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = meet(
        world,
        master_address(),
        limit=limit,
        hosted_by_rank_0=hosted_by_rank_0,
        name=name,
        tell=tell,
    )
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=limit),
        )
        watch = Watch(world, store, limit=limit, hosted_by_rank_0=hosted_by_rank_0)
        group = Group(world, watch=watch)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        fix = "set GLOO_SOCKET_IFNAME to the interface that joins the machines"
        raise RendezvousFailed(
            f"all ranks have come, but cannot talk to each other: {reason}  ({fix})"
        ) from error
    watch.start()
    try:
        yield group
    finally:
        group.close()
        dist.destroy_process_group()
