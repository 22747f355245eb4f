"""A model folder of somebody else is refused in words, at once, and nothing of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.folders import FEW, HARMLESS, REFUSED, hostile
from tests.hostile.inputs import ROWS, write_manifest
from tests.hostile.limits import MOST_MEMORY, Ended, limited

NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in REFUSED]


def trained(name: str, folder: Path) -> Ended:
    """What `expert train` makes of one of them."""
    hostile(name, folder / "model")
    (folder / "rows.jsonl").write_bytes(ROWS.replace(b"say", b"say " + b"a" * 50 + b"!"))
    write_manifest(folder, {"path": "rows.jsonl"}, base="model")
    ended = limited("train", "-m", "manifest.json", folder=folder)
    assert not ended.is_fault, ended.text
    assert not list(folder.rglob("OWNED"))
    return ended


@pytest.mark.fault(25)
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_model_folder_is_refused(name: str, tmp_path: Path):
    ended = trained(name, tmp_path)
    assert ended.code == 2, ended.text
    assert ended.memory < MOST_MEMORY
    assert not (tmp_path / "runs").exists()


@pytest.mark.fault(25)
@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_folder_asks_for_is_not_followed(name: str, tmp_path: Path):
    ended = trained(name, tmp_path)
    assert ended.code == 0, ended.text
    asked = "; kernels are chosen by the plan" in ended.text
    assert asked == ("hub" in name)
