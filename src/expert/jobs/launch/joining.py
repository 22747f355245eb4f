"""Joins this process to the other ranks, if they can train together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from expert.parallel.launch import (
    WorldError,
    card_of,
    differences,
    own_facts,
    rank_timeout,
    shared_cards,
)

if TYPE_CHECKING:
    from expert.core.world import World
    from expert.manifest.reader import ReadManifest
    from expert.parallel.group import Group


@contextmanager
def joined(
    world: World,
    read: ReadManifest,
    overrides: Sequence[str] = (),
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Group]:
    """The group of all ranks. Raises on every rank, with all reasons, if they have different code,
    manifests or torch versions, or if two would use one GPU.

    `tell` gets messages about late ranks. What rank 0 raises before it has announced a run is
    passed on to the others, which wait for it.
    """
    if world.size > 1:  # before torch is loaded: it would print C++ frames when a rank is lost
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from expert.parallel.group import open_group
    from expert.parallel.watch import LIMIT_SECONDS
    from expert.planning.machine.machine import describe_machine

    if world.size == 1:
        with open_group(world, device="cpu") as alone:
            yield alone
        return
    machine = describe_machine(read.folder)
    asked = read.manifest.training.config.device
    device = "cuda" if machine.gpus and asked != "cpu" else "cpu"
    card = ""
    if device == "cuda":
        gpu = machine.gpus[card_of(world, len(machine.gpus))]
        name = gpu.mig_slice.value or gpu.uuid.value or gpu.index.value
        card = f"{name} of {socket.gethostname()}"
    limit = rank_timeout(LIMIT_SECONDS)
    with open_group(world, device=device, limit=limit, tell=tell) as group:
        facts = own_facts(manifest=read.manifest.model_dump_json(), overrides=overrides)
        gathered = group.gather(({**facts, "device": device}, card))
        problems = differences([rank_facts for rank_facts, _ in gathered])
        problems += shared_cards([rank_card for _, rank_card in gathered])
        if problems:
            raise WorldError("these ranks cannot train together", problems)
        try:
            yield group
        except BaseException as error:
            if world.is_first:
                with suppress(BaseException):  # ranks that wait for the run get it there
                    group.run_on_rank_0(partial(_raise, error))
            raise


def _raise(error: BaseException) -> None:
    raise error
