"""Communication between the ranks of a run: numbers, decisions, failures.

Every exchange has the same format, whatever it is for. So a rank that fails can join the exchange
in which the others are waiting, and all of them learn of the failure there.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.world import SINGLE_PROCESS, World
from expert.parallel.hang import HangTimer

HEAD = 2
"""Numbers in the header of every exchange: status and request."""
NUMBERS = 6
"""Maximum number of payload numbers."""
SUM_SECONDS = 1800.0
"""Timeout of sums. Ranks wait longer in exchanges, as while rank 0 saves: there the timer of each
process finds what hangs."""
EXCHANGE_DAYS = 30
POLL_SECONDS = 0.2
FAILED = 1
SAVE = 1
"""In the field of a signal's exit code: a checkpoint is requested."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Parts of error messages of gloo and NCCL when another process has ended or does not answer."""

Made = TypeVar("Made")


class PeerFailed(ExpertError):
    """Another rank failed; `failure`: its meaning for the plan, None if no other plan helps."""

    exit_code = EXIT_RUN_FAILED
    of_another = True

    def __init__(self, rank: int | None, failure: Any, text: str) -> None:
        self.failure = failure
        super().__init__(f"{'another rank' if rank is None else f'rank {rank}'} failed: {text}")


class Group:
    """All ranks of a run. A single process is a group too, and exchanges only with itself.

    `signal` is the exit code requested by a signal to any rank, as of the last exchange: the same
    on all ranks, so that all decide the same.
    """

    def __init__(self, world: World = SINGLE_PROCESS, *, ends_hangs: bool = False) -> None:
        """`ends_hangs`: this process may be ended if it hangs."""
        self.world = world
        self.is_distributed = world.size > 1
        self._requested: Callable[[], int | None] = lambda: None
        self._signal: int | None = None
        self._wanted: Callable[[], bool] = lambda: False
        self._save = False
        self._waits = 0
        self._ends_hangs = ends_hangs
        self._timer: HangTimer | None = None
        # A separate group, so that these messages never mix with a sum in progress.
        self._message_group: Any = None
        if self.is_distributed:
            long = datetime.timedelta(days=EXCHANGE_DAYS)
            self._message_group = dist.new_group(backend="gloo", timeout=long)

    def listen(
        self, requested: Callable[[], int | None], wanted: Callable[[], bool] = lambda: False
    ) -> None:
        """Report to the other ranks, from now on: requests by signals to this rank, and whether a
        checkpoint is `wanted` (called once per exchange)."""
        self._requested, self._wanted = requested, wanted

    # --- hangs

    @contextmanager
    def watched(
        self, folder: Path, report: Callable[[str], None], *, limit: float, computes: bool
    ) -> Iterator[None]:
        """End this process with its stacks, in the run folder, if it makes no `progress` for
        `limit` seconds (0: never). `report` gets the message; `computes`: on the CPU."""
        if self._ends_hangs and limit:
            name = f"ranks/rank-{self.world.rank}.stacks.txt"
            stacks = folder / (name if self.is_distributed else "stacks.txt")
            self._timer = HangTimer(stacks, report, limit=limit, computes=computes)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.close()
                self._timer = None

    def progress(self, extra: float | None = 0.0) -> None:
        """This process does not hang; what comes next may take `extra` seconds beyond the limit.
        None: as what is going on."""
        if self._timer is not None:
            self._timer.push(extra)

    # --- requests

    @property
    def signal(self) -> int | None:
        return self._signal if self.is_distributed else self._requested()

    def take_save_request(self) -> bool:
        """Whether a checkpoint was requested since the last call; the same on all ranks."""
        if not self.is_distributed:
            return self._wanted()
        asked, self._save = self._save, False
        return asked

    # --- exchanges

    def total(self, *numbers: int) -> tuple[int, ...]:
        if not self.is_distributed:
            return numbers
        return tuple(map(sum, zip(*self.exchange(*numbers), strict=True)))

    def exchange(self, *numbers: int, extra: float = 0.0) -> list[tuple[int, ...]]:
        """The numbers of every rank; raises PeerFailed if one of them has failed. `extra`: seconds
        beyond the limit that the others may take to get here."""
        self.progress(extra)
        if not self.is_distributed:
            return [numbers]
        messages = self._all(0, numbers)
        if any(message[0] == FAILED for message in messages):
            raise PeerFailed(*self._first_failure(None))
        return [message[HEAD : HEAD + len(numbers)] for message in messages]

    def barrier(self, extra: float = 0.0) -> None:
        """Continue together, or raise PeerFailed."""
        self.exchange(extra=extra)

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
        store: Any = dist.distributed_c10d._get_default_store()
        key = f"made by first {self._waits}"
        self._waits += 1
        if self.world.is_first:
            try:
                made = make()
            except BaseException as error:
                store.set(key, pickle.dumps((None, f"{error}" or type(error).__name__)))
                raise
            store.set(key, pickle.dumps((made, "")))
            return made
        try:
            while not store.check([key]):
                self.progress(None)
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

    # --- ranks that end

    def explain_end(self, text: str) -> None:
        """Leave a message for the other ranks, which only notice that this one has ended."""
        if self.is_distributed:
            with contextlib.suppress(RuntimeError):
                explained = f"rank {self.world.rank}: {text}"
                dist.distributed_c10d._get_default_store().set("why ended", explained)

    def lost(self, error: BaseException) -> PeerFailed | None:
        """The error to report if `error` means that another rank is gone."""
        kinds = dist.DistBackendError | dist.DistNetworkError
        if not self.is_distributed or not any(
            isinstance(each, kinds) or any(words in str(each) for words in LOST)
            for each in (error, error.__cause__)
        ):
            return None
        why = "it has ended or does not answer any more"
        with contextlib.suppress(RuntimeError):  # the launcher is gone too
            store = dist.distributed_c10d._get_default_store()
            if store.check(["why ended"]):
                why = store.get("why ended").decode()
        return PeerFailed(None, None, why)

    def _all(self, status: int, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """A raw exchange: status, request and numbers of every rank."""
        assert len(numbers) <= NUMBERS
        asked = self._requested() or (SAVE if self._wanted() else 0)
        message = [status, asked, *numbers]
        message += [0] * (NUMBERS - len(numbers))
        sent = torch.tensor(message, dtype=torch.int64)
        got = [torch.empty_like(sent) for _ in range(self.world.size)]
        dist.all_gather(got, sent, group=self._message_group)
        self.progress()
        messages = [tuple(fields.tolist()) for fields in got]
        asked = max(fields[1] for fields in messages)
        self._signal = asked if asked > SAVE else None
        self._save = self._save or asked == SAVE
        return messages

    def _first_failure(self, mine: tuple[int, Any, str] | None) -> tuple[int, Any, str]:
        """The failure of the lowest rank, the same on every rank."""
        first: tuple[int, Any, str] = next(
            failure for failure in self._gathered(mine) if failure is not None
        )
        return first

    def _gathered(self, mine: Any) -> list[Any]:
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, mine, group=self._message_group)
        return values


def open_single_process_group(device: torch.device) -> None:
    """Open a process group of this process alone, unless there is one: FSDP needs a group."""
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed: Any = dist
    distributed.init_process_group(backend, rank=0, world_size=1, store=distributed.HashStore())
    atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


@contextmanager
def open_group(world: World, *, device: str, share_card: bool = False) -> Iterator[Group]:
    """Open the group of this run's ranks, by the addresses that torchrun has set.

    GPU tensors use NCCL, unless ranks share a GPU, which NCCL refuses: then gloo, through the host.
    Everything else uses gloo.
    """
    if world.size == 1:
        yield Group(world, ends_hangs=True)
        return
    backend = "gloo"
    if device == "cuda":
        # One GPU is visible if the cluster gives each process its own, or if ranks share it.
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        backend = "gloo" if share_card else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=SUM_SECONDS),
    )
    try:
        yield Group(world, ends_hangs=True)
    finally:
        dist.destroy_process_group()
