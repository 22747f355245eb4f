"""Worker processes that make batches: detects workers that died or hang, and restarts them once.

A batch depends only on its number in the run, so a batch made again is identical. Torch itself
would raise at a random point of the main thread when a worker dies, and wait forever for one that
is stopped.
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
from expert.core.process import describe_exit
from expert.core.text import span
from expert.planning.run_plan import LoaderPlan

POLL_SECONDS = 0.2
PAUSE_SECONDS = 1.0
"""A poll that is later than this means that this process itself was paused."""
BUSY_SECONDS = 600.0
"""The longest that workers may compute on one item, unless a better limit is known."""
STACKS_SECONDS = 3.0
"""Time for one worker to write its stack."""
STACKS_POLL_SECONDS = 0.1
"""A worker that has written nothing for this long is done."""
QUIET_POLLS = 4
"""Polls without growth after which a stack is complete: on a busy machine a worker may pause in the
middle of writing it."""
DIED = "DataLoader worker (pid"
"""The beginning of torch's message about a dead worker."""
NO_THREAD = "can't start new thread"


class WorkersFailed(ExpertError):
    """A worker died or hangs; `stacks`: where each of them was, if known."""

    exit_code = EXIT_RUN_FAILED

    def __init__(self, what: str, stacks: str = "") -> None:
        self.stacks = stacks
        super().__init__(what)


class CannotStartWorkers(Exception):
    """No workers can be started: too little shared memory or memory, or too many processes."""


Restart = Callable[[WorkersFailed], bool]
"""Decides whether failed workers are restarted."""


class WaitLimits(NamedTuple):
    """Seconds that may pass without a batch; math.inf: no limit."""

    idle: float
    """While no worker uses the CPU."""
    busy: float = BUSY_SECONDS


class Loader(DataLoader[Any]):
    """Torch's DataLoader that knows its processes."""

    workers: tuple[BaseProcess, ...] = ()
    stacks: IO[bytes] | None = None
    ended: bool = False

    def check_worker_number_rationality(self) -> None:
        """Silences torch's warning about more workers than cores; the plan already gives it."""

    def __iter__(self) -> Any:
        before = set(multiprocessing.active_children())
        try:
            iterator = super().__iter__()
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and NO_THREAD not in str(error):
                raise
            _kill(set(multiprocessing.active_children()) - before)
            reason = getattr(error, "strerror", None) or str(error)
            hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
            traceback.clear_frames(error.__traceback__)  # a half-built iterator fails to clean up
            sys.unraisablehook = hook
            raise CannotStartWorkers(reason) from None
        new = set(multiprocessing.active_children()) - before
        self.workers = tuple(new) or self.workers
        return iterator

    def end(self) -> None:
        """Kill the processes, including stopped ones, which would never exit."""
        _kill(self.workers)
        self.workers, self.ended = (), True
        if self.stacks is not None:
            self.stacks.close()


def data_loader(dataset: Dataset[Any], options: LoaderPlan, **more: Any) -> Loader:
    """A loader with the number of workers in `options`."""
    _fork_between_seeds()
    stacks = tempfile.TemporaryFile() if options.workers else None  # noqa: SIM115 - of the loader
    loader = Loader(
        dataset,
        num_workers=options.workers,
        prefetch_factor=options.prefetch if options.workers else None,
        # Its own generator, so that creating an iterator does not advance torch's global one.
        generator=torch.Generator(),
        worker_init_fn=functools.partial(_begin_worker, stacks.fileno()) if stacks else None,
        **more,
    )
    loader.stacks = stacks
    return loader


@functools.cache
def _fork_between_seeds() -> None:
    """Prevent forks while another thread seeds torch. Every step does so under locks, which the
    worker would inherit locked and wait for forever, since it seeds too."""
    for module in (torch.cuda, torch.mtia, torch.xpu) if hasattr(os, "register_at_fork") else ():
        lock: Any = module._initialization_lock
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )


def _begin_worker(descriptor: int, number: int) -> None:
    """In a worker: write its stack on a signal."""
    if hasattr(faulthandler, "register") and multiprocessing.get_start_method() == "fork":
        faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)


def load_items(
    begin: Callable[[int], Loader], patience: Callable[[], WaitLimits], restart: Restart
) -> Iterator[Any]:
    """The items of a loader; failed workers are restarted once if `restart` allows it. `begin` gets
    the number of items already yielded."""
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


def _items(loader: Loader, patience: Callable[[], WaitLimits]) -> Iterator[Any]:
    """Take items in a thread: an item whose worker died while sending it is never complete, and
    reading it blocks forever. The thread also starts the workers: in the main thread torch would
    install a signal handler that raises anywhere when a worker dies, for example during a save."""
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
    thread.join()  # ends the workers unless they are persistent


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
    except BaseException as error:  # noqa: BLE001 - raised again by _next
        got.put((False, error))


def _next(
    got: queue.SimpleQueue[tuple[bool, Any]], loader: Loader, patience: WaitLimits
) -> tuple[bool, Any]:
    began = idle_since = looked = time.monotonic()
    worked = 0.0
    while True:
        with contextlib.suppress(queue.Empty):
            there, item = got.get(timeout=POLL_SECONDS)
            if not isinstance(item, BaseException):
                return there, item
            if DIED in str(item):
                raise WorkersFailed(_death_message(loader)) from item
            raise item
        if any(worker.exitcode not in (None, 0) for worker in loader.workers):
            raise WorkersFailed(_death_message(loader))
        now, used = time.monotonic(), _cpu_seconds(loader)
        if now - looked > POLL_SECONDS + PAUSE_SECONDS:  # this process was paused, as by Ctrl-Z
            began, idle_since = now, now
        looked = now
        if used > worked:
            idle_since, worked = now, used
        if now - idle_since > patience.idle or now - began > patience.busy:
            numbers = ", ".join(str(worker.pid) for worker in loader.workers)
            what = f"the data workers hang: no batch for {span(now - began)} from processes"
            raise WorkersFailed(f"{what} {numbers}", _stacks(loader))


def _death_message(loader: Loader) -> str:
    died = [worker for worker in loader.workers if worker.exitcode is not None]
    endings = [
        f"process {worker.pid} {describe_exit(int(worker.exitcode or 0))}" for worker in died
    ]
    return f"a data worker died: {'; '.join(endings) or 'it ended without a message'}"


def _stacks(loader: Loader) -> str:
    """The stacks of the workers, one after the other, since all write to the same file."""
    if loader.stacks is None or not hasattr(signal, "SIGUSR2"):
        return ""
    for worker in loader.workers:
        os.write(loader.stacks.fileno(), f"process {worker.pid}\n".encode())
        before = os.fstat(loader.stacks.fileno()).st_size
        with contextlib.suppress(OSError):
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGUSR2)
            os.kill(worker.pid, signal.SIGCONT)  # a stopped process does not handle signals
            _wait_until_written(loader.stacks, before)
    loader.stacks.seek(0)
    return loader.stacks.read().decode(errors="replace")


def _wait_until_written(stream: IO[bytes], before: int) -> None:
    """Until the file is larger than `before` and has not grown for some polls."""
    size, unchanged = before, 0
    deadline = time.monotonic() + STACKS_SECONDS
    while unchanged < QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(STACKS_POLL_SECONDS)
        last, size = size, os.fstat(stream.fileno()).st_size
        unchanged = unchanged + 1 if size == last > before else 0


def _cpu_seconds(loader: Loader) -> float:
    """CPU time of the running workers so far."""
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
