"""Rows that an earlier version packed or grouped: indexes are made again, runs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expert.data.pack import pack, pack_index
from expert.run.open import prepare
from expert.run.session import identity
from expert.training.checkpoint import CheckpointError
from tests.jobs.runs import copied, run, write_expert
from tests.wording import wording

SETTINGS = {"epochs": 1, "save_steps": 1, "save_total_limit": None, "batch_size": 4}


@contextmanager
def an_earlier_version() -> Iterator[None]:
    """Longest first, under a name that says nothing of it; whole steps grouped by length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_fit", pack._fit_longest_first)
        patch.setattr(pack_index, "FITTED", None)
        patch.setattr(identity, "GROUPED", True)
        order_of = identity._order_of
        patch.setattr(
            identity,
            "_order_of",
            lambda *args: {k: v for k, v in order_of(*args).items() if k != "fitted"},
        )
        yield


def test_an_index_of_an_earlier_version_is_made_again_and_no_token_is(tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS)
    with an_earlier_version():
        old = prepare(manifest).train
    new = prepare(manifest).train
    assert new.index_file != old.index_file
    assert not new.index_hit
    assert [folder.hit for folder in new.folders] == [True]
    assert prepare(manifest).train.index_hit


def test_a_run_that_an_earlier_version_packed_is_refused_in_words_and_goes_on_when_told_to(
    tmp_path, base
):
    manifest = write_expert(tmp_path, base, SETTINGS)
    with an_earlier_version():
        folder = run(manifest).folder
    last = str(copied(folder, tmp_path / "copy") / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError) as told:
        run(manifest, resume=last)
    assert wording("rows-packed-otherwise-by") in str(told.value)
    assert "data.index: was" not in str(told.value)
    assert run(manifest, resume=last, allow_changed=True).steps > 2


def test_a_stream_that_an_earlier_version_packed_is_refused_in_words(tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS, dataset={"streaming": True})
    with an_earlier_version():
        folder = run(manifest, overrides=("training.config.max_steps=3",)).folder
    with pytest.raises(CheckpointError) as told:
        run(
            manifest,
            resume=str(folder / "checkpoints" / "step-000002"),
            overrides=("training.config.max_steps=3",),
        )
    assert wording("earlier-version-expert-packed") in str(told.value)


def test_steps_that_an_earlier_version_grouped_by_length_are_refused_in_words(tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS | {"packing": False, "max_steps": 2})
    with an_earlier_version():
        folder = run(manifest).folder
    with pytest.raises(CheckpointError) as told:
        run(manifest, resume=str(folder / "checkpoints" / "step-000001"))
    assert wording("earlier-version-expert-made") in str(told.value)
