"""A prepared cache with a damaged file is made again, and gives the same sequences."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from expert.core import publish
from expert.data.prepared import PreparedData
from expert.run.open import plan, prepare
from tests.data.damaging import KINDS, damage, files_in, put_back
from tests.faults.counting import cases
from tests.jobs.runs import events_of, losses_of, run, weights_of, write_expert
from tests.run.test_preparing import an_expert


def sequences(data: PreparedData) -> str:
    """One hash of all that a run reads: the tokens, what is trained on, and their order."""
    whole = hashlib.sha256()
    for split in data.splits():
        store = split.open()
        for number in range(split.index.bins):
            for document, start, stop in split.index.pieces(number):
                whole.update(store.tokens(document)[start:stop].tobytes())
                whole.update(store.spans(document).tobytes())
                whole.update(f"{number} {document} {store.row(document)}".encode())
    return whole.hexdigest()


def sequences_after(manifest: Path, file: Path, dice: random.Random) -> str:
    """What a manifest gives once a file of its cache was damaged, or what went wrong."""
    cache = manifest.parent / "datasets_optimized"
    with put_back(cache, manifest.parent.parent / "kept"):
        publish._sound.clear()  # another process
        done = damage(file, dice.choice(KINDS), dice)
        try:
            plan(manifest)
            return sequences(prepare(manifest))
        except Exception as error:  # noqa: BLE001 - whatever it is, it got through
            return f"{done}: {error!r}"
        finally:
            publish._sound.clear()


@pytest.mark.fault(23)
@pytest.mark.parametrize("times", [None, pytest.param(500, marks=pytest.mark.slow)])
def test_every_file_of_a_cache_may_be_damaged_and_the_sequences_stay_the_same(tmp_path, times):
    manifest, dice = an_expert(tmp_path / "expert"), random.Random(7)
    before = sequences(prepare(manifest))
    files = files_in(manifest.parent / "datasets_optimized")
    for number in cases(times or len(files)):
        assert sequences_after(manifest, files[number % len(files)], dice) == before


def test_what_was_damaged_is_a_warning_that_names_the_file_and_where_it_was_put(tmp_path):
    manifest = an_expert(tmp_path)
    made = prepare(manifest)
    index = made.train.index_file
    for each in (index, made.train.folders[0].folder / "data-00000.arrow"):
        damage(each, "bit", random.Random(1))
    publish._sound.clear()
    told = [doubt.text for doubt in prepare(manifest).doubts]
    for each in (index, made.train.folders[0].folder):
        assert any(text.startswith(str(each)) and f"{each.name}.bad" in text for text in told)
    publish._sound.clear()
    assert not prepare(manifest).doubts


@pytest.mark.fault(23)
def test_a_run_on_a_damaged_cache_ends_with_the_same_losses_and_weights(tmp_path, base):
    manifest = write_expert(tmp_path, base, {"epochs": 1})
    first = run(manifest).folder
    for number, file in enumerate(files_in(tmp_path / "datasets_optimized")):
        damage(file, "bit", random.Random(number))
    publish._sound.clear()
    again = run(manifest).folder
    assert losses_of(again) == losses_of(first)
    assert weights_of(again) == weights_of(first)
    assert "it was put aside as tokens-" in events_of(again, "data")[0]["because"]
