"""Worlds of several processes on one machine, over gloo, each a real one."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from expert.core.world import World
from tests.forked import forked

LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its function gave, or what it raised."""

    made: Any = None
    raised: str = ""
    exit_code: int | None = 0


@dataclass
class Started:
    """Processes that are under way, and what each of them will say at its end."""

    processes: list[Any]
    ends: list[Connection]
    store: Any

    def ended(self) -> list[Ended]:
        found = [_received(end) for end in self.ends]
        for process in self.processes:
            process.join(LIMIT_SECONDS)
        return [
            each if each is not None else Ended(exit_code=process.exitcode)
            for each, process in zip(found, self.processes, strict=True)
        ]


def started(size: int, does: Callable[..., Any], *given: Any, spawn: bool = False) -> Started:
    """`does(world, *given)` in as many processes. `spawn`: a process that is to use a card must not
    be a fork."""
    # Kept by this process, as by torchrun's agent.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = Started([], [], store)
    for rank in range(size):
        here, there = multiprocessing.Pipe()
        world = World(rank=rank, size=size, local_rank=rank, local_size=size)
        process = (spawned if spawn else forked)(_rank, world, store.port, there, does, given)
        there.close()
        found.ends.append(here)
        found.processes.append(process)
    return found


def spawned(does: Callable[..., Any], *given: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=does, args=given)
    process.start()
    return process


def ranks(size: int, does: Callable[..., Any], *given: Any, spawn: bool = False) -> list[Ended]:
    return started(size, does, *given, spawn=spawn).ended()


def fine(ended: list[Ended]) -> list[Any]:
    """What every rank has made; what was raised where one has failed."""
    for rank, each in enumerate(ended):
        assert not each.raised, f"rank {rank}\n{each.raised}"
        assert each.exit_code == 0, f"rank {rank} ended with {each.exit_code}"
    return [each.made for each in ended]


def _received(end: Connection) -> Ended | None:
    assert wait([end], LIMIT_SECONDS), "a rank hangs"
    try:
        received: Ended = end.recv()
    except EOFError:
        return None
    return received


def _rank(world: World, port: int, end: Connection, does: Callable[..., Any], given: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        ended = Ended(made=does(world, *given))
    except BaseException:  # noqa: BLE001 - told to the test
        ended = Ended(raised=traceback.format_exc())
    end.send(ended)


def trained(world: World, manifest: Path, options: dict[str, Any]) -> Any:
    """A run of a manifest by all ranks; its folder."""
    from expert.jobs.train import join, train
    from expert.manifest.reader import read_manifest
    from expert.parallel.group import open_group
    from expert.run.open import open_run

    device = options.pop("device", "cpu")  # a card is shared by all of them
    with open_group(world, device=device, share_card=True) as group:
        if world.is_first:
            opened = open_run(
                manifest, resume=options.pop("resume", None), ranks=world.size, nodes=world.nodes
            )
            return train(opened, group=group, **options).folder
        options.pop("resume", None)
        result = join(read_manifest(manifest), group, **options)
        return result.folder if result is not None else None
