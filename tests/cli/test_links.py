"""Untrusted folders: links, pipes and devices in them are not followed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

STEP = "checkpoints/step-000006"
COMMANDS = {
    "resume": ("train", "{manifest}", "--resume", "{run}"),
    "resume-newest": ("train", "{manifest}", "--resume"),
    "validate": ("validate", "--expert", "{run}", "--test-set", "{rows}"),
    "report": ("report", "{run}"),
    "export": ("export", "{run}", "--to", "{expert}/exported"),
    "sample": ("sample", "{run}", "--prompt", "say red"),
    "diagnose": ("diagnose", "{run}"),
    "watch": ("watch", "{run}"),
}
NEW_RUN = {
    "train": ("train", "{manifest}"),
    "pretokenize": ("pretokenize", "{manifest}"),
    "validate-tokens": ("validate", "--expert", "{run}"),
    "profile-manifest": ("diagnose", "--manifest", "{manifest}", "--profile", "1"),
}


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder outside, with its bytes and the time of its last change."""
    found = [folder, *folder.rglob("*")]
    contents = [path.read_bytes() if path.is_file() else b"" for path in found]
    times = [path.stat().st_mtime_ns for path in found]
    return dict(zip(map(str, found), zip(contents, times, strict=True), strict=True))


@pytest.fixture
def outside(tmp_path):
    """A file and a folder of the user's, which must be as they were afterwards."""
    folder = tmp_path / "home-of-the-user"
    (folder / "photos").mkdir(parents=True)
    (folder / "letter.txt").write_text("what the user has written\n")
    (folder / "photos" / "cat.jpg").write_bytes(b"\xff\xd8cat")
    before = state_of(folder)
    yield folder
    assert state_of(folder) == before


@pytest.fixture
def expert(trained):
    """The folder of an expert with a finished run, as if received from someone else."""
    return trained.parents[1]


@pytest.fixture(autouse=True)
def _nothing_hangs():
    """Reading a pipe without a writer would block."""

    def hangs(number, frame):
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def typed(command: str, expert: Path) -> list[str]:
    words = {
        "manifest": str(expert / "manifest.json"),
        "rows": str(expert / "train.jsonl"),
        "expert": str(expert),
        "run": str(run_of(expert)),
    }
    return [word.format(**words) for word in (COMMANDS | NEW_RUN)[command]]


def link(path: Path, to: Path) -> None:
    """A link in the place of a file or a folder that may be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


def run_of(expert: Path) -> Path:
    [run] = (expert / "runs").glob("demo-*")
    return run


def refused(ran, path: Path) -> None:
    assert ran.code == 2, ran
    assert f"{path}: is a link" in ran.err
    assert "--output FOLDER" in ran.err


@pytest.mark.parametrize("name", ["events.jsonl", "checkpoints", f"{STEP}/state.json"])
def test_no_command_follows_a_link_in_a_run_folder(run, expert, outside, name):
    target = outside / ("photos" if name == "checkpoints" else "letter.txt")
    link(run_of(expert) / name, target)
    for command in COMMANDS if name == "events.jsonl" else ("resume",):
        refused(run(*typed(command, expert)), run_of(expert) / name)


def test_a_run_that_is_itself_a_link_is_not_taken_for_the_newest(run, expert, tmp_path):
    words, path = typed("resume-newest", expert), run_of(expert)
    elsewhere = tmp_path / "run-of-the-user"
    shutil.copytree(path, elsewhere)
    before = state_of(elsewhere)
    link(path, elsewhere)
    refused(run(*words), path)
    assert state_of(elsewhere) == before


def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(run, expert):
    path = run_of(expert) / "events.jsonl"
    path.unlink()
    os.mkfifo(path)
    for command in ("resume", "report", "diagnose", "watch"):
        ran = run(*typed(command, expert))
        assert ran.code == 2
        assert f"{path}: is not a plain file" in ran.err


PLACES = [
    ("train", "runs"),
    ("train", "datasets_optimized"),
    ("validate-tokens", "datasets_optimized/demo"),
    ("profile-manifest", "profile"),
    ("pretokenize", "datasets_optimized/demo/.hashes.json"),
    ("train", "datasets_optimized/demo/tokens-0000000000000000"),
]
"""Commands, and places of an expert that must not be links for them."""


@pytest.mark.parametrize(("command", "name"), PLACES)
def test_a_place_that_is_a_link_is_refused(run, expert, outside, command, name):
    words = typed(command, expert)
    link(expert / name, outside / ("letter.txt" if name.endswith(".json") else "photos"))
    refused(run(*words), expert / name)


@pytest.mark.parametrize("key", ["output_dir", "pretokenized_cache"])
def test_a_manifest_cannot_lead_out_of_its_folder_by_a_link_in_it(run, expert, outside, key):
    link(expert / "way", outside)
    words = ("--set", f"training.config.{key}=way/photos/new")
    refused(run("train", str(expert / "manifest.json"), *words), expert / "way")
