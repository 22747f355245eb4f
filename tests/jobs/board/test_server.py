"""The server itself: where it listens, what it says where it cannot, and clients that dawdle."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from expert.jobs.board import live
from expert.jobs.board import server as serving
from expert.jobs.board.live import Hub, View
from expert.jobs.board.places import NoFolder
from expert.jobs.board.server import make_board, warning_about
from expert.jobs.serve import listen
from tests.insight.pages import usual, write_run
from tests.jobs.board.boards import TOKEN, running
from tests.wording import wording

FINE = f"GET /?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def asked(place: tuple[str, int], text: str) -> bytes:
    """What comes back until the connection is closed."""
    with socket.create_connection(place, timeout=30) as client:
        client.sendall(text.encode())
        parts = []
        while part := client.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_clients_that_send_no_request_are_let_go_and_others_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(listen, "HEADER_SECONDS", 0.5)
    write_run(tmp_path / "demo-20260101-120000", usual(3))
    with running(make_board([tmp_path], read_only=True)) as place:
        slow = [socket.create_connection(place, timeout=30) for _ in range(40)]
        for client in slow:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert asked(place, FINE).startswith(b"HTTP/1.1 200")
        for client in slow:
            assert client.recv(100) == b""  # closed by the server
            client.close()


def test_more_connections_than_there_may_be_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 5)
    with running(make_board([tmp_path], read_only=True)) as place:
        others = [socket.create_connection(place, timeout=30) for _ in range(8)]
        time.sleep(0.2)
        assert asked(place, FINE).startswith(b"HTTP/1.1 503")
        for client in others:
            client.close()


def test_headers_without_end_and_nonsense_are_refused(tmp_path):
    with running(make_board([tmp_path], read_only=True)) as place:
        long = "GET / HTTP/1.1\r\n" + "X: " + "a" * 200_000 + "\r\n\r\n"
        for text in (long, "nonsense\r\n\r\n", "GET http://evil.example/ HTTP/1.1\r\n\r\n"):
            try:
                answer = asked(place, text)
            except ConnectionResetError:  # closed while it was still being sent
                continue
            assert answer.startswith(b"HTTP/1.1 4")


def test_a_folder_that_is_not_there_says_so_and_an_open_network_is_warned_of(tmp_path):
    with pytest.raises(NoFolder) as error:
        make_board([tmp_path / "none"], read_only=False)
    assert str(error.value) == wording("board-no-folder", folder=tmp_path / "none")
    assert warning_about("127.0.0.1") == warning_about("localhost") == ""
    assert warning_about("0.0.0.0").startswith(wording("board-is-not-loopback"))


def test_a_page_whose_refresh_fails_is_left_so_that_it_connects_again(monkeypatch):
    class Failing(View):
        def refresh(self) -> dict[str, str]:
            if self.version:
                raise RuntimeError("the folder is gone")
            return {"a": "1"}

    async def opened() -> list[bytes]:
        hub = Hub()
        view = await hub.view("key", Failing)
        return [part async for part in hub.stream(view, "")]

    monkeypatch.setattr(live, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(live, "HEARTBEAT_SECONDS", 0.05)
    sent = asyncio.run(asyncio.wait_for(opened(), 20))
    assert b'"a": "1"' in b"".join(sent)
