"""A validation.json is valid only for the weights it judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from expert.core.publish import publishing
from expert.core.rundir import RunFolder, outdated, weights_hash

OTHER = "is about earlier weights: the run continued since"


def state(path: Path, weights: bytes, **others: str) -> Path:
    with publishing(path) as folder:
        (folder / "model.safetensors").write_bytes(weights)
        for name, text in others.items():
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a final state and a checkpoint."""
    run = RunFolder(tmp_path / "demo")
    state(run.final, b"first")
    state(run.checkpoints / "step-000004", b"half way")
    run.validation.write_text("{}", encoding="utf-8")
    return run


def test_the_hash_is_that_of_the_weights_alone(tmp_path):
    one = weights_hash(state(tmp_path / "one", b"same", config="a"))
    assert one == weights_hash(state(tmp_path / "two", b"same", config="b"))
    assert one != weights_hash(state(tmp_path / "three", b"other", config="a"))
    assert len(one) == 64
    assert weights_hash(tmp_path / "nothing") == ""


def test_a_verdict_holds_for_the_state_it_names(folder):
    final = {"step": None, "weights": weights_hash(folder.final)}
    half = {"step": 4, "weights": weights_hash(folder.checkpoints / "step-000004")}
    assert outdated(final, folder) == outdated(half, folder) == ""
    assert outdated({**final, "step": 4}, folder) == OTHER
    assert outdated({**half, "step": 5}, folder) == OTHER  # that checkpoint does not exist
    folder.final.rename(folder.path / ".old-final")
    assert outdated(final, folder) == OTHER
    state(folder.final, b"second")
    assert outdated(final, folder) == OTHER
