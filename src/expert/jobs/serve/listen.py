"""The socket and the HTTP server, and its shutdown.

On Ctrl-C or SIGTERM new requests are refused; running ones have GRACE seconds to finish, then end
with an error. A second Ctrl-C does not wait.
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
"""Seconds for running requests when the server is stopped."""
HEADER_SECONDS = 10.0
"""To receive the request line and all headers."""
HEADER_BYTES = 16 * 2**10
IDLE_SECONDS = 30
"""How long an idle connection is kept open."""


def refuse_without_packages() -> None:
    for name in ("starlette", "uvicorn", "h11"):
        if importlib.util.find_spec(name) is None:
            raise ExpertError(f"{name} is not installed  ({pip_install('serve')})")


def is_address(host: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def host_name(header: str) -> str:
    """The name or address in a Host header, without its port."""
    name, colon, port = header.rpartition(":")
    has_port = colon and port.isdigit() and (name.endswith("]") or ":" not in name)
    return (name if has_port else header).strip("[]").lower()


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket; ExpertError if the address cannot be used."""
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(kind[4][:2], family=kind[0], backlog=512)
    except socket.gaierror as error:
        raise ExpertError(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} is in use by another program"
            raise ExpertError(f"{what}  (--port NUMBER; 0 takes a free one)") from None
        raise ExpertError(f"{host}:{port}: {error.strerror}  (--host, --port)") from None


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    name, port = listening.getsockname()[:2]
    name = socket.gethostname() if name in ("0.0.0.0", "::") else name
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def make_server(
    app: Any, *, most: int, stopping: Callable[[], None], stopped: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """A server for at most `most` connections. `stopping` is called when it stops accepting
    requests, `stopped` after GRACE seconds."""
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class HeaderTimeoutProtocol(H11Protocol):
        """Closes connections whose request headers are late; uvicorn has no timeout for them."""

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

    class GracefulServer(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            stopping()
            cut = asyncio.get_running_loop().call_later(GRACE, stopped)
            await super().shutdown(sockets)
            cut.cancel()

    logging.getLogger("uvicorn.error").propagate = False
    config = uvicorn.Config(
        app,
        http=HeaderTimeoutProtocol,
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
    return GracefulServer(config)
