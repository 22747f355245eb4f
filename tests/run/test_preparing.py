"""From a manifest to packed, memory-mapped tokens, by the function behind the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import expert
import expert.data.examples.cached_results as row_cache
import expert.data.pipeline as preparing
from expert.data import splits
from expert.data.prepared import PreparedData
from expert.data.records import DataError
from expert.data.tokens.encoder import CharacterEncoder, TextEncoder
from expert.jobs.datasets.find import manifests_below
from expert.run.open import prepare
from tests.data.tokenizers import model_folder, small_tokenizer

ROWS = [
    {"instruction": f"Count to {n}.", "input": "x" * (n % 7), "output": f"SELECT {n} FROM city;"}
    for n in range(1, 121)
]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def an_expert(folder: Path, *, dataset: Any = None, model: str = "small", **config: Any) -> Path:
    model_folder(folder / "models" / "small")
    (folder / "train.jsonl").write_text(lines(ROWS), encoding="utf-8")
    data = {
        "name": "counter",
        "base_model": {"name": model, "prompt_template": "chatml"},
        "training": {
            "dataset": dataset or {"path": "train.jsonl"},
            "config": {"max_seq_length": 128, **config},
        },
    }
    file = folder / "manifest.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def texts_of(data: PreparedData, name: str) -> list[str]:
    """The decoded documents of a split, in the order of its sequences."""
    split = next(split for split in data.splits() if split.name == name)
    store, tokenizer = split.open(), small_tokenizer()
    found = []
    for number in range(split.index.bins):
        for document, start, stop in split.index.pieces(number):
            ids = store.tokens(document)[start:stop].tolist()
            found.append(tokenizer.decode(ids, skip_special_tokens=False))
    return found


def test_rows_are_not_read_again_while_their_files_are_the_same(tmp_path, monkeypatch):
    file = an_expert(tmp_path, dataset={"path": "train.jsonl"})
    first = prepare(file)
    for module in (preparing, row_cache):
        monkeypatch.setattr(module, "iterate", lambda source: pytest.fail("read again"))
    kept, again = (made.train.folders for made in (first, prepare(file)))
    assert [each.folder for each in again] == [each.folder for each in kept]


def test_an_update_of_short_rows_has_the_rows_that_the_manifest_says(tmp_path):
    manifest = an_expert(tmp_path, batch_size=4, max_seq_length=512, epochs=1)
    index = prepare(manifest).train.index
    assert index.length < 512
    made = expert.plan(manifest)
    assert made.data.sequence_length == index.length
    rows = index.examples * (made.batch.sequences_per_update or 0) / index.bins
    assert rows == pytest.approx(4, rel=0.1)
    assert made.length.total_steps == pytest.approx(index.examples / 4, rel=0.1)


@pytest.mark.parametrize("packing", [True, False])
def test_a_split_of_which_no_row_is_left_is_refused(tmp_path, packing):
    dataset = {"path": "train.jsonl", "validation_path": "validation.jsonl"}
    manifest = an_expert(tmp_path, dataset=dataset, overlong="drop", packing=packing)
    long = {**ROWS[0], "output": "x y " * 500}
    (tmp_path / "validation.jsonl").write_text(lines([long, long]), encoding="utf-8")
    words = "validation: all of its 2 rows are longer than max_seq_length 128, .*overlong: cut"
    with pytest.raises(DataError, match=words):
        prepare(manifest)
    with pytest.raises(DataError, match=words):  # and again where the index lies in the cache
        prepare(manifest)
    (tmp_path / "train.jsonl").write_text(lines([long, long]), encoding="utf-8")
    (tmp_path / "validation.jsonl").write_text(lines(ROWS[:2]), encoding="utf-8")
    with pytest.raises(DataError, match="train: all of its 2 rows are longer"):
        prepare(manifest)


def test_every_row_is_written_with_the_template_and_its_answer_is_learnt(tmp_path):
    made = prepare(an_expert(tmp_path))
    train, held_out = texts_of(made, "train"), texts_of(made, "validation")
    assert (len(train), len(held_out)) == (108, 12)
    assert not set(train) & set(held_out)
    expected = (
        "<|im_start|>user\nCount to 7.<|im_end|>\n"
        "<|im_start|>assistant\nSELECT 7 FROM city;<|im_end|>\n"
    )
    assert expected in train + held_out
    store, tokenizer = made.train.open(), small_tokenizer()
    for document in range(len(store)):
        ids = store.tokens(document)
        learnt = [ids[start:stop].tolist() for start, stop in store.spans(document)]
        [text] = [tokenizer.decode(part, skip_special_tokens=False) for part in learnt]
        row = ROWS[store.row(document)]
        assert text.rstrip("\n") == row["output"] + "<|im_end|>"
    alone = made.train.folders[0].statistics
    assert alone.trainable_tokens < alone.tokens
    both = prepare(an_expert(tmp_path / "b", train_on_prompt=True)).train.folders[0].statistics
    assert both.trainable_tokens == both.tokens


def test_what_is_tokenised_again_is_told_with_the_reason(tmp_path):
    file = an_expert(tmp_path)
    assert prepare(file).train.folders[0].because == "first use of this data"
    shorter = prepare(file, overrides=("max_seq_length=96",)).train
    assert shorter.folders[0].hit
    assert not shorter.index_hit
    assert shorter.index.length == 96
    (tmp_path / "train.jsonl").write_text(lines(ROWS[:50]), encoding="utf-8")
    changed = prepare(file).train.folders[0]
    assert (changed.hit, changed.because) == (False, "the data changed")
    told = [
        prepare(file, overrides=(f"max_samples={count}",)).train.folders[0].because
        for count in (30, 40, 40)
    ]
    assert told == [*["max_samples changed"] * 2, "made from the same data and settings"]


@pytest.mark.parametrize("there", [False, True])
def test_tokens_are_kept_in_the_cache_that_the_manifest_names(tmp_path, there):
    file, folder = an_expert(tmp_path, pretokenized_cache="a/tokens"), tmp_path / "a" / "tokens"
    if there:
        folder.mkdir(parents=True)
    made = prepare(file).train.folders[0].folder
    assert made.parent == folder
    assert prepare(file).train.folders[0].hit
    again = (f"pretokenized_cache={made}",)
    assert prepare(file, overrides=again).train.folders[0].hit  # its own name is understood too


def test_a_character_corpus_becomes_full_blocks(tmp_path):
    (tmp_path / "corpus.txt").write_text("To be, or not to be.\n" * 200, encoding="utf-8")
    data = {"name": "bard", "dataset": "corpus.txt", "model": {"block_size": 32, "n_layer": 1}}
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    made = prepare(tmp_path / "config.json")
    assert made.template == "characters"
    assert made.encoder.characters == "".join(sorted(set("To be, or not to be.\n")))
    assert made.train.index.statistics().fill > 0.98
    assert made.validation.index.statistics().tokens == 21 * 20, "its last tenth is held out"
    kept = made.train.index.statistics().tokens
    assert 21 * 180 - 2 * 32 < kept <= 21 * 180, "blocks move by up to one in later epochs"
    last = made.validation.open().tokens(1).tolist()
    assert isinstance(made.encoder, CharacterEncoder)
    assert made.encoder.decode(last) == ("To be, or not to be.\n" * 200)[-420:]
    assert made.validation.index.statistics().tokens > 0


def test_a_model_that_cannot_be_fetched_is_told_with_a_near_name_only_if_it_is_another(
    tmp_path, monkeypatch
):
    import huggingface_hub.errors

    missing = huggingface_hub.errors.LocalEntryNotFoundError("An error happened …")
    missing.__cause__ = OSError("[Errno -2] Name or service not known")
    monkeypatch.setattr("huggingface_hub.snapshot_download", MagicMock(side_effect=missing))
    file = an_expert(tmp_path)
    for name, meant in (("Qwen/Qwen3-0.6B", ""), ("Qwen/Qwen3-06B", "did you mean 'Qwen3-0.6B'? ")):
        with pytest.raises(DataError, match=r"from the hub: .*Name or service not known") as told:
            prepare(file, overrides=(f"base_models[0].name={name}",))
        assert f"({meant}" in str(told.value)
        assert ("did you mean" in str(told.value)) == bool(meant)
        assert f"'hf download {name} --local-dir" in str(told.value)


def test_manifests_are_found_below_a_folder(tmp_path):
    for name in ("a", "b"):
        an_expert(tmp_path / name)
    assert [path.parent.name for path in manifests_below(tmp_path)] == ["a", "b"]
    with pytest.raises(DataError, match="no manifest below"):
        manifests_below(tmp_path / "a" / "models")


@pytest.mark.parametrize(("letters", "held_out"), [(9000, True), (900, False)])
def test_the_end_of_a_single_long_text_is_held_out(tmp_path, letters, held_out):
    file = an_expert(tmp_path, dataset={"path": "book.txt"})
    words = " ".join(f"word{number}" for number in range(letters // 8))
    (tmp_path / "book.txt").write_text(words, encoding="utf-8")
    data = prepare(file)
    assert (data.validation is not None) == held_out
    if held_out:
        train, validation = "".join(texts_of(data, "train")), "".join(texts_of(data, "validation"))
        assert "word1 " in train
        assert words[-8:] in validation
        assert words[-8:] not in train


def test_three_processes_that_prepare_at_once_do_everything_once(tmp_path, monkeypatch):
    manifest = an_expert(tmp_path, validation_split=0.1)
    log = tmp_path / "log"

    def logged(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
            while name == "encode" and not (tmp_path / "go").exists():
                time.sleep(0.01)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    logged(TextEncoder, "encode")
    logged(row_cache, "survey_rows")
    logged(row_cache, "content_hash")
    logged(splits, "packed")

    class Told:
        def __call__(self, name: str, rows: int, tokens: int) -> None: ...

        def waits(self, sentence: str) -> None:
            if "preparing train" in sentence:
                (tmp_path / f"told-{os.getpid()}").write_text(sentence, encoding="utf-8")

    def main() -> None:
        prepare(manifest, tell=Told())

    running = [multiprocessing.get_context("fork").Process(target=main) for _ in range(3)]
    for process in running:
        process.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("told-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    done = Counter(log.read_text(encoding="utf-8").splitlines())
    assert done == {"survey_rows": 1, "content_hash": 1, "encode": 1, "packed": 2}
    assert len(list(tmp_path.glob("told-*"))) == 2
