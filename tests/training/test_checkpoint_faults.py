"""Faults of the matrix at full count: full disks, power cuts, pickles, what is pruned."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from expert.core.publish import publishing
from expert.training.checkpoint import CheckpointError, load_checkpoint
from tests.faults.counting import case, cases
from tests.training.checkpoints import FILES, assert_is, full_disk, newest_after, saved

pytestmark = pytest.mark.slow


@pytest.mark.fault(6)
def test_fifty_full_disks_leave_nothing_behind(tmp_path: Path):
    largest = max(file.stat().st_size for file in saved(tmp_path / "measured", 2).iterdir())
    saved(tmp_path / "c", 1)
    for number in cases(50):
        code, text = full_disk(tmp_path / "c", number * largest // 50)
        assert code == 0, text
        assert "(make room and resume, keep fewer with" in text
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000001"]
    assert_is(newest_after(tmp_path / "c"), 1)


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return Path.write_text, (self.canary, "")


def pickles(canary: Path, folder: Path) -> dict[str, bytes]:
    torch.save({"a": Payload(canary)}, folder / "x.pt")
    np.save(folder / "x.npy", np.array([Payload(canary)], dtype=object), allow_pickle=True)
    read = {name: (folder / f"x.{name}").read_bytes() for name in ("pt", "npy")}
    return {"pickle": pickle.dumps(Payload(canary)), **read}


@pytest.mark.fault(24)
@pytest.mark.parametrize("kind", ["pickle", "pt", "npy"])
def test_pickles_in_every_file_of_a_checkpoint_are_refused_and_never_run(tmp_path: Path, kind: str):
    canary = tmp_path / "canary"
    (tmp_path / "made").mkdir()
    payload = pickles(canary, tmp_path / "made")[kind]
    for harmed in FILES:
        path = saved(tmp_path / harmed, 2)
        files = {name: (path / name).read_bytes() for name in FILES if name != "DONE"}
        shutil.rmtree(path)
        with publishing(path) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(payload if name == harmed else content)
        if harmed == "DONE":
            (path / "DONE").write_bytes(payload)
        with case(), pytest.raises(CheckpointError):
            load_checkpoint(path)
        assert not canary.exists()
