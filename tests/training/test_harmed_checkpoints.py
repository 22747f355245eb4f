"""A damaged checkpoint is reported and set aside, and the one before it is used."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from expert.core.publish import publishing
from expert.training.checkpoint import CheckpointError, find_checkpoint, load_checkpoint
from tests.core.test_publish import flip
from tests.each import each
from tests.faults.counting import cases
from tests.training.checkpoints import FILES, assert_is, saved


def emptied(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def foreign(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path)
    with publishing(path) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)


def head(**changes: object) -> bytes:
    return json.dumps(
        {"format": 1, "step": 2, "groups": ["model"], "state": {}, **changes}
    ).encode()


def missing(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def of_no_length(path: Path) -> None:
    os.truncate(path, 0)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    flip(path, 60, 2)


def turned_into_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def swapped(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-000001"), path)


def to_a_file(name: str, harm: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: harm(folder / name)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        f"{name} {harm.__name__}": (to_a_file(name, harm), "" if name == "DONE" else name)
        for name in FILES
        for harm in (missing, shorter, longer, of_no_length, zeroed, flipped)
    },
    "empty": (emptied, "it is empty"),
    "a file": (turned_into_a_file, "it is not a folder"),
    "more files": (lambda p: (p / "x.bin").write_text(""), "x.bin is not listed in DONE"),
    "another step's": (swapped, "it is the checkpoint of step 1 under another name"),
    "a finished folder of something else": (lambda p: foreign(p, {"a": b""}), "state.json is not"),
    "pickles": (lambda p: foreign(p, {"model.bin": b"\x80\x04.", "state.json": b"\x80"}), "state."),
    "another version": (lambda p: foreign(p, {"state.json": head(format=2)}), "state.json is not"),
    "state is a list": (lambda p: foreign(p, {"state.json": b"[]"}), "state.json is not"),
    "deep state": (lambda p: foreign(p, {"state.json": b"[" * 100_000}), "state.json is not"),
    "groups outside": (
        lambda p: foreign(p, {"state.json": head(groups=["../x"])}),
        "state.json is not",
    ),
    "a group is missing": (
        lambda p: foreign(p, {"state.json": head()}),
        "model.safetensors is missing",
    ),
}


@pytest.mark.fault(9)
@each("harm", HARMS)
def test_a_harmed_checkpoint_is_refused_put_aside_and_the_one_before_is_used(
    tmp_path: Path, harm: str
):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    harming, words = HARMS[harm]
    harming(path)
    if "another" not in harm or "version" in harm:
        with pytest.raises(CheckpointError, match=r"step-000002: cannot be used .+\(resume from"):
            load_checkpoint(path)
    before = sorted(path.rglob("*"))
    found, [(aside, why)] = find_checkpoint(tmp_path)
    assert_is(found, 1)
    assert words in why
    assert aside == tmp_path / ".bad-step-000002"
    assert len(sorted(aside.rglob("*"))) == len(before)  # nothing was deleted
    assert find_checkpoint(tmp_path)[1] == []
    assert_is(saved(tmp_path, 2), 2)


@pytest.mark.fault(24)
@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\xff" * 64, b"\x00\x00\x00\x00\x19" * 9])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes):
    foreign(saved(tmp_path, 2), {"state.json": head(), "model.safetensors": content})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        load_checkpoint(tmp_path / "step-000002")


def test_shared_names_that_lead_nowhere_are_refused(tmp_path: Path):
    path = saved(tmp_path, 2)
    save_file({"a": torch.ones(1)}, path / "x", metadata={"shared": '{"b": "c"}'})
    foreign(path, {"state.json": head(), "model.safetensors": (path / "x").read_bytes()})
    with pytest.raises(CheckpointError, match="shared tensor names refer to missing tensors"):
        load_checkpoint(path)


@pytest.mark.fault(8)
@pytest.mark.parametrize("times", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_a_flipped_bit_anywhere_is_refused_and_the_file_is_named(tmp_path: Path, times: int):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    for name in FILES:
        chance, good = random.Random(name), (path / name).read_bytes()
        for _ in cases(times):
            offset, bit = chance.randrange(len(good)), chance.randrange(8)
            flip(path / name, offset, bit)
            with pytest.raises(CheckpointError) as refusal:
                load_checkpoint(path)
            # A flip in the listing shows as a file that is not as listed.
            told = "" if name == "DONE" else f"{name} does not match its hash"
            assert told in str(refusal.value), (name, offset, bit)
            assert find_checkpoint(tmp_path)[0] == tmp_path / "step-000001"
            (tmp_path / ".bad-step-000002").rename(path)
            flip(path / name, offset, bit)
        assert (path / name).read_bytes() == good
    assert_is(find_checkpoint(tmp_path)[0], 2)
