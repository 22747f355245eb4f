"""The state that all pages share, and helpers for requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expert.jobs.board.actions import Jobs
from expert.jobs.board.chat import Chat
from expert.jobs.board.folders import BoardFolders, BoardItem, Kind
from expert.jobs.board.live import MAX_STREAMS, Hub
from expert.jobs.board.summaries import Summaries
from expert.jobs.serve.body import RequestError, read_body

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES = 256 * 1024
BODY_SECONDS = 15.0


@dataclass
class Board:
    """The state that all pages share, as `request.app.state.board`."""

    places: BoardFolders
    read_only: bool = False
    summaries: Summaries = field(default_factory=Summaries)
    hub: Hub = field(default_factory=Hub)
    chat: Chat = field(default_factory=Chat)
    jobs: Jobs = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.places.roots)

    def found(self, request: Request, kind: Kind) -> BoardItem:
        """The run or manifest in the request's path."""
        return self.get(request.path_params["id"], kind)

    def get(self, name: str, kind: Kind) -> BoardItem:
        found = self.places.get(name, kind)
        if found is None:
            raise RequestError(404, f"There is no such {kind} in the folders of this board.")
        return found


def board_of(request: Request) -> Board:
    board: Board = request.app.state.board
    return board


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a POST."""
    return await read_body(request, most=MAX_BODY_BYTES, seconds=BODY_SECONDS)


async def stream(request: Request, key: str, make: Callable[[], Any]) -> Response:
    """Stream a view as server-sent events."""
    from starlette.responses import Response, StreamingResponse

    hub = board_of(request).hub
    if request.method == "HEAD":  # asks whether the board is up; a stream would not end
        return Response(media_type="text/event-stream")
    if hub.streams >= MAX_STREAMS:
        raise RequestError(503, "Too many pages are open.")
    view = await hub.view(key, make)
    events = hub.stream(view, request.query_params.get("seen", ""))
    return StreamingResponse(events, media_type="text/event-stream")
