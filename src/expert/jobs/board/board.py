"""The state that all pages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expert.jobs.board.actions import Jobs
from expert.jobs.board.chat import Chat
from expert.jobs.board.folders import BoardFolders, BoardItem, Kind
from expert.jobs.board.live import Hub
from expert.jobs.board.summaries import Summaries
from expert.jobs.serve.body import RequestError


@dataclass
class Board:
    """The state that all pages share, as `request.app.state.board`."""

    places: BoardFolders
    read_only: bool = False
    summaries: Summaries = field(default_factory=Summaries)
    hub: Hub = field(default_factory=Hub)
    chat: Chat = field(default_factory=Chat)
    jobs: Jobs = field(default_factory=Jobs)

    def get(self, name: str, kind: Kind) -> BoardItem:
        found = self.places.get(name, kind)
        if found is None:
            raise RequestError(404, f"There is no such {kind} in the folders of this board.")
        return found


def make_board(folders: Sequence[Path], *, read_only: bool) -> Board:
    return Board(places=BoardFolders.of(folders), read_only=read_only)
