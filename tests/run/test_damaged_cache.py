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


class Cache:
    """A manifest with its cache, and what it gave before anything was damaged."""

    def __init__(self, folder: Path, **config: str) -> None:
        self.manifest = an_expert(folder, **config)
        self.before = sequences(prepare(self.manifest))
        self.folder, self.kept = folder / "datasets_optimized", folder.parent / "kept"

    def misses(self, kind: str, number: int, dice: random.Random) -> str:
        """What a damage got through to, in words; "" where it was made good."""
        files = files_in(self.folder)
        with put_back(self.folder, self.kept):
            publish._sound.clear()  # another process
            done = damage(files[number % len(files)], kind, dice)
            try:
                plan(self.manifest)
                after = sequences(prepare(self.manifest))
            except Exception as error:  # noqa: BLE001 - whatever it is, it got through
                return f"{done}: {error!r}"
            finally:
                publish._sound.clear()
            return "" if after == self.before else f"{done}: trained on other data"


def attack(cache: Cache, times: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    found = [cache.misses(dice.choice(KINDS), number, dice) for number in cases(times)]
    return [each for each in found if each]


@pytest.mark.fault(23)
@pytest.mark.parametrize("times", [None, pytest.param(500, marks=pytest.mark.slow)])
def test_every_file_of_a_cache_may_be_damaged_and_the_sequences_stay_the_same(tmp_path, times):
    cache = Cache(tmp_path / "expert")
    assert attack(cache, times or len(files_in(cache.folder)), seed=7) == []


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
