"""Single files with a stored hash."""

from __future__ import annotations

import pytest

from expert.core.errors import Damaged
from expert.core.hashed import file_integrity, hash_file, refuse_damaged, write_hashed


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
