"""Limits on memory and time for processes that run a model's chat template, a foreign program."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import resource
import signal
from collections.abc import Callable, Iterator

import psutil

MEMORY_BYTES = 4 * 2**30
"""What a limited process may use beyond what it was forked with; a shard of rows takes 0.2 GB."""
RENDERING_SECONDS = 10.0
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


def try_in_child(attempt: Callable[[], str]) -> str | None:
    """What `attempt` returns in a limited process: "" for success, else why not; None if the
    process was killed or did not end in time."""
    if multiprocessing.current_process().daemon:  # a data worker may not have children
        return attempt()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        limit_this_process()
        sender.send(attempt())

    child = context.Process(target=answer, daemon=True)
    child.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(2 * RENDERING_SECONDS) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()
        receiver.close()
