"""Reading speed: real bytes, bounded, and honest about the cache."""

from __future__ import annotations

import os

from expert.jobs.diagnose.storage import LEAST_BYTES, read_speed


def test_real_bytes_are_read_and_counted_until_the_time_is_over(tmp_path):
    for name, size in (("a", 3 * 2**20), ("b", 2**20), ("empty", 0)):
        (tmp_path / name).write_bytes(os.urandom(size))
    size, seconds, how = read_speed([tmp_path / "a", tmp_path / "b"])
    assert size == 4 * 2**20
    assert seconds > 0
    assert how in ("direct", "through the cache")
    assert read_speed([tmp_path / "a"], seconds=0.0) is None
    assert read_speed([tmp_path / "empty", tmp_path / "absent"]) is None
    (tmp_path / "few").write_bytes(os.urandom(LEAST_BYTES - 1))
    assert read_speed([tmp_path / "few"]) is None  # too few to measure


def test_a_file_system_without_direct_reading_is_read_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(2**20))
    plain = os.open

    def refusing(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    size, _, how = read_speed([tmp_path / "a"])
    assert (size, how) == (2**20, "through the cache")
