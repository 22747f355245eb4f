"""Rows as the model sees them: the same tokens and labels as in the batches of the run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from expert.data.feed.batches import IGNORED, BatchArrays, BatchShape, fill_batch
from expert.data.inspect.shown_rows import RowNotFound, RowsToShow, ShownRow
from expert.jobs.datasets.check import check_dataset
from expert.run.open import prepare
from tests.data.examples.test_tools import OPENAI
from tests.run.test_preparing import ROWS, an_expert, lines

EVERY = RowsToShow(count=1000, most_tokens=None)
CHAT = [
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"What is {n}?"},
            {"role": "assistant", "content": f"It is {n}.", "weight": n % 2},
            {"role": "user", "content": "And twice that?"},
            {"role": "assistant", "content": "x" * (n % 40) + f" {2 * n} é"},
        ]
    }
    for n in range(60)
]


def shown(file: Path, asked: RowsToShow = EVERY) -> list[ShownRow]:
    return check_dataset(file, show=asked).rows


def of_shown(rows: list[ShownRow]) -> Counter[tuple[str, tuple[str, ...]]]:
    """Each sequence's text, and the stretches of it that are trained on."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for row in rows:
        for piece in range(row.pieces):
            text, inside = "", False
            trained: list[str] = []
            for one in row.segments:
                if one.seen and one.piece == piece:
                    text += one.text
                    if one.trained and inside:
                        trained[-1] += one.text
                    elif one.trained:
                        trained.append(one.text)
                    inside = one.trained
            found[text, tuple(trained)] += bool(text)
    return +found


def of_batches(file: Path) -> Counter[tuple[str, tuple[str, ...]]]:
    """The same, out of the batches that a run would train on."""
    made = prepare(file)
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for split in made.splits():
        index, store = split.index, split.open()
        out = BatchArrays.allocate(BatchShape.for_index(index, 1))
        for one in range(index.bins):
            fill_batch(out, index, [one], store)
            place = 0
            for _, start, stop in index.pieces(one):
                place += index.soft_tokens
                ids = out.tokens[place : place + stop - start].tolist()
                label = out.labels[place : place + stop - start].tolist()
                stretches: list[list[int]] = []
                for at in range(1, len(ids)):
                    if label[at - 1] == IGNORED:
                        continue
                    if label[at - 2] == IGNORED or at == 1:
                        stretches.append([])
                    stretches[-1].append(label[at - 1])
                decode = made.encoder.decode
                found[decode(ids), tuple(map(decode, stretches))] += 1
                place += stop - start
    return found


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (ROWS, {}),
        (ROWS, {"train_on_prompt": True}),
        (ROWS, {"max_seq_length": 32}),
        (ROWS, {"max_seq_length": 24, "overlong": "split"}),
        (ROWS, {"max_seq_length": 40, "overlong": "drop"}),
        (CHAT, {}),
        (CHAT, {"packing": False, "max_seq_length": 80}),
        ([{"text": f"{n} " * (n + 1)} for n in range(50)], {"max_seq_length": 64}),
        ([OPENAI] * 20, {"max_seq_length": 1024}),
    ],
)
def test_what_is_shown_is_what_the_batches_of_the_run_hold(tmp_path, rows, config):
    file = an_expert(tmp_path, **config)
    (tmp_path / "train.jsonl").write_text(lines(rows), encoding="utf-8")
    assert of_shown(shown(file)) == of_batches(file)


def test_soft_prompts_come_before_a_row_and_take_its_room(tmp_path):
    file = an_expert(tmp_path, max_seq_length=40)
    made = json.loads(file.read_text())
    made["soft_prompts"] = [{"name": "tone", "tokens": 8}]
    file.write_text(json.dumps(made))
    rows = shown(file)
    assert of_shown(rows) == of_batches(file)


def test_a_text_of_the_character_model_is_shown_in_its_blocks(tmp_path):
    text = "To be, or not to be: that is the question.\n" * 80
    (tmp_path / "text.txt").write_text(text)
    file = tmp_path / "manifest.json"
    dataset = {"path": "text.txt", "validation_split": 0}
    training = {"dataset": dataset}
    file.write_text(json.dumps({"name": "c", "base_model": "char-gpt", "training": training}))
    (row,) = shown(file)
    assert "".join(one.text for one in row.segments) == text
    assert row.pieces == 12  # of 3,440 characters; the rest is seen in later epochs
    # The first character of a block has nothing before it.
    assert row.trained_tokens == row.pieces * 255
    assert row.lost_tokens == len(text) - 12 * 256
    assert of_shown([row]) == of_batches(file)


def test_the_longest_row_the_first_and_one_more_are_shown(tmp_path):
    file = an_expert(tmp_path)
    rows = shown(file, RowsToShow())
    assert [row.because for row in rows] == ["the first", "random", "the longest"]
    every = shown(file)
    assert rows[-1].tokens == max(row.tokens or 0 for row in every)
    assert len(every) == len(ROWS)
    assert shown(file, RowsToShow(count=0)) == []
    assert [row.because for row in shown(file, RowsToShow(count=1))] == ["the longest"]
    drawn = [row.place for row in every if row.split == "validation"]
    assert len(drawn) == 12


def test_a_row_of_which_nothing_is_trained_on_says_why(tmp_path):
    file = an_expert(tmp_path, max_seq_length=32)
    long = {"instruction": "long " * 60, "output": "end"}
    (tmp_path / "train.jsonl").write_text(lines([*ROWS, long]), encoding="utf-8")
    (row,) = shown(file, RowsToShow(count=0, lines=("121",)))
    assert row.left_out == "the answer starts after max_seq_length 32"
    assert row.trained_tokens == 0


def test_rows_are_found_as_messages_name_them(tmp_path):
    dataset = {"path": "rows.json", "test_path": "test.jsonl", "max_bad_rows": 9}
    file = an_expert(tmp_path, dataset=dataset)
    (tmp_path / "rows.json").write_text(json.dumps([*ROWS[:9], {"instruction": 1}]))
    (tmp_path / "test.jsonl").write_text(lines(ROWS[:3]))
    asked = ("3", "rows.json: row 10", "test.jsonl:2")
    third, bad, test = shown(file, RowsToShow(count=0, lines=asked))
    assert third.place.endswith("rows.json: row 3")
    assert "Count to 3." in "".join(one.text for one in third.segments)
    assert bad.left_out.startswith("a bad row: ")
    assert (test.split, test.place) == ("test", f"{tmp_path / 'test.jsonl'}:2")
    with pytest.raises(RowNotFound, match=r"--row 77: there is no such row\n.*--row test.jsonl:9"):
        shown(file, RowsToShow(lines=("77", "test.jsonl:9")))
    with pytest.raises(RowNotFound, match="--row seven: not a row"):
        shown(file, RowsToShow(lines=("seven",)))


def test_a_long_row_is_shortened_in_the_middle_and_what_is_missing_is_counted(tmp_path):
    file = an_expert(tmp_path, max_seq_length=4096)
    answer = "begin " + "é" * 900 + " end"
    rows = [*ROWS, {"instruction": "Write.", "output": answer}]
    (tmp_path / "train.jsonl").write_text(lines(rows), encoding="utf-8")
    (row,) = shown(file, RowsToShow(count=1))
    (cut,) = [one for one in row.segments if one.not_shown]
    assert cut.trained
    assert cut.text.startswith("begin é")
    assert cut.after.endswith("é end")
    assert "\ufffd" not in cut.text + cut.after
    assert (cut.tokens or 0) - cut.not_shown <= 400
    (whole,) = shown(file, RowsToShow(count=1, most_tokens=None))
    assert [one.text for one in whole.segments if answer in one.text]
    # One that fits the screen is not shortened, however many stretches it has.
    (tmp_path / "train.jsonl").write_text(lines(CHAT), encoding="utf-8")
    (row,) = shown(file, RowsToShow(count=1))
    assert (row.tokens or 0) < 400
    assert not [one for one in row.segments if one.not_shown]


def test_without_the_tokenizer_no_row_is_shown_and_the_reason_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = an_expert(tmp_path, model="somebody/some-model")
    report = check_dataset(file, show=RowsToShow())
    assert "somebody/some-model is not on this machine" in report.problems[0]
