"""Disks that are full while data is prepared or the result is written: what, its need, the room.

The limits are those of the system on the size of a file, which no writer can get around.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expert.core.publish import damage
from expert.core.resources import DiskFull
from expert.data.tokens import prepare
from expert.run import open as opening
from expert.run.session import finish
from expert.run.session.session import Session
from tests.jobs.runs import events_of, run, saved_steps, write_expert

ROOM = " needs about .*iB, .*iB are free  "


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Python keeps what it has compiled, and would keep the first bytes of it under a limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault(6)
def test_prepared_data_that_finds_no_room_names_the_cache_and_is_made_the_next_time(base, tmp_path):
    manifest = write_expert(tmp_path, base, {})
    with (
        files_up_to(1000),
        pytest.raises(DiskFull, match="/demo: File too large: the prepared data" + ROOM) as full,
    ):
        opening.prepare(manifest)
    assert str(full.value).startswith(str(tmp_path / "datasets_optimized"))
    assert full.value.exit_code == 75
    assert opening.prepare(manifest).train.rows


@pytest.mark.fault(6)
def test_data_that_surely_does_not_fit_is_not_begun(base, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "free_bytes", lambda place: 100)
    with pytest.raises(DiskFull, match=r"too little room: the prepared data needs about .*iB"):
        opening.prepare(write_expert(tmp_path, base, {}))
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.fault(6)
def test_a_result_that_finds_no_room_leaves_the_checkpoints_and_the_run_is_resumed(
    base, tmp_path, monkeypatch
):
    manifest = write_expert(tmp_path, base, {"max_steps": 2})
    publish = finish.publish_final

    def limited(session: Session) -> object:
        with files_up_to(3000):
            return publish(session)

    with monkeypatch.context() as patch:
        patch.setattr(finish, "publish_final", limited)
        advice = r"\(free some space and resume the run"
        result = "final: File too large: the result" + ROOM + advice
        with pytest.raises(DiskFull, match=result) as full:
            run(manifest)
    [folder] = (tmp_path / "runs").iterdir()
    assert str(full.value).startswith(f"{folder / 'final'}: ")
    assert "DiskFull" in events_of(folder, "failed")[0]["error"]
    assert not [path for path in folder.iterdir() if path.name.startswith((".tmp", "final"))]
    assert saved_steps(folder) == [2]
    assert run(manifest, resume="auto").folder == folder
    assert damage(folder / "final") == ""
