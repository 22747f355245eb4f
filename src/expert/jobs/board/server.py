"""The application and its server: which address shows what, and how much of everything there may
be."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import read_bytes
from expert.core.install import pip_install
from expert.insight.page.markup import tag
from expert.jobs.board.board import Board, board_of
from expert.jobs.board.layout import page
from expert.jobs.board.places import Places
from expert.jobs.board.safety import Guard, Refused, is_loopback

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_CONNECTIONS = 120
HEADER_SECONDS = 10.0
"""A connection that has not sent a request by then is closed."""
STATIC = {
    "report.css": ("expert.insight.page", "style.css", "text/css"),
    "board.css": ("expert.jobs.board", "static/board.css", "text/css"),
    "icon.svg": ("expert.jobs.board", "static/icon.svg", "image/svg+xml"),
    "chat.js": ("expert.jobs.board", "static/chat.js", "text/javascript"),
    "board.js": ("expert.jobs.board", "static/board.js", "text/javascript"),
}


class NoBoard(ExpertError):
    """A board that cannot be started."""


def make_app(board: Board, *, token: str, host: str = "127.0.0.1") -> Guard:
    """The application behind its guard."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    from expert.jobs.board import pages

    @asynccontextmanager
    async def lifespan(app: Starlette) -> Any:
        yield
        board.hub.closing.set()
        await asyncio.to_thread(board.chat.end)

    routes = [Route("/static/{name}", _static), *pages.routes()]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={
        Refused: _refused, ExpertError: _refused, OSError: _refused, 404: _nothing, 405: _nothing,
    })  # fmt: skip
    app.router.redirect_slashes = False
    app.state.board = board
    return Guard(app, token=token, host=host, read_only=board.read_only)


async def _static(request: Request) -> Response:
    from starlette.responses import Response

    name = request.path_params["name"]
    if name not in STATIC:
        raise Refused(404, "There is no such file.")
    package, path, kind = STATIC[name]
    return Response(_file(package, path), media_type=f"{kind}; charset=utf-8")


@cache
def _file(package: str, path: str) -> bytes:
    return read_bytes(Path(str(files(package).joinpath(path))))


async def _refused(request: Request, error: Exception) -> Response:
    """An error in words: a page for a reader, JSON for the script."""
    from starlette.responses import HTMLResponse, JSONResponse

    status = error.status if isinstance(error, Refused) else 409
    why = error.why if isinstance(error, Refused) else str(error)
    if request.method == "POST":
        return JSONResponse({"problem": why}, status_code=status)
    read_only = board_of(request).read_only
    inside = tag("div", tag("h1", "Not found" if status == 404 else "That did not work"),
                 tag("p", why), class_="card empty")  # fmt: skip
    return HTMLResponse(page(str(status), inside, read_only=read_only), status_code=status)


async def _nothing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return await _refused(request, Refused(status, "There is no such page."))


# --- the server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Where the board listens."""

    url: str
    socket: socket.socket
    host: str
    token: str


def listen(host: str, port: int, token: str) -> Address:
    """A socket at the address, or at a free port for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
        opened.listen(128)  # whoever opens the address before the server is up waits for it
    except OSError as error:
        opened.close()
        raise NoBoard(
            f"{host}:{port}: cannot listen there: {error.strerror}  (choose another --port; 0 "
            "finds a free one)"
        ) from error
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{name}]" if ":" in name else name
    url = f"http://{name}:{opened.getsockname()[1]}/?token={token}"
    return Address(url, opened, host, token)


def run_board(board: Board, address: Address) -> None:
    """Answer until Ctrl-C; runs and commands that pages started continue."""
    make_server(board, address).run(sockets=[address.socket])


def make_server(board: Board, address: Address) -> Any:
    """uvicorn with limits on how much, how many and how long."""
    import uvicorn

    app = make_app(board, token=address.token, host=address.host)
    config = uvicorn.Config(
        app,
        http=_patient_protocol(),
        ws="none",
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32 * 1024,
    )
    server = _server_class()(config)
    server.board = board
    return server


def needs_packages() -> None:
    """Raise where the extra is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise NoBoard(f"expert board needs {' and '.join(missing)}  ({pip_install('serve')})")


def new_token() -> str:
    return secrets.token_urlsafe(24)


def make_board(folders: Sequence[Path], *, read_only: bool) -> Board:
    return Board(places=Places.of(folders), read_only=read_only)


def warning_about(host: str) -> str:
    """What whoever opens the board to a network should know; "" on loopback."""
    if is_loopback(host):
        return ""
    return (
        f"{host} is not loopback: whoever has the token can start programs here, and nothing is "
        "encrypted. An SSH tunnel to 127.0.0.1 is safer; --read-only lets others only look."
    )


def _patient_protocol() -> Any:
    """uvicorn's protocol for HTTP/1.1, which does not wait for a request without end."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEADER_SECONDS, self._check)

        def _check(self) -> None:
            if self.transport.is_closing():
                return
            answered = self.cycle is None or self.cycle.response_complete
            if answered and self.conn.their_state in (h11.IDLE, h11.DONE):
                self.transport.close()
            else:
                self.loop.call_later(HEADER_SECONDS, self._check)

    return Protocol


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """Ends the streams of all tabs before it waits for them."""

        board: Board

        async def shutdown(self, sockets: Any = None) -> None:
            self.board.hub.closing.set()
            await asyncio.sleep(0)
            await super().shutdown(sockets)

    return Server
