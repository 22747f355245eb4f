"""Worker processes that make batches: found when they die or hang, and started once more.

What a worker makes depends on nothing but its number in the run, so batches that are asked for
again are equal. Torch would raise in the middle of whatever the main thread is in when a worker
dies, and wait without end for one that is stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import IO, Any, NamedTuple

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.process import how_it_ended
from expert.core.text import span
from expert.planning.run_plan import LoaderPlan

POLL_SECONDS = 0.2
PAUSE_SECONDS = 1.0
"""Who looks so much later than it wanted to has not been running."""
BUSY_SECONDS = 600.0
"""The longest that workers may compute on what is waited for, where that is not known better."""
STACKS_SECONDS = 3.0
"""For one worker to write down what it is in."""
STACKS_POLL_SECONDS = 0.1
"""A worker that has written nothing more for so long has written all."""
DIED = "DataLoader worker (pid"
"""How torch's message begins where a worker has gone."""
NO_THREAD = "can't start new thread"


class WorkersFailed(ExpertError):
    """A worker died or hangs; `stacks`: what each was in, as far as they could tell."""

    exit_code = EXIT_RUN_FAILED

    def __init__(self, what: str, stacks: str = "") -> None:
        self.stacks = stacks
        super().__init__(what)


class WorkersUnavailable(Exception):
    """No workers can be started here: no shared memory, no processes, no memory."""


Restart = Callable[[WorkersFailed], bool]
"""Given why workers failed: whether they are started once more."""


class Patience(NamedTuple):
    """Seconds that may pass without a batch; math.inf: any number."""

    idle: float
    """Where no worker computes."""
    busy: float = BUSY_SECONDS


class Loader(DataLoader[Any]):
    """Torch's DataLoader, which knows its processes."""

    workers: tuple[BaseProcess, ...] = ()
    stacks: IO[bytes] | None = None
    ended: bool = False

    def check_worker_number_rationality(self) -> None:
        """The plan says already that there are more workers than cores."""

    def __iter__(self) -> Any:
        there = set(multiprocessing.active_children())
        try:
            found = super().__iter__()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and NO_THREAD not in str(error):
                raise
            _kill(set(multiprocessing.active_children()) - there)
            reason = getattr(error, "strerror", None) or str(error)
            hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
            traceback.clear_frames(error.__traceback__)  # what is half built fails to end itself
            sys.unraisablehook = hook
            raise WorkersUnavailable(reason) from None
        new = set(multiprocessing.active_children()) - there
        self.workers = tuple(new) or self.workers
        return found

    def end(self) -> None:
        """End the processes, also those that are stopped and would never end by themselves."""
        _kill(self.workers)
        self.workers, self.ended = (), True
        if self.stacks is not None:
            self.stacks.close()


def data_loader(dataset: Dataset[Any], options: LoaderPlan, **more: Any) -> Loader:
    """A loader with the workers that were asked for."""
    _fork_between_seeds()
    stacks = tempfile.TemporaryFile() if options.workers else None  # noqa: SIM115 - of the loader
    made = Loader(
        dataset,
        num_workers=options.workers,
        prefetch_factor=options.prefetch if options.workers else None,
        # Its own generator: taking an iterator would otherwise move torch's global one.
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_begin_worker, stacks.fileno()) if stacks else None,
        **more,
    )
    made.stacks = stacks
    return made


@functools.cache
def _fork_between_seeds() -> None:
    """Let no process be forked while another thread seeds torch: each step does, under locks that
    the worker would then wait for without end, since it seeds as well."""
    for module in (torch.cuda, torch.mtia, torch.xpu) if hasattr(os, "register_at_fork") else ():
        lock: Any = module._initialization_lock
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


def _begin_worker(descriptor: int, number: int) -> None:
    """In a worker: write down what it is in when it is asked to."""
    if hasattr(faulthandler, "register") and multiprocessing.get_start_method() == "fork":
        faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)


def taken(
    begin: Callable[[int], Loader], patience: Callable[[], Patience], restart: Restart
) -> Iterator[Any]:
    """The items of a loader, whose workers are started once more where `restart` allows it.
    `begin` is given how many items are taken already."""
    count = 0
    while True:
        loader = begin(count)
        try:
            for item in _items(loader, patience) if loader.num_workers else loader:
                count += 1
                yield item
            return
        except WorkersFailed as error:
            loader.end()
            if not restart(error):
                raise
        finally:
            if not loader.persistent_workers:
                loader.end()


def _items(loader: Loader, patience: Callable[[], Patience]) -> Iterator[Any]:
    """A thread takes each item: one that a worker died in the middle of is never whole, and whoever
    reads it waits for ever. It starts the workers too: in the main thread torch would set a handler
    that raises wherever that is when a worker dies, in a save for example."""
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    got: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    thread = threading.Thread(target=_take, args=(loader, asked, got), daemon=True)
    thread.start()
    try:
        while True:
            asked.put(True)
            there, item = _next(got, loader, patience())
            if not there:
                break
            yield item
    finally:
        asked.put(False)
    thread.join()  # where workers are not kept, it ends them


def _take(
    loader: Loader,
    asked: queue.SimpleQueue[bool],
    got: queue.SimpleQueue[tuple[bool, Any]],
) -> None:
    try:
        items, end = iter(loader), object()
        while asked.get():
            item = next(items, end)
            got.put((item is not end, None if item is end else item))
    except BaseException as error:  # noqa: BLE001 - raised again where items are taken
        got.put((False, error))


def _next(
    got: queue.SimpleQueue[tuple[bool, Any]], loader: Loader, patience: Patience
) -> tuple[bool, Any]:
    began = idle_since = looked = time.monotonic()
    worked = 0.0
    while True:
        with contextlib.suppress(queue.Empty):
            there, item = got.get(timeout=POLL_SECONDS)
            if not isinstance(item, BaseException):
                return there, item
            if DIED in str(item):
                raise WorkersFailed(_how_they_died(loader)) from item
            raise item
        if any(worker.exitcode not in (None, 0) for worker in loader.workers):
            raise WorkersFailed(_how_they_died(loader))
        now, used = time.monotonic(), _cpu_seconds(loader)
        if now - looked > POLL_SECONDS + PAUSE_SECONDS:  # this process was stopped, as by Ctrl-Z
            began, idle_since = now, now
        looked = now
        if used > worked:
            idle_since, worked = now, used
        if now - idle_since > patience.idle or now - began > patience.busy:
            raise _hang(loader, now - began)


def _how_they_died(loader: Loader) -> str:
    died = [worker for worker in loader.workers if worker.exitcode is not None]
    told = [f"process {worker.pid} {how_it_ended(int(worker.exitcode or 0))}" for worker in died]
    return f"a data worker died: {'; '.join(told) or 'it ended without a word'}"


def _hang(loader: Loader, seconds: float) -> WorkersFailed:
    numbers = ", ".join(str(worker.pid) for worker in loader.workers)
    what = f"the data workers hang: no batch for {span(seconds)} from processes {numbers}"
    return WorkersFailed(what, _stacks(loader))


def _stacks(loader: Loader) -> str:
    """One worker after the other: all write to one file, and would write into each other."""
    if loader.stacks is None or not hasattr(signal, "SIGUSR2"):
        return ""
    for worker in loader.workers:
        os.write(loader.stacks.fileno(), f"process {worker.pid}\n".encode())
        with contextlib.suppress(OSError):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGUSR2)
            os.kill(worker.pid, signal.SIGCONT)  # one that is stopped answers nothing
            _wait_until_written(loader.stacks)
    loader.stacks.seek(0)
    return loader.stacks.read().decode(errors="replace")


def _wait_until_written(stream: IO[bytes]) -> None:
    before = size = os.fstat(stream.fileno()).st_size
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline:
        time.sleep(STACKS_POLL_SECONDS)
        last, size = size, os.fstat(stream.fileno()).st_size
        if size == last > before:
            return


def _cpu_seconds(loader: Loader) -> float:
    """What workers have computed so far; those that are gone count for nothing."""
    total = 0.0
    for worker in loader.workers:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(worker.pid).cpu_times()
            total += times.user + times.system
    return total


def _kill(workers: Any) -> None:
    for worker in workers:
        with contextlib.suppress(OSError, ValueError):
            worker.kill()
