"""Limits of a real server of the board, and who may read what it stores."""

from __future__ import annotations

import stat
from pathlib import Path

from expert.jobs.board.actions import FOLDER, Jobs
from expert.jobs.board.folders import BoardItem
from tests.jobs.runs import until

RUN = "demo-20260101-120000"


def test_nobody_else_reads_what_the_board_stores(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o755)  # by an earlier board
    job = Jobs().start("version", ["--version"], BoardItem("run", Path(tmp_path / "s"), tmp_path))
    until(lambda: job.exit_code is not None)
    assert stat.S_IMODE(job.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
