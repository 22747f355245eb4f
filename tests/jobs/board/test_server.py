"""The server itself: where it listens, what it says where it cannot, and clients that dawdle."""

from __future__ import annotations

import asyncio

import pytest

from expert.jobs.board import live
from expert.jobs.board.live import Hub, View
from expert.jobs.board.places import NoFolder
from expert.jobs.board.server import make_board, warning_about
from tests.wording import wording


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
