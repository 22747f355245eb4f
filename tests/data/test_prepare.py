"""Prepared once: keyed by content, never half-finished, never stale, on all cores."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from expert.core.publish import DONE
from expert.data import processes
from expert.data.records import BadRow, DataError, Dropped, Row, Segment
from expert.data.tokens import prepare as module
from expert.data.tokens.documents import DocumentStore
from expert.data.tokens.encoder import EncodedBatch
from expert.data.tokens.prepare import Recipe, prepare
from expert.data.tokens.tokenise import TokeniseJob
from tests.data.tokenizers import small_encoder
from tests.each import each
from tests.faults.counting import cases

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
        "rows": lambda: rows() if rows else good_rows(count),
        "formatter": lambda: segments_of,
        "encoder": small_encoder(),
        "portion_rows": 16,
        "processes": 2,
        "row_count": count,
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
    prepare(work(), RECIPE, tmp_path / "tokens-old")
    made = prepare(work(), replace(RECIPE, **change), tmp_path / "new")
    assert (made.hit, made.because) == (False, words)


def with_bad_rows(count: int, bad: set[int]) -> Iterator[Row | BadRow]:
    for number, row in enumerate(good_rows(count)):
        yield BadRow("rows.jsonl", number + 1, "broken JSON", "{") if number in bad else row


@pytest.mark.fault(20)
def test_a_bad_row_stops_with_its_file_and_line(tmp_path):
    with pytest.raises(DataError) as caught:
        prepare(work(rows=lambda: with_bad_rows(50, {20})), RECIPE, tmp_path / "tokens")
    assert "rows.jsonl: a row cannot be used\n  - line 21: broken JSON\n" in str(caught.value)
    assert "--set training.dataset.max_bad_rows=1)" in str(caught.value)
    assert not (tmp_path / "tokens").exists()


def test_all_bad_rows_are_counted_and_the_first_of_them_named(tmp_path):
    bad = work(rows=lambda: with_bad_rows(50, set(range(20, 28))), list_command="a command")
    with pytest.raises(DataError, match="8 rows cannot be used") as caught:
        prepare(bad, RECIPE, tmp_path / "tokens")
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:6]] == [f"  - line {n}" for n in range(21, 26)]
    assert lines[6] == "  … and 3 more: a command"


def test_tolerated_bad_rows_are_kept_aside_and_rows_left_out_counted_by_reason(tmp_path):
    def short_ones(row: Row) -> list[Segment] | BadRow | Dropped:
        return Dropped("shorter than 10") if row.line > 30 else segments_of(row)

    bad = work(rows=lambda: with_bad_rows(50, {3, 20}), max_bad_rows=2, segments_of=short_ones)
    made = prepare(bad, RECIPE, tmp_path / "tokens")
    assert (made.statistics.bad_rows, made.statistics.documents) == (2, 28)
    assert made.statistics.dropped == {"shorter than 10": 20}
    rejects = made.folder / "rejects.jsonl"
    assert made.left_out.startswith(
        f"2 bad rows were left out, and kept in {rejects}; 20 of 50 rows"
    )
    assert made.left_out.endswith(": 20 shorter than 10")
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


class SlowEncoder:
    """Encodes a portion in a hundredth of a second at least."""

    def encode(self, documents: list[list[Segment]]) -> EncodedBatch:
        time.sleep(0.01)
        return small_encoder().encode(documents)


@pytest.mark.fault(22)
@pytest.mark.parametrize("rounds", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_builders_that_race_and_one_that_is_killed_leave_one_valid_cache(tmp_path, rounds):
    chance = random.Random(7)
    straight = prepare(work(200), RECIPE, tmp_path / "straight")
    for number in cases(rounds):
        folder = tmp_path / f"round-{number}" / "tokens"
        job = work(200, encoder=SlowEncoder())
        make = partial(multiprocessing.get_context("fork").Process, target=prepare)
        running = [make(args=(job, RECIPE, folder)) for _ in range(chance.randint(2, 4))]
        for process in running:
            process.start()
        time.sleep(chance.uniform(0.02, 0.3))
        running[0].kill()
        for process in running:
            process.join()
        assert running[0].exitcode in (0, -signal.SIGKILL)
        assert {process.exitcode for process in running[1:]} == {0}
        assert prepare(work(200), RECIPE, folder).hit
        assert module.read_statistics(folder) == straight.statistics
        left = [path.name for path in folder.parent.iterdir() if not path.name.startswith(".")]
        assert left == ["tokens"]


# --- processes that tokenise ---------------------------------------------------------------------


def test_any_number_of_processes_makes_the_same_folder(tmp_path):
    def hashes(folder: Path) -> dict[str, str]:
        done = json.loads((folder / DONE).read_text(encoding="utf-8"))
        return {name: entry["sha256"] for name, entry in done.items()}

    before = psutil.Process().children()
    made = [
        prepare(work(processes=count), RECIPE, tmp_path / str(count)).folder for count in (0, 1, 3)
    ]
    assert hashes(made[0]) == hashes(made[1]) == hashes(made[2])
    assert psutil.Process().children() == before  # no process is left


def test_a_process_that_dies_or_takes_too_much_memory_is_an_error_and_leaves_nothing(
    tmp_path, monkeypatch
):
    def killed(row: Row) -> list[Segment] | BadRow | Dropped:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    def greedy(row: Row) -> list[Segment] | BadRow | Dropped:
        return [Segment("a" * 2**31, False)]

    before = psutil.Process().children()
    with pytest.raises(DataError, match=r"cannot be tokenised: a worker process died.*SIGKILL"):
        prepare(work(segments_of=killed), RECIPE, tmp_path / "tokens")
    monkeypatch.setattr(processes, "MEMORY_BYTES", 2**28)
    with pytest.raises(MemoryError):
        prepare(work(segments_of=greedy), RECIPE, tmp_path / "tokens")
    assert not [path for path in tmp_path.iterdir() if "tokens" in path.name and path.is_dir()]
    assert psutil.Process().children() == before
