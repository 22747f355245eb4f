"""The processes that train together, and which of them this one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """A value made once, from the environment, by `parallel/launch.py`; nobody else asks the
    environment for a rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Which of the processes on this machine."""
    local_size: int = 1
    """Processes on this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all of them share: events, checkpoints, the result."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """Machines, each with as many processes."""
        return max(1, self.size // self.local_size)


ALONE = World()
