"""A second process helps to prepare, and nothing depends on it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from expert.core.publish import DONE
from expert.data.records import BadRow, DataError
from expert.data.tokens import shards as module
from expert.data.tokens.prepare import prepare
from expert.data.tokens.shards import helped
from tests.data.test_prepare import RECIPE, good_rows, work

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")


def listed(folder: Path) -> dict[str, str]:
    done = json.loads((folder / DONE).read_text(encoding="utf-8"))
    return {name: entry["sha256"] for name, entry in done.items()}


def test_two_processes_make_what_one_makes(tmp_path, monkeypatch):
    alone = prepare(work(), RECIPE, tmp_path / "alone")
    made_here = []
    write = module.Piece.write

    def counted(piece, place, encoder):
        made_here.append(piece.first)
        return write(piece, place, encoder)

    monkeypatch.setattr(module.Piece, "write", counted)
    helped = prepare(work(with_helper=True), RECIPE, tmp_path / "helped")
    assert listed(helped.folder) == listed(alone.folder)
    assert helped.statistics == alone.statistics
    assert made_here == [0, 32, 64, 96], "the other shards came from the helper"


def test_what_a_helper_that_dies_leaves_undone_is_made_all_the_same(tmp_path, monkeypatch):
    alone = prepare(work(), RECIPE, tmp_path / "alone")
    monkeypatch.setattr(module, "_help", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    made = prepare(work(with_helper=True), RECIPE, tmp_path / "helped")
    assert listed(made.folder) == listed(alone.folder)

    def no_room() -> int:
        raise OSError("no room")

    monkeypatch.setattr(os, "fork", no_room)
    with helped(lambda: None, wanted=True) as is_there:
        assert not is_there


def test_bad_rows_are_counted_once(tmp_path):
    def some_bad():
        for number, row in enumerate(good_rows(100)):
            yield BadRow("rows.jsonl", number + 1, "broken") if number in (3, 20, 40) else row

    before = psutil.Process().children()
    made = prepare(
        work(rows=some_bad, with_helper=True, max_bad_rows=3), RECIPE, tmp_path / "tokens"
    )
    assert made.statistics.bad_rows == 3
    lines = (made.folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in lines] == [4, 21, 41]
    with pytest.raises(DataError, match=r"rows\.jsonl:41: broken"):
        prepare(work(rows=some_bad, with_helper=True, max_bad_rows=2), RECIPE, tmp_path / "other")
    assert psutil.Process().children() == before  # nobody is left behind
