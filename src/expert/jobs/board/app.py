"""The board as an ASGI application, and its server."""

from __future__ import annotations

import threading
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.files import read_bytes
from expert.jobs.board.render import page
from expert.jobs.board.safety import Guard
from expert.jobs.serve import listen
from expert.jobs.serve.body import RequestError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from expert.jobs.board.routes import Board

MAX_CONNECTIONS = 120
STATIC = {
    "report.css": ("expert.insight.page", "style.css", "text/css"),
    "uplot.css": ("expert.insight.page", "uplot.min.css", "text/css"),
    "uplot.js": ("expert.insight.page", "uplot.min.js", "text/javascript"),
    "charts.js": ("expert.insight.page", "charts.js", "text/javascript"),
    "board.css": ("expert.jobs.board", "static/board.css", "text/css"),
    "icon.svg": ("expert.jobs.board", "static/icon.svg", "image/svg+xml"),
    "chat.js": ("expert.jobs.board", "static/chat.js", "text/javascript"),
    "board.js": ("expert.jobs.board", "static/board.js", "text/javascript"),
}


def make_app(board: Board, *, token: str, host: str = "127.0.0.1") -> Guard:
    from starlette.applications import Starlette
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.routing import Route

    from expert.jobs.board.routes import routes

    handlers: dict[Any, Any] = dict.fromkeys((ExpertError, OSError), _refused)
    handlers |= {404: _nothing, 405: _nothing}
    paths = [Route("/static/{name}", _static), *routes()]
    app = Starlette(routes=paths, exception_handlers=handlers)
    app.router.redirect_slashes = False
    app.state.board = board
    app.add_middleware(GZipMiddleware)
    return Guard(app, token=token, host=host, read_only=board.read_only)


async def _static(request: Request) -> Response:
    from starlette.responses import Response

    name = request.path_params["name"]
    if name not in STATIC:
        raise RequestError(404, "There is no such file.")
    package, path, kind = STATIC[name]
    content = read_bytes(Path(str(files(package).joinpath(path))))
    return Response(content, media_type=f"{kind}; charset=utf-8")


async def _refused(request: Request, error: Exception) -> Response:
    """Show an error: as a page, or as JSON for the script."""
    from starlette.responses import HTMLResponse, JSONResponse

    status = error.status if isinstance(error, RequestError) else 409
    if request.method == "POST":
        return JSONResponse({"problem": str(error)}, status_code=status)
    title = "Not found" if status == 404 else "Something went wrong"
    read_only = request.app.state.board.read_only
    html = page("message", title, read_only=read_only, text=str(error), asks=False, inside=True)
    return HTMLResponse(html, status_code=status)


async def _nothing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return await _refused(request, RequestError(status, "There is no such page."))


def make_server(board: Board, *, token: str, host: str = "127.0.0.1") -> Any:
    """The server. On Ctrl-C it ends the chat before waiting for it; runs and commands continue."""

    def stopping() -> None:
        threading.Thread(target=board.chat.end).start()

    app = make_app(board, token=token, host=host)
    return listen.make_server(app, most=MAX_CONNECTIONS, stopping=stopping)


def warning_about(host: str) -> str:
    """A warning for hosts that others can reach; "" on loopback."""
    if listen.is_loopback(host):
        return ""
    return (
        f"{host} is not loopback: anyone with the token can start programs here, and nothing is "
        "encrypted. An SSH tunnel to 127.0.0.1 is safer; --read-only disables all actions."
    )
