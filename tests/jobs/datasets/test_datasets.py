"""Looking into the data of a manifest, finding data sets, and gathering them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from expert.core.errors import ExpertError
from expert.data.feed.batches import IGNORED, BatchArrays, BatchShape, fill_batch
from expert.data.inspect import check_rows as job
from expert.data.inspect.audit import SAME
from expert.data.inspect.check_rows import DatasetReport
from expert.data.inspect.shown_rows import RowsToShow, ShownRow
from expert.data.records import DataError
from expert.jobs.datasets.check import check_dataset
from expert.jobs.datasets.find import (
    FoundDataset,
    caches,
    consolidate,
    find_datasets,
    manifests_below,
    read_users,
)
from expert.run.open import prepare
from tests.data.examples.test_tools import OPENAI
from tests.each import each
from tests.run.test_preparing import ROWS, an_expert, lines


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def by_name(report: DatasetReport) -> dict[str, Any]:
    return {split.name: split for split in report.splits}


def test_a_check_counts_what_preparing_counts_and_writes_nothing(tmp_path):
    dataset = {"path": "train.jsonl", "test_path": "t.jsonl", "validation": {"min_length": 20}}
    file = an_expert(tmp_path, dataset=dataset)
    write(tmp_path / "t.jsonl", lines(ROWS[50:60]))
    before = files_below(tmp_path)
    report = check_dataset(file)
    assert files_below(tmp_path) == before
    splits, made = by_name(report), prepare(file)
    assert (
        list(splits) == [split.name for split in made.splits()] == ["train", "validation", "test"]
    )
    statistics = made.train.folders[0].statistics
    train, validation = splits["train"], splits["validation"]
    assert (train.rows, train.dropped) == (statistics.rows_in, statistics.dropped)
    lengths = [train.lengths, validation.lengths]
    assert sum(each["tokens"] for each in lengths) == statistics.tokens
    assert sum(each["learnt_tokens"] for each in lengths) == statistics.trainable_tokens
    assert train.lengths["examples"] == made.train.index.examples
    assert report.template == "chatml"
    assert report.problems == []


def test_a_batch_boundary_changes_no_count(tmp_path, monkeypatch):
    file = an_expert(tmp_path)
    whole = check_dataset(file)
    monkeypatch.setattr(job, "_BATCH_EXAMPLES", 7)
    assert check_dataset(file) == whole
    monkeypatch.setattr(job, "_BATCH_CHARACTERS", 1)
    assert check_dataset(file) == whole


def test_bad_rows_are_listed_and_are_a_problem_beyond_what_is_tolerated(tmp_path):
    file = an_expert(tmp_path)
    rows = lines(ROWS[:20]) + "{broken\n" + '{"instruction": "a", "output": ""}\n'
    write(tmp_path / "train.jsonl", rows)
    report = check_dataset(file)
    train = by_name(report)["train"]
    assert (train.rows, train.bad_rows) == (22, 2)
    broken, empty = train.bad_row_lines()
    assert broken.startswith(f"{tmp_path / 'train.jsonl'}:21: ")
    assert empty == f"{tmp_path / 'train.jsonl'}:22: column 'output': the answer is empty"
    [problem] = report.problems
    assert problem.startswith("train train.jsonl: 2 bad rows, and training.dataset.max_bad_rows")
    assert "--set training.dataset.max_bad_rows=2" in problem
    tolerant = check_dataset(file, overrides=("training.dataset.max_bad_rows=2",))
    assert tolerant.problems == []
    short = check_dataset(file, overrides=("training.dataset.validation.min_length=1000",))
    assert "train train.jsonl: there is nothing to train on: 0 examples," in short.problems[-1]


def test_bad_rows_of_one_kind_are_grouped_and_columns_reported(tmp_path):
    file = an_expert(tmp_path)
    empty = {"instruction": "a", "output": ""}
    rows = [{**row, "id": 1} for row in ROWS]
    write(tmp_path / "train.jsonl", lines([*rows, *[empty] * 30, {"instruction": "b"}]))
    report = check_dataset(file)
    [note] = report.notes
    assert note.startswith("train.jsonl: instruction=instruction, input=input, response=output; ")
    assert note.endswith("not trained on: id (in 120 rows)")
    reported = report.splits[0].bad_row_lines()
    assert len(reported) == 12
    assert reported[0].endswith("train.jsonl:121: column 'output': the answer is empty")
    assert "is missing" in reported[10]
    assert reported[11] == "… and 20 more"


def test_the_files_of_a_folder_are_named_with_their_split(tmp_path):
    file = an_expert(tmp_path, dataset={"path": "rows"})
    names = [f"part-{number:02}.jsonl" for number in range(12)]
    for name in (*names, "far/down/test.jsonl"):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "rows" / name, lines([{"prompt": name, "completion": "x"}]))
    write(tmp_path / "rows" / "far" / "code.py", "pass")
    notes = check_dataset(file).notes
    shown = ", ".join(names[:10])
    assert f"rows: train: 12 files: {shown} … and 2 more" in notes
    assert "rows: test: 1 file: far/down/test.jsonl" in notes
    assert "rows: not read: far/code.py" in notes


def test_a_duplicate_is_split_off_with_its_twin_and_preparing_draws_the_same_rows(tmp_path):
    file = an_expert(tmp_path)
    write(tmp_path / "train.jsonl", lines(ROWS + ROWS))
    splits = by_name(check_dataset(file))
    assert splits["validation"].split_off
    train, held_out = splits["train"].duplicates.count, splits["validation"].duplicates.count
    assert splits["validation"].leaks[SAME].count == 0
    assert train + held_out == 120  # every row has one twin
    made = prepare(file)
    examples = splits["validation"].lengths["examples"]
    documents = made.validation.index.piece_document.tolist()
    assert len(set(documents)) == examples
    assert {row % 120 for row in documents} == {row for row in documents if row < 120}


def test_a_weight_above_one_is_neither_a_duplicate_nor_a_leak(tmp_path):
    tasks = {"a": {"train": "train.jsonl", "weight": 2.0}}
    splits = by_name(check_dataset(an_expert(tmp_path, dataset={"tasks": tasks})))
    assert splits["train"].duplicates.count == 0
    assert splits["validation"].leaks[SAME].count == 0
    whole = {"tasks": tasks, "validation_split": 0}
    assert list(by_name(check_dataset(an_expert(tmp_path, dataset=whole)))) == ["train"]


def test_preparing_warns_of_the_text_of_its_first_rows_and_again_from_the_cache(tmp_path):
    file = an_expert(tmp_path, dataset={"path": "train.jsonl", "validation_split": 0})
    marked = {"instruction": "a {{name}}", "output": "b [INST] c"}
    write(tmp_path / "train.jsonl", lines([*ROWS[:3], marked]))
    place = f"{tmp_path / 'train.jsonl'}:4"
    reported = [
        f"train.jsonl: template remnant [INST] in 1 of the first 4 examples: {place}",
        f"train.jsonl: placeholder {{{{name}}}} in 1 of the first 4 examples: {place}",
    ]
    assert [doubt.text for doubt in prepare(file).doubts] == reported
    assert [doubt.text for doubt in prepare(file).doubts] == reported
    write(tmp_path / "train.jsonl", lines(ROWS[:4]))
    assert prepare(file).doubts == ()


def test_a_system_column_that_messages_overrule_is_warned_of_when_preparing(tmp_path):
    file = an_expert(tmp_path, dataset={"path": "train.jsonl", "validation_split": 0})
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    write(tmp_path / "train.jsonl", lines([{"system": "Be brief.", "messages": said}] * 2))
    words = "'system' ignored, since the messages begin with their own system text"
    assert any(words in each.text for each in prepare(file).doubts)
    assert any(words in text for text in check_dataset(file).warnings())


@each("as_text", [True, False])
def test_unused_fields_of_messages_are_named_wherever_messages_are(as_text, tmp_path):
    said = [{"role": "user", "content": "a", "mood": "up"}, {"role": "assistant", "content": "b"}]
    row = {"messages": json.dumps(said)} if as_text else {"prompt": said[:1], "completion": "b"}
    file = an_expert(tmp_path, dataset={"path": "train.jsonl", "validation_split": 0})
    write(tmp_path / "train.jsonl", lines([row]))
    assert "train.jsonl: unused message fields: mood" in check_dataset(file).notes


def test_preferences_that_no_row_has_are_warned_of_when_checking_and_preparing(tmp_path):
    dataset = {"path": "train.jsonl", "validation_split": 0, "preference_rows": "preferred"}
    file = an_expert(tmp_path, dataset=dataset)
    write(tmp_path / "train.jsonl", lines(ROWS[:3]))
    (doubt,) = prepare(file).doubts
    assert doubt.path == "training.dataset.preference_rows"
    assert check_dataset(file).warnings() == [doubt.text]


def test_a_character_corpus_is_checked_too(tmp_path):
    write(tmp_path / "corpus.txt", "To be, or not to be.\n" * 20)
    data = {"name": "bard", "dataset": "corpus.txt", "model": {"block_size": 32, "n_layer": 1}}
    report = check_dataset(write(tmp_path / "config.json", json.dumps(data)))
    tokens = [split.lengths["tokens"] for split in report.splits]
    assert (report.template, tokens) == ("characters", [378, 42])
    assert report.problems == report.warnings() == []


def test_the_caches_are_where_the_variables_say(tmp_path):
    default = tmp_path / ".cache" / "huggingface"
    for environ, hub, datasets in (
        ({}, default / "hub", default / "datasets"),
        ({"HF_HOME": "", "XDG_CACHE_HOME": ""}, default / "hub", default / "datasets"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub", "/x/huggingface/datasets"),
        ({"HF_HOME": "/h"}, "/h/hub", "/h/datasets"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c", "/h/datasets"),
        ({"HF_DATASETS_CACHE": "/d", "HF_HOME": "/h"}, "/h/hub", "/d"),
    ):
        assert caches(environ, tmp_path) == (Path(hub), Path(datasets))


def found_in(tmp_path: Path, **options: Any) -> list[FoundDataset]:
    return find_datasets(environ={}, home=tmp_path / "home", **options)


def test_the_hub_cache_is_listed_with_names_and_sizes(tmp_path):
    cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    blob = write(cache / "datasets--org--set" / "blobs" / "abc", "x" * 100)
    snapshot = cache / "datasets--org--set" / "snapshots" / "1" / "train.jsonl"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    write(cache / "models--org--model" / "blobs" / "abc", "x")
    [found] = found_in(tmp_path)
    assert (found.kind, found.name, found.splits) == ("hub cache", "org/set", ("train",))
    assert (found.rows, found.size) == (None, 100)


def test_the_datasets_cache_is_listed_by_configuration_with_rows(tmp_path):
    cache = tmp_path / "home" / ".cache" / "huggingface" / "datasets"
    for config, rows in (("default", 7), ("german", 3)):
        info = {"splits": {"train": {"num_examples": rows}, "test": {"num_examples": 2}}}
        write(cache / "org___set" / config / "0.0.0" / "h" / "dataset_info.json", json.dumps(info))
    write(cache / "downloads" / "extracted" / "file", "x")
    found = found_in(tmp_path)
    assert [(entry.name, entry.rows, entry.splits) for entry in found] == [
        ("org/set", 9, ("train", "test")),
        ("org/set (german)", 5, ("train", "test")),
    ]
    assert {entry.kind for entry in found} == {"datasets cache"}


def test_what_experts_use_is_listed_with_their_prepared_tokens(tmp_path):
    prepare(an_expert(tmp_path / "a"))
    cache = tmp_path / "home" / ".cache" / "huggingface" / "hub"
    write(cache / "datasets--Org--my_set" / "blobs" / "abc", "x")
    an_expert(tmp_path / "a" / "b", dataset={"path": "org/my-set"})
    users, unread = read_users(tmp_path / "a")
    assert unread == []
    found = {entry.kind: entry for entry in found_in(tmp_path, users=users)}
    assert set(found) == {"hub cache", "file", "prepared"}
    assert found["hub cache"].used_by == ("counter",)
    assert found["prepared"].rows == 120
    assert found["prepared"].used_by == ("counter",)
    assert (found["file"].name, found["file"].splits) == ("train.jsonl", ("train",))
    assert found["file"].size == (tmp_path / "a" / "train.jsonl").stat().st_size


def two_tasks(tmp_path: Path) -> Path:
    tasks = {"one": {"train": "one/train.jsonl"}, "two": {"train": "two/train.jsonl"}}
    file = an_expert(tmp_path / "a", dataset={"tasks": tasks})
    write(tmp_path / "a" / "one" / "train.jsonl", lines(ROWS[:60]))
    write(tmp_path / "a" / "two" / "train.jsonl", lines(ROWS[60:]))
    return file


def test_consolidated_data_is_copied_and_the_printed_options_use_it(tmp_path):
    file = two_tasks(tmp_path)
    users, _ = read_users(tmp_path / "a")
    [gathered] = consolidate(users, tmp_path / "fast")
    target = tmp_path / "fast" / "counter"
    copied = target / "two" / "train.jsonl"
    assert copied.read_text(encoding="utf-8") == lines(ROWS[60:])
    assert [copy["done"] for copy in gathered.copies] == ["copied", "copied"]
    assert gathered.set_options == (
        f"--set training.dataset.tasks.one.train={target / 'one' / 'train.jsonl'} "
        f"--set training.dataset.tasks.two.train={copied}"
    )
    (tmp_path / "a" / "one" / "train.jsonl").unlink()
    (tmp_path / "a" / "two" / "train.jsonl").unlink()
    overrides = tuple(gathered.set_options.split(" ")[1::2])
    assert check_dataset(file, overrides=overrides).splits[0].rows == 120


def test_gathering_again_copies_nothing_and_a_different_file_stays(tmp_path):
    two_tasks(tmp_path)
    users, _ = read_users(tmp_path / "a")
    consolidate(users, tmp_path / "fast")
    [again] = consolidate(users, tmp_path / "fast")
    assert [copy["done"] for copy in again.copies] == ["there already", "there already"]
    target = tmp_path / "fast" / "counter" / "two" / "train.jsonl"
    write(target, "mine\n")
    (tmp_path / "fast" / "counter" / "one" / "train.jsonl").unlink()
    with pytest.raises(DataError) as reported:
        consolidate(users, tmp_path / "fast")
    assert "nothing was copied, no file is ever overwritten" in str(reported.value)
    assert f"{target}: exists and differs from {tmp_path / 'a'}" in str(reported.value)
    assert list(files_below(tmp_path / "fast")) == [str(target)]
    assert target.read_text(encoding="utf-8") == "mine\n"


def test_folders_are_copied_whole_and_what_is_not_copied_is_reported(tmp_path):
    rows = f"{tmp_path / 'rows'}::train"
    dataset = {"path": rows, "validation_path": "org/set", "test_path": "gone.jsonl"}
    an_expert(tmp_path / "a", dataset=dataset)
    bard = {"name": "bard", "dataset": "python-stdlib", "model": {"block_size": 32, "n_layer": 1}}
    write(tmp_path / "a" / "bard" / "manifest.json", json.dumps(bard))
    write(tmp_path / "rows" / "train" / "x.jsonl", lines(ROWS))
    users, _ = read_users(tmp_path / "a")
    gathered, corpus = consolidate(users, tmp_path / "my fast disk")
    assert corpus.left == ["training.dataset.path: python-stdlib is a built-in corpus, not a file"]
    assert (corpus.copies, corpus.set_options) == ([], "")
    folder = tmp_path / "my fast disk" / "counter" / "rows"
    assert (folder / "train" / "x.jsonl").is_file()
    assert gathered.set_options == f"--set 'training.dataset.path={folder}::train'"
    hub, gone = gathered.left
    assert "is in the hub's cache" in hub
    assert gone == "training.dataset.test_path: gone.jsonl is not there"


def test_manifests_are_found_at_any_depth_and_what_runs_and_tools_keep_is_not(tmp_path):
    wanted = [*("manifest.json", "a/manifest.yaml", "a/b/c/d/manifest.json", "z/e/config.yaml")]
    for name in wanted:
        write(tmp_path / name, "{}")
    for name in (
        *(".git/x/manifest.json", "a/.venv/manifest.json", "node_modules/p/manifest.json"),
        *("a/datasets_optimized/manifest.json", "hub/models--org--m/manifest.json"),
        *("env/pyvenv.cfg", "env/share/manifest.json"),
        *("a/runs/x/plan.json", "a/runs/x/events.jsonl", "a/runs/x/manifest.json"),
    ):
        write(tmp_path / name, "{}")
    (tmp_path / "a" / "b" / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in manifests_below(tmp_path)]
    assert found == wanted
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("one", "two"):  # found once
        (linked / name).symlink_to(tmp_path / "z" / "e")
    assert manifests_below(linked) == [linked / "one" / "config.yaml"]


# --- rows as the model sees them -----------------------------------------------------------------


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
    with pytest.raises(ExpertError, match=r"--row 77: there is no such row\n.*--row test.jsonl:9"):
        shown(file, RowsToShow(lines=("77", "test.jsonl:9")))
    with pytest.raises(ExpertError, match="--row seven: not a row"):
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
