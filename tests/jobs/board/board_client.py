"""A board over some folders, and a client that sends requests like a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from expert.jobs.board.app import make_app, make_server
from expert.jobs.board.routes import Board, make_board
from expert.jobs.serve.listen import listening_socket

TOKEN = "a-token-of-the-tests"
ORIGIN = "http://127.0.0.1:7373"
ACTION = {"origin": ORIGIN, "x-expert-board": "1"}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def running(board: Board) -> Iterator[tuple[str, int]]:
    """A real server of a board; yields its host and port."""
    listening = listening_socket("127.0.0.1", 0)
    server = make_server(board, token=TOKEN)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


class BoardClient:
    """A browser that has opened the address with the token, unless it is a `stranger`."""

    def __init__(self, *folders: Path, read_only: bool = False, stranger: bool = False) -> None:
        self.board = make_board(folders, read_only=read_only)
        self.guard = make_app(self.board, token=TOKEN)
        self.client = TestClient(self.guard, base_url=ORIGIN, raise_server_exceptions=True,
                                 follow_redirects=False)  # fmt: skip
        if not stranger:
            assert self.client.get(f"/?token={TOKEN}").status_code == 200

    def get(self, place: str, **more: Any) -> Any:
        return self.client.get(place, **more)

    def page(self, place: str) -> str:
        answer = self.client.get(place)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def post(self, place: str, body: Any = None, **headers: str) -> Any:
        return self.client.post(place, json=body or {}, headers={**ACTION, **headers})

    def id_of(self, name: str, kind: str = "run") -> str:
        self.board.places.search(now=True)
        found = [one.id for one in self.board.places.found.values()
                 if one.name == name and one.kind == kind]  # fmt: skip
        assert len(found) == 1, (name, found)
        return found[0]
