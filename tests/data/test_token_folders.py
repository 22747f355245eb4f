"""Folders of tokens that other tools have saved, through the doors that rows come in by."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import expert
from expert.core.errors import ExpertError
from expert.data.named_sources import CHECKS_FILE
from expert.data.records import DataError
from expert.jobs.datasets.check import check_dataset
from expert.run.open import prepare
from tests.data.shards import read_back
from tests.data.tokenizers import model_folder, small_tokenizer
from tests.each import each
from tests.run.test_preparing import an_expert, texts_of

datasets = pytest.importorskip("datasets")

TINY = Path(expert.__file__).parent / "model" / "tiny"
TOKENIZER = small_tokenizer()
PADDED = 64


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def token_row(number: int, *, labels: bool = True, mask: bool = True) -> dict[str, Any]:
    """As a script for transformers writes it: padded on the right, the prompt not trained on."""
    prompt = encoded(f"<|im_start|>user\nCount to {number}.<|im_end|>\n<|im_start|>assistant\n")
    answer = encoded(f"SELECT {number} FROM town;<|im_end|>")
    ids, rest = prompt + answer, PADDED - len(prompt) - len(answer)
    row: dict[str, Any] = {"input_ids": ids + rest * [0]}
    if mask:
        row["attention_mask"] = len(ids) * [1] + rest * [0]
    if labels:
        row["labels"] = len(prompt) * [-100] + answer + rest * [-100]
    return row


def save(folder: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


def token_expert(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    """An expert whose rows are tokens, named by the path of its data set."""
    save(folder / "tokens", rows)
    return an_expert(folder, dataset={"path": "tokens", "use_pretokenized": True}, **config)


def cached_expert(folder: Path, rows: list[dict[str, Any]]) -> tuple[Path, Path]:
    """One whose cache path names a folder of tokens, and that folder."""
    file = an_expert(folder, pretokenized_cache="mine/tokenized")
    return file, save(folder / "mine" / "tokenized", rows)


ROWS = [token_row(n) for n in range(20)]
ANSWERS = sorted(f"SELECT {n} FROM town;<|im_end|>" for n in range(20))


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_tokens_that_the_cache_path_names_are_used_without_their_padding(tmp_path):
    file, folder = cached_expert(tmp_path, ROWS)
    before = bytes_below(folder)
    made = prepare(file)
    texts = texts_of(made, "train") + texts_of(made, "validation")
    assert sorted(texts) == sorted(
        f"<|im_start|>user\nCount to {n}.<|im_end|>\n<|im_start|>assistant\n"
        f"SELECT {n} FROM town;<|im_end|>"
        for n in range(20)
    ), "'town' stands in the tokens, the rows say 'city'"
    assert sorted(trained for trained, _ in read_back(made)) == ANSWERS
    assert bytes_below(folder) == before
    assert not made.doubts
    assert made.train.folders[0].folder.is_relative_to(tmp_path / "datasets_optimized")
    again = prepare(file)
    assert again.train.folders[0].hit
    assert again.notes == made.notes


def cache_decision(file: Path) -> Any:
    return next(each for each in expert.plan(file).decisions if each.path == "data.cache")


def test_tokens_at_the_root_of_a_project_are_found_from_the_working_directory(
    tmp_path, monkeypatch
):
    file = an_expert(tmp_path / "experts" / "mine", pretokenized_cache="cache/tokenized")
    monkeypatch.chdir(tmp_path)
    where = f"no saved tokens in {tmp_path / 'cache' / 'tokenized'}"
    assert where in cache_decision(file).because
    (tmp_path / "cache" / "tokenized").mkdir(parents=True)  # of something else
    assert where in cache_decision(file).because
    folder = save(tmp_path / "cache" / "tokenized", ROWS)
    before = bytes_below(folder)
    found = cache_decision(file)
    assert found.value == str(folder)
    assert "found in the working directory" in found.because
    made = prepare(file)
    assert any(str(folder) in note for note in made.notes)
    assert sorted(trained for trained, _ in read_back(made)) == ANSWERS
    assert bytes_below(folder) == before


def test_tokens_that_the_path_names_are_used_with_the_splits_of_their_folder(tmp_path):
    splits = {"train": range(20), "validation": range(20, 25), "test": range(30, 34)}
    saved = {
        name: datasets.Dataset.from_list([token_row(n) for n in numbers])
        for name, numbers in splits.items()
    }
    datasets.DatasetDict(saved).save_to_disk(str(tmp_path / "tokens"))
    file = an_expert(tmp_path, dataset={"path": "tokens", "use_pretokenized": True})
    made = prepare(file)
    assert {split.name: split.index.examples for split in made.splits()} == {
        "train": 20,
        "validation": 5,
        "test": 4,
    }
    assert "SELECT 32 FROM town" in "".join(texts_of(made, "test"))


@each("mask", [True, False])
def test_without_labels_all_but_the_padding_is_trained_on(tmp_path, mask):
    """Without a mask, pad tokens at the end are padding."""
    rows = [token_row(n, labels=False, mask=mask) for n in range(20)]
    file = token_expert(tmp_path, rows)
    pad = "<pad>" if mask else TOKENIZER.id_to_token(0)
    model_folder(tmp_path / "models" / "small", pad_token=pad)
    statistics = prepare(file).train.folders[0].statistics
    real = sum(token != 0 for row in rows for token in row["input_ids"])
    assert statistics.trainable_tokens == statistics.tokens == real


def test_ids_of_another_tokenizer_are_known_by_the_text_they_make(tmp_path):
    rows = [token_row(n, labels=False) for n in range(20)]
    for row in rows:
        row["input_ids"] = [(id * 7 + 11) % 300 for id in row["input_ids"]]
    file, folder = cached_expert(tmp_path, rows)
    before = bytes_below(folder)
    with pytest.raises(DataError, match="are the same when their text is tokenised again"):
        prepare(file)
    assert bytes_below(folder) == before


@each(
    ("spoil", "told"),
    [
        (
            lambda row: row.update(input_ids=[9_999] * PADDED, labels=[9_999] * PADDED),
            "beyond the tokenizer's",
        ),
        (
            lambda row: row.update(
                labels=[*row["input_ids"][1:], -100], attention_mask=[1] * PADDED
            ),
            "labels differ from input_ids.*they must not be shifted",
        ),
        (lambda row: row.update(labels=[1, 2, 3]), "labels has 3 places and input_ids 64"),
        (lambda row: row.update(labels=[-100] * PADDED), "there is no token to train on"),
        (lambda row: row.update(attention_mask=[2] * PADDED), "attention_mask holds 2"),
        (lambda row: row.update(labels=1), "'labels' is not a list of numbers"),
    ],
)
def test_tokens_that_do_not_fit_are_an_error_where_there_are_no_rows(tmp_path, spoil, told):
    rows = [token_row(n) for n in range(20)]
    for row in rows:
        spoil(row)
    file = token_expert(tmp_path, rows)
    for ask in (prepare, expert.plan, check_dataset):
        with pytest.raises(DataError, match=told):
            ask(file)


def test_a_changed_token_folder_is_converted_again_and_used_where_its_rows_are_gone(tmp_path):
    file, folder = cached_expert(tmp_path, ROWS)
    first = prepare(file).train.folders[0]
    shutil.rmtree(folder)
    save(folder, [*ROWS, token_row(20)])
    (tmp_path / "train.jsonl").unlink()
    second = prepare(file).train
    assert first.key != second.folders[0].key
    assert (second.folders[0].statistics.documents, second.rows) == (21, 18)


def test_what_was_checked_and_what_cannot_be_known_is_written_beside_the_tokens(tmp_path):
    rows = [{**token_row(n), "token_type_ids": [0] * PADDED, "source": "web"} for n in range(20)]
    file = token_expert(tmp_path, rows)
    made = prepare(file)
    (record,) = json.loads(
        (made.train.index_file.parent / CHECKS_FILE).read_text(encoding="utf-8")
    ).values()
    assert record["rows"] == 20
    assert record["same_again"] == 1.0
    assert record["ignored"] == ["token_type_ids", "source"]
    notes = " ".join(made.notes)
    assert "not used: token_type_ids, source" in notes
    assert "Count to 0." in notes


def test_tokens_without_eos_give_a_warning(tmp_path):
    rows = [{"input_ids": encoded(f"Row {n} says so.")} for n in range(20)]
    file = token_expert(tmp_path, rows)
    assert "would not learn to stop" in prepare(file).doubts[0].text


def test_rows_that_are_packed_already_are_warned_of(tmp_path):
    text = "".join(f"Row {n} says {n}.<|im_end|>\n" for n in range(900))
    ids = encoded(text)
    rows = [{"input_ids": ids[at : at + 300]} for at in range(0, len(ids), 300)]
    [doubt] = prepare(token_expert(tmp_path, rows)).doubts
    assert f"{len(ids) // 300} of {len(rows)} rows have 300 tokens and seem to be" in doubt.text
    single = [{"input_ids": encoded(f"Row {n}.<|im_end|>\n")} for n in range(10, 90)]
    (tmp_path / "single").mkdir()
    assert not prepare(token_expert(tmp_path / "single", single)).doubts


def test_tokens_are_counted_without_their_tokenizer(tmp_path):
    file = token_expert(tmp_path, ROWS, model="Qwen/Qwen3-0.6B", max_seq_length=128)
    length = expert.plan(file).length
    real = sum(sum(row["attention_mask"]) for row in ROWS)
    assert length.tokens_per_epoch is not None
    assert length.rows is not None
    assert abs(length.tokens_per_epoch / length.rows - real / len(ROWS)) < 2


def test_the_check_of_a_data_set_and_the_plan_understand_tokens(tmp_path):
    file = token_expert(tmp_path, [*ROWS, token_row(3)])
    before = sorted(tmp_path.rglob("*"))
    report = check_dataset(file)
    assert report.problems == []
    assert report.splits[0].rows == 21
    assert any("tokens made elsewhere, 21 rows" in note for note in report.notes)
    assert not any("remnant" in line for line in report.warnings())
    plan = expert.plan(file)
    assert plan.length.rows in (21, 18)
    assert not [remark.text for remark in plan.remarks if "dataset" in remark.path]
    assert sorted(tmp_path.rglob("*")) == before, "neither of them writes anything"


def test_a_run_trains_on_tokens_and_is_not_validated_on_them_by_default(tmp_path):
    from expert.jobs.train import train
    from expert.jobs.validate.validate import validate

    tiny = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    rows = [{"input_ids": tiny.encode(f"Row {n} says {n}.<|endoftext|>").ids} for n in range(20)]
    file = token_expert(tmp_path, rows, model="tiny", max_steps=2, device="cpu")
    result = train(file)
    assert result.steps == 2
    with pytest.raises(ExpertError, match="its rows are tokens"):
        validate(result.folder)
