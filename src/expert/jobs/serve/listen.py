"""A socket, the server under the endpoint, and its end.

Ctrl-C and SIGTERM: nothing new is taken, what is under way has GRACE seconds, then it is cut with
an error. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.install import pip_install

if TYPE_CHECKING:
    from collections.abc import Callable

    import uvicorn

GRACE = 10.0
"""Seconds for what is under way when the server is stopped."""
HEADER_SECONDS = 10.0
"""For the first line and all headers of a request."""
HEADER_BYTES = 16 * 2**10
IDLE_SECONDS = 30
"""That a connection is kept for the next request."""


class CannotServe(ExpertError):
    """What cannot be answered with, or not under this name or at this address."""


def refuse_without_packages() -> None:
    """CannotServe where the server's packages are not installed."""
    for name in ("starlette", "uvicorn", "h11"):
        if importlib.util.find_spec(name) is None:
            raise CannotServe(f"{name} is not installed  ({pip_install('serve')})")


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; CannotServe with the reason where it cannot."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(kind[4][:2], family=kind[0], backlog=512)
    except socket.gaierror as error:
        raise CannotServe(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotServe(
                f"port {port} is in use by another program  (--port NUMBER; 0 takes a free one)"
            ) from None
        raise CannotServe(f"{host}:{port}: {error.strerror}  (--host, --port)") from None
    except OverflowError:
        raise CannotServe(f"--port {port}: ports are at most 65535") from None


def address_of(listening: socket.socket) -> str:
    """Where a socket is found, as a browser or a client takes it."""
    name, port = listening.getsockname()[:2]
    name = socket.gethostname() if name in ("0.0.0.0", "::") else name
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def make_server(
    app: Any, *, most: int, stopping: Callable[[], None], stopped: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """A server for at most so many connections. `stopping` is called when it takes nothing new,
    `stopped` when what was under way has had its time."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        """Closes connections whose next request is not there in time, byte by byte or not at all:
        uvicorn itself waits for headers for ever."""

        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._late is not None:
                self._late.cancel()

        def _watch(self) -> None:
            answering = self.cycle is not None and not self.cycle.response_complete
            if answering and self._late is not None:
                self._late.cancel()
                self._late = None
            elif not answering and self._late is None and self.timeout_keep_alive_task is None:
                self._late = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    class Stopping(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            stopping()
            cut = asyncio.get_running_loop().call_later(GRACE, stopped)
            await super().shutdown(sockets)
            cut.cancel()

    logging.getLogger("uvicorn.error").propagate = False
    config = uvicorn.Config(
        app,
        http=Bounded,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=most,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(GRACE) + 5,
    )
    return Stopping(config)
