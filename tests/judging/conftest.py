"""A server that must not be called."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest


class Listening:
    """Records connections."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                return
            self.calls.append(address)
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    server = Listening()
    yield server
    server.close()
