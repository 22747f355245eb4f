"""The state that all pages share, and helpers for requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from expert.jobs.board.actions import Jobs
from expert.jobs.board.chat import Chat
from expert.jobs.board.live import MOST_STREAMS, Hub
from expert.jobs.board.places import FoundPlace, Kind, Places
from expert.jobs.board.safety import Refused
from expert.jobs.board.summaries import Summaries

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


@dataclass
class Board:
    """The state that all pages share, as `request.app.state.board`."""

    places: Places
    read_only: bool = False
    summaries: Summaries = field(default_factory=Summaries)
    hub: Hub = field(default_factory=Hub)
    chat: Chat = field(default_factory=Chat)
    jobs: Jobs = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.places.roots)

    def found(self, request: Request, kind: Kind) -> FoundPlace:
        """The run or manifest in the request's path."""
        return self.get(request.path_params["id"], kind)

    def get(self, name: str, kind: Kind) -> FoundPlace:
        found = self.places.get(name, kind)
        if found is None:
            raise Refused(404, f"There is no such {kind} in the folders of this board.")
        return found


def board_of(request: Request) -> Board:
    board: Board = request.app.state.board
    return board


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a POST, whose length the guard limits."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise Refused(415, "The Content-Type must be application/json.")
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise Refused(400, "The request is not valid JSON.") from None
    if not isinstance(body, dict):
        raise Refused(400, "The request must be a JSON object.")
    return body


async def stream(request: Request, key: str, make: Callable[[], Any]) -> Response:
    """Stream a view as server-sent events."""
    from starlette.responses import Response, StreamingResponse

    hub = board_of(request).hub
    if request.method == "HEAD":  # asks whether the board is up; a stream would not end
        return Response(media_type="text/event-stream")
    if hub.streams >= MOST_STREAMS:
        raise Refused(503, "Too many pages are open.")
    view = await hub.view(key, make)
    events = hub.stream(view, request.query_params.get("seen", ""))
    return StreamingResponse(events, media_type="text/event-stream")
