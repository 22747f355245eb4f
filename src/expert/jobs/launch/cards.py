"""Which GPUs of this machine `--gpus` means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from expert.core.text import counted
from expert.parallel.launch import WorldError, world_from_environment
from expert.planning.machine.host import THREAD_VARIABLES
from expert.planning.machine.machine import Machine

MOST_RANKS = 1024
"""On one machine; more is a typo."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """What each rank computes on: a GPU, or a share of the CPU cores."""

    visible: tuple[str, ...]
    """For CUDA_VISIBLE_DEVICES; empty on the CPU."""
    ranks: int
    threads: int
    """Of each rank, unless the user sets another number."""

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Variables to set before a rank starts: CUDA reads them only then."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.visible)} if self.visible else {}
        if not any(env.get(name) for name in THREAD_VARIABLES):
            own |= {THREAD_VARIABLES[0]: str(self.threads)}
        return own

    def environment_per_card(self, env: Mapping[str, str]) -> list[dict[str, str]]:
        """For each GPU, the environment of a process that uses it alone."""
        threads = self.environment(env)
        names: tuple[str | None, ...] = self.visible or (None,) * self.ranks
        return [{**threads, **({"CUDA_VISIBLE_DEVICES": name} if name else {})} for name in names]


def choose_cards(requested: str, machine: Machine, *, device: str, env: Mapping[str, str]) -> Cards:
    """The GPUs meant by `all`, a number of GPUs or a list such as `0,2`, counted among the visible
    ones. Raises with all problems."""
    on_cpu, text = device == "cpu", requested.strip().lower()
    gpus = [] if on_cpu else list(machine.gpus)
    visible = f"{counted(len(gpus), 'GPU')} visible here, counted from 0"
    chosen, ranks, problems = gpus, len(gpus) or 1, []
    if text == "all":
        if on_cpu:
            problems.append("all: a CPU has no cards to count  (give a number, such as 2)")
    elif re.fullmatch(r"\d+", text):
        ranks = int(text)
        chosen = gpus[:ranks]
        if not 1 <= ranks <= MOST_RANKS:
            problems.append(f"{ranks} is not a number of GPUs  (card 0 alone is written 0,)")
        elif gpus and ranks > len(gpus):
            problems.append(f"there are not so many: {visible}")
    elif re.fullmatch(r"\d+(,\d+)*,?", text):
        numbers = [int(part) for part in text.split(",") if part]
        ranks, chosen = len(numbers), [gpus[n] for n in numbers if n < len(gpus)]
        if on_cpu:
            problems.append(f"a CPU has no card {numbers[0]}  (give a number of processes)")
        for number in dict.fromkeys(numbers):
            if gpus and number >= len(gpus):
                problems.append(f"there is no card {number}: {visible}")
            if numbers.count(number) > 1:
                problems.append(f"card {number} is named twice")
    else:
        problems.append("expected all, a number of GPUs such as 2, or cards such as 0,2")
    if not on_cpu and not gpus and not problems:
        why = machine.gpu_note or "no GPU was found"
        problems.append(f"{why}  (--device cpu starts as many processes on the CPU)")
    if world_from_environment(env).size > 1:
        problems.append("torchrun has started this process as one of several  (leave --gpus out)")
    if problems:
        raise WorldError(f"--gpus {requested}", problems)
    # By UUID: CUDA's and the driver's indices may differ.
    names = [gpu.mig_slice.value or gpu.uuid.value or str(gpu.index.value) for gpu in chosen]
    threads = max(1, (machine.cores_available.value or 1) // ranks)
    return Cards(visible=tuple(names), ranks=ranks, threads=threads)
