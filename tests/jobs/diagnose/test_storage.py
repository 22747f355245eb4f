"""Reading speed: real bytes, bounded, and honest about the cache."""

from __future__ import annotations

import os

from expert.jobs.diagnose.storage import LEAST_BYTES, ReadSpeed, read_speed
from tests.wording import wording


def test_real_bytes_are_read_and_counted(tmp_path):
    (tmp_path / "a").write_bytes(os.urandom(3 * 2**20))
    found = read_speed([tmp_path / "a"])
    assert found is not None
    assert found.bytes == 3 * 2**20
    assert found.megabytes_per_second is not None
    assert found.megabytes_per_second > 0
    assert found.how in ("direct", wording("through-the-cache"))


def test_several_files_are_read_until_the_time_is_over(tmp_path):
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(2**20))
    both = read_speed([tmp_path / "a", tmp_path / "b"])
    assert both is not None
    assert both.bytes == 2 * 2**20
    assert read_speed([tmp_path / "a"], seconds=0.0) is None


def test_files_that_are_not_there_or_empty_give_nothing(tmp_path):
    (tmp_path / "empty").touch()
    assert read_speed([tmp_path / "empty", tmp_path / "absent"]) is None


def test_a_few_bytes_say_nothing_about_a_disk():
    few = ReadSpeed(bytes=LEAST_BYTES - 1, seconds=0.1, how="direct")
    assert few.megabytes_per_second is None


def test_a_file_system_without_direct_reading_is_read_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(2**20))
    plain = os.open

    def refusing(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return plain(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    found = read_speed([tmp_path / "a"])
    assert found is not None
    assert (found.bytes, found.how) == (2**20, wording("through-the-cache"))
