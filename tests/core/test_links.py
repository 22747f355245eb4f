"""Links inside folders that Expert manages are never followed."""

from __future__ import annotations

import os
from typing import Any

import pytest

from expert.core import links
from expert.core.errors import EXIT_USAGE
from expert.core.events import EventLog, follow, read_events
from expert.core.files import write_text_atomically
from expert.core.links import LinkRefused, open_plain, refuse_links
from expert.core.process import Child


@pytest.fixture
def letter(tmp_path):
    """A file of the user, which must be unchanged after the test."""
    file = tmp_path / "letter.txt"
    file.write_text("kept\n", encoding="utf-8")
    file.chmod(0o600)
    yield file
    assert file.read_text(encoding="utf-8") == "kept\n"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run"
    made.mkdir()
    return made


def test_a_link_is_named_with_what_to_do(folder, letter):
    (folder / "runs").symlink_to(letter)
    with pytest.raises(LinkRefused) as refused:
        refuse_links(folder / "runs" / "new", below=folder)
    told = "is a link  (Expert writes only to plain files inside its own folders: remove it; "
    assert f"{folder / 'runs'}: {told}" in str(refused.value)
    assert refused.value.exit_code == EXIT_USAGE


def test_links_outside_the_folder_are_accepted(tmp_path, folder):
    (tmp_path / "way").symlink_to(folder)
    refuse_links(tmp_path / "way" / "a" / "b", below=tmp_path / "way")
    refuse_links(tmp_path / "way", below=folder)
    (folder / "plain").mkdir()
    refuse_links(folder / "plain" / ".." / ".." / "way" / "x", below=folder)
    (folder / "way").symlink_to(tmp_path)
    with pytest.raises(LinkRefused):  # a link before two dots
        refuse_links(folder / "way" / ".." / ".." / "x", below=folder)


def test_a_link_that_appears_after_the_look_is_not_opened(folder, letter, monkeypatch):
    path = folder / "events.jsonl"
    monkeypatch.setattr(links, "_refuse", lambda asked: asked.symlink_to(letter))
    with pytest.raises(LinkRefused, match="is a link"):
        open_plain(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)


def test_a_pipe_is_refused_at_once_for_reading_and_writing(folder):
    os.mkfifo(folder / "events.jsonl")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with pytest.raises(LinkRefused, match="is not a plain file"):
            open_plain(folder / "events.jsonl", flags)


def test_a_file_with_two_names_is_read_but_not_written(folder, letter):
    os.link(letter, folder / "x")
    os.close(open_plain(folder / "x", os.O_RDONLY))
    with pytest.raises(LinkRefused, match=r"has 2 names \(hard links\)"):
        open_plain(folder / "x", os.O_RDWR)


def test_events_are_neither_added_to_a_link_nor_read_from_one(folder, letter):
    path = folder / "events.jsonl"
    path.symlink_to(letter)
    told: list[dict[str, Any]] = []
    with EventLog(path, [told.append]) as log:
        log.emit("started")
    assert [event["event"] for event in told] == ["log_failed", "started"]
    assert "is a link" in told[0]["because"]
    with pytest.raises(LinkRefused):
        list(read_events(path))
    with pytest.raises(LinkRefused):
        list(follow(path, lambda: True))


def test_a_file_that_is_written_whole_takes_the_place_of_a_link_and_a_log_does_not(folder, letter):
    for name in ("plan.json", "log.txt"):
        (folder / name).symlink_to(letter)
    write_text_atomically(folder / "plan.json", "{}")
    assert not (folder / "plan.json").is_symlink()
    assert (folder / "plan.json").read_text(encoding="utf-8") == "{}"
    with pytest.raises(LinkRefused):
        Child(["true"], log=folder / "log.txt")
