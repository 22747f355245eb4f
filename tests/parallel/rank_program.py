"""A program for ranks that is small: what it does at each rank is said in words.

`WHAT ...` is `all` or a rank, `:`, and what it does there, one after the other:
  sum           opens a gloo group, adds the ranks, and the first rank prints the sum
  wait          sleeps until it is asked to stop, then exits as a run does that was saved
  hang          sleeps whatever it is asked
  fail=CODE     leaves a message and exits
  exit=CODE     exits without a message
  blame=RANK    leaves a message about a rank that does not answer, and exits
  kill          ends itself with SIGKILL
  run=FOLDER    moves its log there, as a rank does when the run folder is made
  once=FILE     goes on only where FILE is not there yet, and makes it; else exits with 0
  after=FILE    waits until FILE is there
  say=WORDS     prints
  words=FILE    appends its arguments and rank to FILE
  last=FILE     writes to FILE where those that were started before it have left why they ended
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from expert.core.world import record_failure
from expert.parallel.launch import (
    last_failure,
    redirect_output,
    stop_with_parent,
    world_from_environment,
)

LONG = 120.0


def main() -> None:
    world = world_from_environment()
    stop_with_parent()
    for word in sys.argv[1:]:
        where, _, what = word.partition(":")
        if where in ("all", str(world.rank)):
            act(what, world.rank)


def act(what: str, rank: int) -> None:
    name, _, value = what.partition("=")
    if name == "sum":
        sum_of_ranks(rank)
    elif name == "wait":
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        say(f"rank {rank} waits")
        time.sleep(LONG)
    elif name == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(f"rank {rank} hangs")
        time.sleep(LONG)
    elif name == "fail":
        record_failure(f"trouble-at {rank}", exit_code=int(value))
        sys.exit(int(value))
    elif name == "exit":
        sys.exit(int(value))
    elif name == "blame":
        record_failure(f"silence-of {value}", exit_code=4, of_another=True, blamed=int(value))
        sys.exit(4)
    elif name == "last":
        Path(value).write_text(str(last_failure()))
    elif name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "run":
        Path(value).mkdir(exist_ok=True)
        redirect_output(Path(value), world_from_environment())
    elif name == "once":
        if Path(value).exists():
            sys.exit(0)
        Path(value).touch()
    elif name == "after":
        while not Path(value).exists():
            time.sleep(0.02)
    elif name == "say":
        say(value)
    elif name == "words":
        with Path(value).open("a") as stream:
            stream.write(f"{rank} {' '.join(sys.argv[1:])}\n")
    else:
        raise ValueError(what)


def stop(number: int, _frame: object) -> None:
    say(f"asked by {number}")
    signal.signal(number, lambda again, _: os._exit(99))  # a second one must not come
    time.sleep(0.3)
    sys.exit(128 + number)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def sum_of_ranks(rank: int) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    number = torch.tensor([float(rank + 1)])
    distributed.all_reduce(number)
    if rank == 0:
        say(f"sum {number.item():g}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
