"""Which of all processes of a run this one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The processes that train together. Planning and `run` are given it; nobody else asks the
    environment for a rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes what all of them share: events, checkpoints, the result."""
        return self.rank == 0


ALONE = World()
