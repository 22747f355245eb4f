"""Single files with a stored hash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expert.core.errors import Damaged
from expert.core.hashed import file_integrity, hash_file, refuse_damaged, write_hashed


class Cut(Exception):
    """A power cut."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Simulate a crash before the `number`th rename, counted from 1."""
    replace, left = os.replace, [number]

    def crashing(*places: Path) -> None:
        left[0] -= 1
        if not left[0]:
            raise Cut
        replace(*places)

    monkeypatch.setattr(os, "replace", crashing)


def test_a_file_is_sound_until_a_byte_of_it_or_of_its_hash_changes(tmp_path):
    file = tmp_path / "plan.json"
    assert file_integrity(file) == "missing"
    write_hashed(file, "{}")
    assert file_integrity(file) == "sound"
    file.write_text("[]")
    assert file_integrity(file) == "damaged"
    with pytest.raises(Damaged, match=r"plan\.json"):
        refuse_damaged(file, "copy it again")
    write_hashed(file, "{}")
    assert file_integrity(file) == "sound"
    assert (tmp_path / "plan.json.bad").read_text() == "[]"
    hash_file(file).write_bytes(b"\xff\xfe")
    assert file_integrity(file) == "damaged"
    hash_file(file).unlink()
    assert file_integrity(file) == "unknown"
    refuse_damaged(file, "copy it again")


@pytest.mark.parametrize("old", [True, False], ids=["without a hash", "with a hash"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_while_it_is_replaced_leaves_the_old_file_sound(tmp_path, monkeypatch, number, old):
    file = tmp_path / "plan.json"
    write_hashed(file, "old")
    if old:
        hash_file(file).unlink()
    with monkeypatch.context() as patch:
        crash_at(patch, number)
        with pytest.raises(Cut):
            write_hashed(file, "new")
    assert file.read_text() == "old"
    refuse_damaged(file, "copy it again")
    write_hashed(file, "new")
    assert (file.read_text(), file_integrity(file)) == ("new", "sound")
