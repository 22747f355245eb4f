"""Sources: files and folders of a manifest, their splits and hashes, and what each failure says."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from expert.data.examples.cached_results import cached_content_hash
from expert.data.read.folders import unread_files
from expert.data.read.sources import content_hash, iterate
from expert.data.records import DataError
from expert.manifest.schema.dataset import Task
from tests.data import FILES
from tests.data.read.source_folders import fill, names, refusal, resolve, train_of, values
from tests.each import each

# ---- files and folders


def test_a_path_is_relative_to_the_folder_of_the_manifest_or_absolute(tmp_path):
    fill(tmp_path, "datasets/train.jsonl", "datasets/valid.jsonl", "held/back.jsonl")
    sources = resolve(
        tmp_path,
        "datasets\\train.jsonl",
        validation_path="datasets/valid.jsonl",
        test_path="held/back.jsonl",
    )
    named = (sources.train, sources.validation, sources.test)
    expected = ["datasets/train.jsonl", "datasets/valid.jsonl", "held/back.jsonl"]
    assert [names(source, tmp_path) for source in named] == [[name] for name in expected]
    assert sources.tasks == ()
    absolute = str(tmp_path / "datasets" / "train.jsonl")
    alone = resolve(Path("elsewhere"), absolute)
    assert alone.train is not None
    assert (alone.train.files, alone.validation, alone.test) == ((Path(absolute),), None, None)
    assert values(alone.train) == [{"from": "datasets/train.jsonl"}]


@each(
    ("files", "train", "validation", "test"),
    [
        ("b.jsonl a.jsonl sub/c.jsonl", "a.jsonl b.jsonl sub/c.jsonl", "", ""),
        (
            "train.jsonl valid.jsonl test.jsonl.gz metadata.json notes.md",
            *("train.jsonl", "valid.jsonl", "test.jsonl.gz"),
        ),
        (
            "train/0.json train/1.json validation/0.json test/x/deep.json",
            *("train/0.json train/1.json", "validation/0.json", "test/x/deep.json"),
        ),
        ("train.jsonl more.jsonl latest.jsonl", "latest.jsonl more.jsonl train.jsonl", "", ""),
        (".hidden.jsonl .git/x.jsonl a.jsonl", "a.jsonl", "", ""),
        ("a.jsonl testing.jsonl holdout.jsonl", "a.jsonl", "", "holdout.jsonl testing.jsonl"),
        (
            "threshold_out.jsonl held_out.jsonl hold-out/b.jsonl",
            *("threshold_out.jsonl", "", "held_out.jsonl hold-out/b.jsonl"),
        ),
        ("a.jsonl runs/one/plan.json runs/one/events.jsonl", "a.jsonl", "", ""),
        ("a.jsonl datasets_optimized/x/tokens-1/rejects.jsonl", "a.jsonl", "", ""),
    ],
)
def test_files_of_a_folder_become_the_splits_they_are_named_for(
    files, train, validation, test, tmp_path
):
    fill(tmp_path, *(f"rows/{name}" for name in files.split()))
    found = resolve(tmp_path, "rows")
    sources = (found.train, found.validation, found.test)
    told = [" ".join(names(source, tmp_path / "rows") or []) for source in sources]
    assert told == [train, validation, test]


def test_rows_of_another_expert_are_not_read_and_those_beside_a_list_of_files_are(tmp_path):
    fill(tmp_path, "a.jsonl", "one/b.jsonl", "one/datasets/c.jsonl", "two/manifest.json")
    fill(tmp_path, "two/part/d.jsonl")  # the manifest above lists files, as other tools write it
    (tmp_path / "one" / "manifest.json").write_text('{"base_model": "tiny"}', encoding="utf-8")
    found = names(train_of(tmp_path, "."), tmp_path)
    assert found == ["a.jsonl", "one/b.jsonl", "two/part/d.jsonl"]
    unread = ["one/datasets/c.jsonl", "one/manifest.json", "two/manifest.json"]
    assert unread_files(tmp_path) == unread


def test_a_named_file_or_folder_wins_over_what_lies_beside_the_training_rows(tmp_path):
    fill(tmp_path, "rows/train.jsonl", "rows/valid.jsonl", "own.jsonl")
    sources = resolve(tmp_path, "rows", validation_path="own.jsonl")
    assert names(sources.train, tmp_path) == ["rows/train.jsonl"]
    assert names(sources.validation, tmp_path) == ["own.jsonl"]
    fill(tmp_path, "train.jsonl", "held/part1.jsonl", "odd/test.jsonl")
    held = resolve(tmp_path, "train.jsonl", validation_path="held", test_path="odd")
    assert names(held.validation, tmp_path) == ["held/part1.jsonl"]
    both = resolve(tmp_path, "train.jsonl", validation_path="rows", test_path="rows")
    assert names(both.validation, tmp_path) == ["rows/valid.jsonl"]
    assert names(both.test, tmp_path) == ["rows/train.jsonl", "rows/valid.jsonl"]
    asked = resolve(tmp_path, "train.jsonl", test_path="rows::train")
    assert names(asked.test, tmp_path) == ["rows/train.jsonl"]


def test_rows_that_are_named_as_held_out_are_not_trained_on_with_the_folder_they_are_in(tmp_path):
    fill(tmp_path, "rows/a.jsonl", "rows/b/c.jsonl", "rows/b/d/e.jsonl", "rows/b/d/f.jsonl")
    held = {"validation_path": "rows/b/c.jsonl", "test_path": "rows/b/d"}
    found = resolve(tmp_path, "rows", **held)
    assert names(found.train, tmp_path) == ["rows/a.jsonl"]
    assert names(found.validation, tmp_path) == ["rows/b/c.jsonl"]
    assert names(found.test, tmp_path) == ["rows/b/d/e.jsonl", "rows/b/d/f.jsonl"]
    task = Task(train="rows", valid="rows/b/c.jsonl", test="rows/b/d")
    [of_task] = resolve(tmp_path, type="multi_task", tasks={"one": task}).tasks
    assert names(of_task.train, tmp_path) == ["rows/a.jsonl"]
    # Where nothing else is left, the rows that are in both are warned of.
    both = resolve(tmp_path, "rows/b/d", validation_path="rows")
    assert len(names(both.train, tmp_path) or []) == 2


def test_folders_that_are_not_looked_into_are_listed_as_not_read(tmp_path):
    fill(tmp_path, "a.jsonl", "datasets--of--me/b.jsonl", "sub/env/pyvenv.cfg", ".git/c.jsonl")
    fill(tmp_path, "datasets_optimized/x/rejects.jsonl", "runs/x/plan.json", "runs/x/events.jsonl")
    assert names(train_of(tmp_path, "."), tmp_path) == ["a.jsonl"]
    assert unread_files(tmp_path) == ["datasets--of--me/", "runs/x/", "sub/env/"]


def test_a_folder_of_several_formats_needs_the_format_said(tmp_path):
    fill(tmp_path, "rows/a.jsonl", "rows/b.jsonl", "rows/c.csv", "rows/README.txt")
    assert "rows: files of several formats: 1 csv, 2 jsonl  (" in refusal(tmp_path, "rows")
    source = train_of(tmp_path, "rows", format="jsonl")
    assert names(source, tmp_path) == ["rows/a.jsonl", "rows/b.jsonl"]
    assert values(source) == [{"from": "rows/a.jsonl"}, {"from": "rows/b.jsonl"}]


def test_paths_that_lead_to_no_rows_are_refused_with_what_is_there(tmp_path):
    (tmp_path / "empty").mkdir()
    fill(tmp_path, "held/test.jsonl", "datasets/train.jsonl")
    fix = "put .jsonl, .csv, .parquet or other data files there"
    assert refusal(tmp_path, "empty") == f"empty: the folder has no data files for 'train'  ({fix})"
    assert "held::dev: the folder has no data files for 'dev'" in refusal(tmp_path, "held::dev")
    assert "there is no FOLDER/datasets/train.json1" in refusal(tmp_path, "datasets/train.json1")
    assert "zzz.csv: there is no FOLDER/datasets/zzz.csv" in refusal(tmp_path, "datasets/zzz.csv")
    fill(tmp_path, "train.jsonl")
    assert "::test: a file has no splits  (leave out" in refusal(tmp_path, "train.jsonl::test")
    assert refusal(tmp_path) == "training.dataset: it names no rows  (set path or tasks)"


def test_tasks_keep_their_weights_and_files(tmp_path):
    fill(tmp_path, "repair/train.jsonl", "repair/valid.jsonl", "schema/train.jsonl", "schema/t.csv")
    sources = resolve(
        tmp_path,
        type="multi_task",
        tasks={
            "repair": Task(train="repair/train.jsonl", valid="repair/valid.jsonl", weight=0.4),
            "schema": Task(train="schema\\train.jsonl", test="schema/t.csv"),
        },
    )
    assert sources.train is None
    repair, schema = sources.tasks
    assert (repair.weight, repair.test) == (0.4, None)
    assert names(repair.train, tmp_path) == ["repair/train.jsonl"]
    assert names(repair.validation, tmp_path) == ["repair/valid.jsonl"]
    assert (schema.weight, schema.validation) == (1.0, None)
    assert names(schema.train, tmp_path) == ["schema/train.jsonl"]
    assert names(schema.test, tmp_path) == ["schema/t.csv"]


def test_max_chars_is_spent_over_the_text_files_together(tmp_path):
    for name, text in (("a.txt", "12345"), ("b.txt", "67890"), ("c.txt", "never")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert values(train_of(tmp_path, ".", max_chars=8)) == [{"text": "12345"}, {"text": "678"}]
    assert len(values(train_of(tmp_path, "."))) == 3
    assert len(values(train_of(FILES, "rivers.jsonl", max_chars=8))) == 3


def test_max_samples_takes_the_first_rows_and_reads_no_further(tmp_path):
    text = '{"n": 1}\nnull\n{"n": 2}\n{"n": 3}\nnull\n'
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"n": 4}\n', encoding="utf-8")
    source = train_of(tmp_path, "a.jsonl", max_samples=2)
    assert [row.line for row in iterate(source)] == [1, 2, 3]  # the bad row counts for nothing
    spec = {"validation_path": "b.jsonl", "max_samples": 1}
    found = resolve(tmp_path, "a.jsonl", **spec)
    assert found.validation is not None
    assert [row["n"] for row in values(train_of(tmp_path, "a.jsonl", **spec))] == [1]
    assert len(values(found.validation)) == 1
    assert len(values(train_of(tmp_path, "b.jsonl", max_samples=9))) == 1


# ---- hashes


def test_a_hash_depends_on_the_content_and_not_on_the_name_or_the_rows_taken(tmp_path):
    fill(tmp_path, "a.jsonl")
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "copy.jsonl").write_bytes(content)
    same = [train_of(tmp_path, "a.jsonl", max_samples=n) for n in (None, 1, 2)]
    hashes = {content_hash(source) for source in [*same, train_of(tmp_path, "copy.jsonl")]}
    hashes |= {cached_content_hash(source, tmp_path / "cache") for source in same}
    assert [len(each) for each in hashes] == [64]
    (tmp_path / "a.jsonl").write_bytes(content.replace(b"from", b"form"))
    assert content_hash(same[0]) not in hashes
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        content_hash(same[0])
    assert "a.jsonl: it cannot be read: No such file or directory" in str(caught.value)


def test_a_hash_depends_on_how_the_bytes_are_read_and_where_files_end(tmp_path):
    files = {"a": b"xy", "one/a": b"x", "one/b": b"yz", "two/a": b"xy", "two/b": b"z"}
    for name, content in files.items():
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"xy"))
    asked: list[tuple[str, dict[str, Any]]] = [("a.txt", {"format": "csv"})]
    asked += [("a.txt", {"max_chars": 1}), ("a.txt", {}), ("one", {}), ("two", {})]
    asked += [("packed.txt.gz", {})]
    assert len({content_hash(train_of(tmp_path, path, **more)) for path, more in asked}) == 6
