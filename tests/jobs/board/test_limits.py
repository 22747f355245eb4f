"""Limits of a real server of the board, and who may read what it stores."""

from __future__ import annotations

import http.client
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from expert.jobs.board.actions import FOLDER, Jobs
from expert.jobs.board.folders import BoardItem
from tests.insight.pages import usual, write_run
from tests.jobs.board.board_client import BoardClient, running
from tests.jobs.board.test_manifest_pages import left_over, send
from tests.jobs.runs import until

RUN = "demo-20260101-120000"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> BoardClient:
    folder = tmp_path_factory.mktemp("board")
    write_run(folder / "runs" / RUN, usual())
    return BoardClient(folder)


@pytest.fixture(scope="module")
def served(browser: BoardClient) -> Iterator[tuple[str, int]]:
    with running(browser.board) as address:
        yield address


def test_a_body_of_two_megabytes_gets_an_answer(browser, served):
    place = f"/run/{browser.id_of(RUN)}/stop"
    origin = f"http://{served[0]}:{served[1]}"
    headers = {"cookie": f"expert_board={browser.guard.cookie}", "origin": origin,
               "x-expert-board": "1", "content-type": "application/json"}  # fmt: skip
    with closing(http.client.HTTPConnection(*served, timeout=60)) as tab:
        tab.request("POST", place, body=b"x" * 2_000_000, headers=headers)
        assert tab.getresponse().status == 413


@pytest.mark.parametrize("root", ["-1", "1", "x", "", "0x0", "+0"])
def test_an_upload_names_a_folder_of_the_board(root, tmp_path):
    browser = BoardClient(tmp_path)
    assert send(browser, root=root).status_code == 400
    assert left_over(tmp_path) == []


def test_nobody_else_reads_what_the_board_stores(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o755)  # by an earlier board
    job = Jobs().start("version", ["--version"], BoardItem("run", Path(tmp_path / "s"), tmp_path))
    until(lambda: job.exit_code is not None)
    assert stat.S_IMODE(job.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
