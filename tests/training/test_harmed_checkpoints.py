"""A damaged checkpoint is reported and set aside, and the one before it is used."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from expert.core.publish import publishing
from expert.training.checkpoint import CheckpointError, find_checkpoint, load_checkpoint
from tests.core.test_publish import flip, without
from tests.each import each
from tests.faults.counting import case, cases
from tests.training.checkpoints import FILES, assert_is, saved


def foreign(path: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(path)
    with publishing(path) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)


def head(**changes: object) -> bytes:
    usual = {"format": 1, "step": 2, "groups": ["model"], "state": {}}
    return json.dumps(usual | changes).encode()


Harm = Callable[[Path], object]
TO_A_FILE: dict[str, Harm] = {
    "missing": Path.unlink,
    "shorter": lambda file: os.truncate(file, file.stat().st_size - 1),
    "longer": lambda file: os.truncate(file, file.stat().st_size + 1),
    "of no length": lambda file: os.truncate(file, 0),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "flipped": lambda file: flip(file, 60, 2),
}


def to_a_file(name: str, harm: Harm) -> Harm:
    return lambda folder: harm(folder / name)


HARMS: dict[str, tuple[Harm, str]] = {
    **{
        f"{name} {how}": (to_a_file(name, harm), "" if name == "DONE" else name)
        for name in FILES
        for how, harm in TO_A_FILE.items()
    },
    "empty": (lambda p: without(p).mkdir(), "it is empty"),
    "a file": (lambda p: without(p).write_text("x"), "it is not a folder"),
    "more files": (lambda p: (p / "x.bin").write_text(""), "x.bin is not listed in DONE"),
    "another step's": (
        lambda p: shutil.copytree(p.with_name("step-000001"), without(p)),
        "it is the checkpoint of step 1 under another name",
    ),
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
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pickle", "pt", "npy"])
def test_pickles_in_every_file_of_a_checkpoint_are_refused_and_never_run(tmp_path: Path, kind: str):
    canary = tmp_path / "canary"
    payload = pickles(canary, tmp_path)[kind]
    for harmed in FILES:
        path = saved(tmp_path / harmed, 2)
        files = {name: (path / name).read_bytes() for name in FILES if name != "DONE"}
        foreign(path, {**files, harmed: payload} if harmed in files else files)
        if harmed == "DONE":
            (path / "DONE").write_bytes(payload)
        with case(), pytest.raises(CheckpointError):
            load_checkpoint(path)
        assert not canary.exists()


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
