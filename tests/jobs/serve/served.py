"""Servers in this process, each on its own port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from expert.jobs.serve.app import Endpoint, Limits, LogEntry
from expert.jobs.serve.engine import AnswerEngine
from expert.jobs.serve.listen import listening_socket
from expert.jobs.serve.models import load_models
from expert.jobs.serve.serve import http_server
from tests.jobs.runs import until

if TYPE_CHECKING:
    import openai


@dataclass
class Served:
    address: str
    engine: AnswerEngine
    entries: list[LogEntry]
    server: Any
    notes: list[str] = field(default_factory=list)

    @cached_property
    def client(self) -> openai.OpenAI:
        """Closed with the server: a socket left to the garbage collector warns in a later test."""
        import openai

        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="-", max_retries=0)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def until_logged(self, count: int) -> list[LogEntry]:
        """The log entries, once there are `count`: each is written after its answer was sent."""
        until(lambda: len(self.entries) >= count)
        return self.entries


@contextmanager
def served(
    *places: str,
    limits: Limits | None = None,
    with_base: bool = False,
    device: str = "cpu",
    **how: Any,
) -> Iterator[Served]:
    models = load_models(places, device=device, with_base=with_base)
    entries: list[LogEntry] = []
    notes: list[str] = []
    engine = AnswerEngine(models, note=notes.append, **how)
    socket = listening_socket("127.0.0.1", 0)
    app = Endpoint(engine, limits or Limits(), log=entries.append)
    server = http_server(engine, app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    until(lambda: server.started)
    try:
        address = f"http://127.0.0.1:{socket.getsockname()[1]}"
        found = Served(address, engine, entries, server, notes)
        yield found
        if "client" in vars(found):
            found.client.close()
    finally:
        server.should_exit = True
        thread.join()
        engine.close()
        socket.close()
