"""Prepared once: keyed by content, resumed after a crash, never half-finished, never stale."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from expert.core.publish import DONE
from expert.data.records import BadRow, DataError, Dropped, Row, Segment
from expert.data.tokens import prepare as module
from expert.data.tokens import shards
from expert.data.tokens.documents import DocumentStore
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.prepare import Recipe, prepare
from expert.data.tokens.shards import TokeniseJob
from tests.data.tokenizers import small_encoder
from tests.each import each
from tests.faults.counting import cases

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
RECIPE = Recipe(data="d", tokenizer="t", template="p", columns="c", learn_prompt=False)


def good_rows(count: int) -> Iterator[Row | BadRow]:
    for number in range(count):
        yield Row(
            {"q": f"question {number}", "a": f"answer {number * 7}"}, "rows.jsonl", number + 1
        )


def segments_of(row: Row) -> list[Segment] | BadRow | Dropped:
    return [Segment(row.values["q"], False), Segment(row.values["a"] + "<|im_end|>", True)]


def work(
    count: int = 100,
    *,
    rows: Callable[[], Iterator[Row | BadRow]] | None = None,
    segments_of: Callable[[Row], list[Segment] | BadRow | Dropped] = segments_of,
    **changes: Any,
) -> TokeniseJob:
    asked: dict[str, Any] = {
        "rows": lambda rows_to_skip: rows() if rows else good_rows(count),
        "formatter": lambda: segments_of,
        "encoder": small_encoder(),
        "shard_rows": 16,
    }
    return TokeniseJob(**asked | changes)


def test_documents_come_back_as_they_were_encoded_and_the_second_time_is_a_hit(tmp_path):
    told: list[tuple[int, int]] = []
    telling = work(tell=lambda rows, tokens: told.append((rows, tokens)))
    made = prepare(telling, RECIPE, tmp_path / "tokens")
    assert (made.hit, made.because) == (False, "first use of this data")
    assert told[-1] == (100, made.statistics.tokens)
    assert told == sorted(told)
    store = DocumentStore(made.folder)
    assert len(store) == 100
    assert store.lengths.sum() == made.statistics.tokens
    rows = list(good_rows(100))
    for document in (0, 15, 16, 99):
        expected = small_encoder().encode([segments_of(rows[document])])  # type: ignore[arg-type, list-item]
        assert store.tokens(document).tolist() == expected.ids.tolist()
        assert store.spans(document).reshape(-1).tolist() == expected.spans.tolist()
        assert store.row(document) == document
    again = prepare(work(), RECIPE, tmp_path / "tokens")
    assert (again.hit, again.because) == (True, "made from the same data and settings")
    assert again.statistics == made.statistics


def test_the_folder_opens_with_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = prepare(work(40), RECIPE, tmp_path / "tokens")
    loaded = datasets.load_from_disk(str(made.folder))
    store = DocumentStore(made.folder)
    assert loaded.num_rows == 40
    assert loaded[17]["input_ids"] == store.tokens(17).tolist()
    assert loaded[17]["answer_spans"] == store.spans(17).reshape(-1).tolist()


@pytest.mark.fault(23)
@each(
    ("change", "words"),
    [
        ({"data": "x"}, "the data changed"),
        ({"tokenizer": "x"}, "the tokenizer changed"),
        ({"template": "x"}, "the prompt template changed"),
        ({"learn_prompt": True}, "train_on_prompt changed"),
        ({"max_samples": 10}, "max_samples changed"),
        ({"data": "x", "columns": "x"}, "the data and the columns changed"),
    ],
)
def test_a_miss_says_what_changed(tmp_path, change, words):
    prepare(work(), RECIPE, tmp_path / "old")
    made = prepare(work(), replace(RECIPE, **change), tmp_path / "new")
    assert (made.hit, made.because) == (False, words)


def test_a_neighbour_that_is_renamed_meanwhile_is_not_compared_with(tmp_path, monkeypatch):
    gone = tmp_path / ".tokens" / module.RECIPE
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    assert module.look(tmp_path / "tokens", RECIPE) == "it was not prepared before"


def test_a_key_follows_from_the_recipe_and_a_limit_that_is_not_set_keeps_the_one_there_was():
    recipe = {"columns": "c", "data": "d", "format": 1, "learn_prompt": False, "template": "p"}
    without = json.dumps({"checks": "", **recipe, "tokenizer": "t"})
    assert RECIPE.key() == hashlib.sha256(without.encode()).hexdigest()
    others = [replace(RECIPE, data=str(n)) for n in range(50)]
    others += [replace(RECIPE, max_samples=n) for n in (None, 1, 2)]
    assert len({other.key() for other in others}) == 53


def test_a_folder_made_from_something_else_or_of_other_things_is_refused_and_left_alone(tmp_path):
    prepare(work(), RECIPE, tmp_path / "tokens")
    with pytest.raises(DataError, match="was made from something else: the tokenizer changed"):
        prepare(work(), replace(RECIPE, tokenizer="x"), tmp_path / "tokens")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match="is not a prepared-token folder"):
        prepare(work(), RECIPE, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


class Crash(Exception):
    """What a power cut would be."""


class CrashingEncoder:
    """Encodes so many shards, then fails."""

    def __init__(self, shards: int) -> None:
        self.inner = small_encoder()
        self.left = shards
        self.done = 0

    fingerprint = "t"
    vocabulary = 400

    def encode(self, documents: list[list[Segment]]) -> EncodedBatch:
        if self.left == 0:
            raise Crash
        self.left -= 1
        self.done += 1
        return self.inner.encode(documents)


def test_shards_finished_before_a_crash_are_not_made_again(tmp_path):
    folder = tmp_path / "tokens"
    with pytest.raises(Crash):
        prepare(work(encoder=CrashingEncoder(4)), RECIPE, folder)
    assert not folder.exists()
    again = CrashingEncoder(100)
    made = prepare(work(encoder=again), RECIPE, folder)
    assert again.done == 3  # seven shards of sixteen rows, four of them done before
    straight = prepare(work(), RECIPE, tmp_path / "other")
    assert made.statistics == straight.statistics
    one, other = DocumentStore(made.folder), DocumentStore(straight.folder)
    assert all(np.array_equal(one.tokens(d), other.tokens(d)) for d in range(100))
    assert [path.name for path in tmp_path.iterdir() if "parts" in path.name] == []


def with_bad_rows(count: int, bad: set[int]) -> Iterator[Row | BadRow]:
    for number, row in enumerate(good_rows(count)):
        yield BadRow("rows.jsonl", number + 1, "broken JSON", "{") if number in bad else row


@pytest.mark.fault(20)
def test_a_bad_row_stops_with_its_file_and_line(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(work(rows=lambda: with_bad_rows(50, {20})), RECIPE, tmp_path / "tokens")
    assert str(caught.value) == (
        "a row cannot be used\n  - rows.jsonl:21: broken JSON\n  (fix the data, or leave "
        "them out: --set training.dataset.max_bad_rows=1)"
    )
    many = work(rows=lambda: with_bad_rows(50, {3, 20, 30}), max_bad_rows=2)
    with pytest.raises(DataError, match="3 rows cannot be used"):
        prepare(many, RECIPE, tmp_path / "other")
    assert not any((tmp_path / name).exists() for name in ("tokens", "other"))


def test_all_bad_rows_are_counted_and_the_first_of_them_named(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(
            work(rows=lambda: with_bad_rows(50, set(range(20, 28))), list_command="a command"),
            RECIPE,
            tmp_path / "tokens",
        )
    assert str(caught.value).splitlines() == [
        "8 rows cannot be used",
        *(f"  - rows.jsonl:{line}: broken JSON" for line in range(21, 26)),
        "  … and 3 more: a command",
        "  (fix the data, or leave them out: --set training.dataset.max_bad_rows=8)",
    ]


@each(("bad", "left"), [(set(range(9)), True), (set(range(10)), False)])
def test_if_every_row_is_bad_leaving_them_out_is_not_suggested(tmp_path, bad, left):
    with pytest.raises(DataError) as caught:
        prepare(work(rows=lambda: with_bad_rows(10, bad)), RECIPE, tmp_path / "tokens")
    assert ("or leave them out" in str(caught.value)) is left


def test_tolerated_bad_rows_are_kept_aside_and_rows_left_out_counted_by_reason(tmp_path):
    def short_ones(row: Row) -> list[Segment] | BadRow | Dropped:
        return Dropped("shorter than 10") if row.line > 30 else segments_of(row)

    bad = work(rows=lambda: with_bad_rows(50, {3, 20}), max_bad_rows=2, segments_of=short_ones)
    made = prepare(bad, RECIPE, tmp_path / "tokens")
    assert (made.statistics.bad_rows, made.statistics.documents) == (2, 28)
    assert made.statistics.dropped == {"shorter than 10": 20}
    rejects = made.folder / "rejects.jsonl"
    assert made.left_out == (
        f"2 bad rows were left out, and kept in {rejects}; 20 of 50 rows were left out: "
        "20 shorter than 10"
    )
    lines = rejects.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in lines] == [4, 21]
    assert DocumentStore(made.folder).row(3) == 4  # rows keep their numbers


@pytest.mark.fault(21)
@pytest.mark.parametrize("count", [0, 30])
def test_nothing_to_train_on_is_an_error_before_any_model_loads(tmp_path, count):
    def silent(row: Row) -> list[Segment] | BadRow | Dropped:
        return [Segment(row.values["q"], False)]

    with pytest.raises(DataError, match=f"there is nothing to train on: {count} rows read"):
        prepare(work(count, segments_of=silent), RECIPE, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


class SlowEncoder(CrashingEncoder):
    """Encodes a shard in a hundredth of a second at least."""

    def encode(self, documents: list[list[Segment]]) -> EncodedBatch:
        time.sleep(0.01)
        return super().encode(documents)


def build_together(folder: Path, builders: int, kill_after: float) -> list[int | None]:
    """Several processes build one cache; one of them is killed at some moment."""

    def build() -> None:
        prepare(work(200, encoder=SlowEncoder(1000)), RECIPE, folder)

    make = multiprocessing.get_context("fork").Process
    running = [make(target=build) for _ in range(builders)]
    for process in running:
        process.start()
    time.sleep(kill_after)
    running[0].kill()
    for process in running:
        process.join()
    return [process.exitcode for process in running]


def rounds_of_builders(tmp_path: Path, rounds: int) -> None:
    chance = random.Random(7)
    straight = prepare(work(200), RECIPE, tmp_path / "straight")
    for number in cases(rounds):
        folder = tmp_path / f"round-{number}" / "tokens"
        codes = build_together(folder, chance.randint(2, 4), chance.uniform(0.02, 0.3))
        assert codes[0] in (0, -signal.SIGKILL)
        assert set(codes[1:]) == {0}
        assert prepare(work(200), RECIPE, folder).hit
        assert module.read_statistics(folder) == straight.statistics
        left = [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
        assert left == ["tokens"]


@pytest.mark.fault(22)
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_builders_that_race_and_one_that_is_killed_leave_one_valid_cache(tmp_path):
    rounds_of_builders(tmp_path, 1)


@pytest.mark.fault(22)
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX")
def test_a_hundred_rounds_of_racing_builders_leave_one_valid_cache_each(tmp_path):
    rounds_of_builders(tmp_path, 100)


@pytest.mark.fault(22)
def test_a_killed_builder_leaves_nothing_that_looks_finished(tmp_path):
    folder = tmp_path / "tokens"
    [code] = build_together(folder, 1, 0.05)
    if code == 0:
        pytest.skip("the builder was faster than the kill")
    assert not (folder / DONE).exists()


# --- a second process helps, and nothing depends on it -------------------------------------------


def listed(folder: Path) -> dict[str, str]:
    done = json.loads((folder / DONE).read_text(encoding="utf-8"))
    return {name: entry["sha256"] for name, entry in done.items()}


@forks
def test_two_processes_make_what_one_makes(tmp_path, monkeypatch):
    alone = prepare(work(), RECIPE, tmp_path / "alone")
    made_here = []
    write = shards.Piece.write

    def counted(piece, place, encoder):
        made_here.append(piece.first)
        return write(piece, place, encoder)

    monkeypatch.setattr(shards.Piece, "write", counted)
    shared = prepare(work(with_helper=True), RECIPE, tmp_path / "shared")
    assert listed(shared.folder) == listed(alone.folder)
    assert shared.statistics == alone.statistics
    assert made_here == [0, 32, 64, 96], "the other shards came from the helper"


@forks
def test_what_a_helper_that_dies_leaves_undone_is_made_all_the_same(tmp_path, monkeypatch):
    alone = prepare(work(), RECIPE, tmp_path / "alone")
    monkeypatch.setattr(shards, "_run_helper", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    made = prepare(work(with_helper=True), RECIPE, tmp_path / "shared")
    assert listed(made.folder) == listed(alone.folder)

    def no_room() -> int:
        raise OSError("no room")

    monkeypatch.setattr(os, "fork", no_room)
    with shards.helper_process(lambda: None, wanted=True) as is_there:
        assert not is_there


@forks
def test_bad_rows_are_counted_once_whoever_reads_them(tmp_path):
    def some_bad():
        return with_bad_rows(100, {3, 20, 40})

    before = psutil.Process().children()
    made = prepare(
        work(rows=some_bad, with_helper=True, max_bad_rows=3), RECIPE, tmp_path / "tokens"
    )
    assert made.statistics.bad_rows == 3
    lines = (made.folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["line"] for line in lines] == [4, 21, 41]
    with pytest.raises(DataError, match=r"rows\.jsonl:41: broken"):
        prepare(work(rows=some_bad, with_helper=True, max_bad_rows=2), RECIPE, tmp_path / "other")
    assert psutil.Process().children() == before  # no process is left
