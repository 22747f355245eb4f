"""Forked processes that make batches and tokenise rows, in order, with limits on memory and time: a
model's chat template is a foreign program.

What a process makes depends only on what it is given, so that it can be made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import psutil

from expert.core.errors import EXIT_RUN_FAILED, ExpertError
from expert.core.interrupts import signals_wait
from expert.core.process import describe_exit
from expert.core.text import span

MEMORY_BYTES = 4 * 2**30
"""What a limited process may use beyond what it was forked with; a shard of rows takes 0.2 GB."""
RENDERING_SECONDS = 10.0
RESUME_SECONDS = 2.0
"""A second chance for processes that were only paused together with this one, as by Ctrl-Z."""
_PR_SET_PDEATHSIG = 1
_limited = False


class LimitReached(BaseException):
    """A rendering takes longer than any conversation needs. Not an Exception, which the template
    engine would take for an error of the template."""


def limit_this_process() -> None:
    """In a forked child: limit its memory, let `deadline` interrupt it, and end it with its parent.
    Ctrl-C is for the parent, which ends its children."""
    global _limited
    _limited = True
    # Garbage of the parent may be CUDA graphs and events, whose destructors abort a forked process.
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    signal.signal(signal.SIGALRM, _stop)


def _stop(*_: object) -> None:
    raise LimitReached


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """In a limited process, raise LimitReached after RENDERING_SECONDS; elsewhere, do nothing: only
    the main thread of a process can be interrupted."""
    if not _limited:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, RENDERING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# --- many processes, one order -------------------------------------------------------------------


class WorkersFailed(ExpertError):
    """A worker process died or hangs."""

    exit_code = EXIT_RUN_FAILED


class CannotStartWorkers(Exception):
    """No workers can be started: too little memory, or too many processes."""


Restart = Callable[[WorkersFailed], bool]
"""Decides whether failed workers are restarted."""
Item = TypeVar("Item")
Made = TypeVar("Made")
_work: Callable[[Any], Any]
"""In a worker: what it does with an item."""


def in_workers(
    begin: Callable[[], Callable[[Item], Made]],
    items: Callable[[int], Iterable[Item]],
    workers: int,
    *,
    ahead: int = 2,
    patience: float = math.inf,
    restart: Restart = lambda error: False,
) -> Generator[Made, None, None]:
    """What `begin()`, called once in each worker, makes of every item, in order. `items` gets the
    number of results so far. Without workers, this process does it; `ahead` items wait for each
    worker. `patience`: seconds for one item."""
    if not workers:
        yield from map(begin(), items(0))
        return
    count = 0
    while True:
        made = _from_pool(begin, items(count), workers, ahead, patience)
        try:
            for one in made:
                count += 1
                yield one
            return
        except WorkersFailed as error:
            if not restart(error):
                raise
        finally:
            made.close()


def _from_pool(
    begin: Callable[[], Any], items: Iterable[Any], workers: int, ahead: int, patience: float
) -> Generator[Any, None, None]:
    context, before = multiprocessing.get_context("fork"), set(multiprocessing.active_children())
    children: set[BaseProcess] = set()
    waiting: deque[Future[Any]] = deque()
    seconds = None if patience == math.inf else patience

    def next_result() -> Any:
        try:
            return waiting[0].result(seconds)
        except TimeoutError:
            return waiting[0].result(RESUME_SECONDS)
        finally:
            waiting.popleft()

    with _tokenizers_on_one_core():
        pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(begin,))
        try:
            for item in items:
                try:
                    with signals_wait():  # a pool that has half started cannot be shut down
                        waiting.append(pool.submit(_do, item))
                except OSError as error:  # the first item starts the processes
                    raise CannotStartWorkers(error.strerror or str(error)) from None
                children = children or set(multiprocessing.active_children()) - before
                if len(waiting) > workers * ahead:
                    yield next_result()
            while waiting:
                yield next_result()
            pool.shutdown()
        except BaseException as error:
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                codes = {child.exitcode for child in children} - {None, 0, -signal.SIGTERM}
                endings = ", ".join(sorted(describe_exit(code) for code in codes if code))
                what = f"a worker process died: it {endings or 'ended without a message'}"
                raise WorkersFailed(what) from error
            if isinstance(error, TimeoutError) and seconds is not None:
                what = f"the worker processes hang: nothing came for {span(seconds)}"
                raise WorkersFailed(what) from error
            raise


@contextlib.contextmanager
def _tokenizers_on_one_core() -> Iterator[None]:
    """Every worker encodes on one core; without this, the tokenizer warns of being forked."""
    outer = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
        if outer is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = outer


def _begin(begin: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    limit_this_process()
    _work = begin()


def _do(item: Any) -> Any:
    return _work(item)


def try_in_child(attempt: Callable[[], str]) -> str | None:
    """What `attempt` returns in a limited process: "" for success, else why not; None if the
    process was killed or did not end in time."""
    if multiprocessing.current_process().daemon:  # a data worker may not have children
        return attempt()
    try:
        [said] = in_workers(
            lambda: lambda _: attempt(), lambda made: [None], 1, patience=2 * RENDERING_SECONDS
        )
    except WorkersFailed:
        return None
    return said
