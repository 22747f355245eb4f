"""Rows that are too long: split or cut as the plan settles it; those whose answers are cut off are
left out and told, or refused where none is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.data.records import DataError
from expert.jobs.datasets.check import check_dataset
from expert.jobs.diagnose.data import check_data
from expert.manifest.reader import read_manifest
from expert.run.open import open_run, plan, prepare
from tests.each import each
from tests.run.test_preparing import ROWS, an_expert, lines, texts_of
from tests.wording import wording

WORDS = " ".join(f"word{n}" for n in range(400))
LONG = [{"instruction": f"Read this. {'word ' * 400}", "output": f"answer {n}"} for n in range(30)]
TOLD = wording("train-rows-left-out")


def an_expert_of(folder: Path, rows: list[dict[str, Any]] | None, **config: Any) -> Path:
    """Rows as JSON lines, or a folder with two text files."""
    path = "train.jsonl" if rows else "texts"
    manifest = an_expert(folder, dataset={"path": path, "validation_split": 0}, **config)
    if rows:
        (folder / path).write_text(lines(rows), encoding="utf-8")
    else:
        (folder / path).mkdir()
        for name in ("a.txt", "b.txt"):
            (folder / path / name).write_text(WORDS, encoding="utf-8")
    return manifest


@pytest.mark.parametrize("rows", [None, [{"text": WORDS}] * 2])
def test_long_texts_are_learnt_to_their_end(tmp_path, rows):
    manifest = an_expert_of(tmp_path, rows)
    made = prepare(manifest)
    over, tokens = made.train.index.overlong, int(made.train.open().lengths.sum())
    assert (over.split, over.cut, over.tokens_lost) == (2, 0, 0)
    # A last part of one token is left out: nothing comes before it, so nothing is learnt of it.
    assert tokens - 2 <= made.train.index.statistics().tokens <= tokens
    checked = check_dataset(manifest).splits[0]
    assert checked.lengths["tokens_lost"] == 0
    assert not any("longer than" in line for line in checked.warnings())


@each(
    ("rows", "config", "settled", "because"),
    [
        (None, {}, "split", wording("plain-text-every-part")),
        ([{"text": WORDS}], {}, "split", "plain text"),
        ([{"text": "<|user|>\na\n<|end|><|assistant|>\nb\n<|end|>"}], {}, "cut", "with answers"),
        (ROWS[:3], {}, "cut", wording("rows-with-answers")),
        (None, {"overlong": "cut"}, "cut", wording("set-in-the-manifest")),
        (ROWS[:3], {"overlong": "split"}, "split", wording("set-in-the-manifest")),
        ([{"text": WORDS}], {"tokenize": "late", "packing": False}, "cut", "tokenize: late"),
    ],
)
def test_the_plan_settles_it_with_a_reason(tmp_path, rows, config, settled, because):
    made = plan(an_expert_of(tmp_path, rows, **config))
    (decision,) = [each for each in made.decisions if each.path == "data.overlong"]
    assert (made.data.overlong, decision.value) == (settled, settled)
    assert because in decision.because


def test_rows_that_are_not_here_yet_are_cut_for_now(tmp_path):
    manifest = an_expert(tmp_path, dataset={"path": "someone/rows", "type": "huggingface"})
    decisions = {each.path: each for each in plan(manifest).decisions}
    assert decisions["data.overlong"].value == "cut"
    assert wording("when-they-are-here") in decisions["data.overlong"].because


def test_a_manifest_that_names_what_happens_is_read_as_before(tmp_path):
    for asked in ("cut", "split", "drop"):
        manifest = an_expert(tmp_path, overlong=asked)
        assert read_manifest(manifest).manifest.training.config.overlong == asked
        assert json.loads(plan(manifest).model_dump_json())["data"]["overlong"] == asked


# --- rows of which nothing would be learnt --------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_rows_whose_answer_is_cut_off_are_left_out_and_told(tmp_path, packing):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG, packing=packing)
    for _ in range(2):  # and again where the index lies in the cache
        made = prepare(manifest)
        index = made.train.index
        assert (index.examples, index.overlong.cut, index.overlong.unlearnt) == (30, 30, 30)
        assert not any("Read this" in text for text in texts_of(made, "train"))
        (doubt,) = made.doubts
        assert doubt.text.startswith(TOLD)
        assert "overlong: split" in doubt.text
        assert wording("the-longest-row-has") in doubt.text


def test_a_row_that_keeps_a_part_of_its_answer_stays(tmp_path):
    partly = [{"instruction": "a", "output": "word " * 400}] * 3
    made = prepare(an_expert_of(tmp_path, ROWS[:30] + partly))
    assert (made.train.index.examples, made.train.index.overlong.unlearnt) == (33, 0)
    (doubt,) = made.doubts
    assert doubt.text.startswith(wording("train-rows-lose-end"))
    assert "a larger training.config.max_seq_length" in doubt.text


def test_a_few_rows_that_lose_their_end_are_not_told_of(tmp_path):
    partly = [{"instruction": "a", "output": "word " * 400}]
    made = prepare(an_expert_of(tmp_path, ROWS[:30] + partly))
    assert (made.train.index.overlong.cut, made.doubts) == (1, ())


def test_rows_that_are_learnt_whole_lose_nothing_but_their_end(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG, train_on_prompt=True)
    assert prepare(manifest).train.index.overlong.unlearnt == 0


def test_split_rows_leave_out_the_parts_before_the_answer(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG, overlong="split")
    made = prepare(manifest)
    assert (made.train.index.examples, made.train.index.overlong.unlearnt) == (60, 0)
    assert sum("answer" in text for text in texts_of(made, "train")) == 30


def test_rows_laid_end_to_end_lose_nothing(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG, packing="concat")
    assert prepare(manifest).train.index.overlong.unlearnt == 0


def test_the_places_of_a_soft_prompt_count(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30])
    lengths = prepare(manifest).train.open().lengths
    room = int(lengths.max()) + 8
    manifest.write_text(
        manifest.read_text().replace(
            '"training"', '"soft_prompts": [{"name": "lead", "tokens": 60}], "training"'
        )
    )
    fits = prepare(manifest, overrides=(f"max_seq_length={room + 60}",))
    assert fits.train.index.overlong.unlearnt == 0
    with pytest.raises(DataError, match=wording("train-rows-left")):
        prepare(manifest, overrides=("max_seq_length=66",))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_split_of_which_no_answer_is_left_is_refused(tmp_path, split):
    names = {name: f"{name}.jsonl" for name in ("train", "validation", "test")}
    dataset = {"path": names["train"], "validation_path": names["validation"]}
    manifest = an_expert(tmp_path, dataset={**dataset, "test_path": names["test"]})
    for name, file in names.items():
        rows = LONG if name == split else ROWS[:30]
        (tmp_path / file).write_text(lines(rows), encoding="utf-8")
    words = wording("rows-left-out-larger", split=split)
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            prepare(manifest)
    problems = check_dataset(manifest).problems
    assert [text.partition(" are")[0] for text in problems] == [f"{split}: 30 of 30 rows (100%)"]


def test_a_plan_tells_before_and_after_preparing(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)

    def told() -> list[str]:
        return [each.text for each in plan(manifest).remarks if "left out" in each.text]

    (before,) = told()
    assert before.startswith(wording("train-rows-tried-left"))
    prepare(manifest)
    (after,) = told()
    assert after.startswith(TOLD)


def test_a_plan_tells_of_prepared_rows_that_another_length_would_leave_out(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)
    prepare(manifest, overrides=("max_seq_length=2048",))  # nothing is packed for another one
    told = [each for each in plan(manifest).remarks if "left out" in each.text]
    assert [each.path for each in told] == ["training.config.max_seq_length"]
    assert told[0].text.startswith(TOLD)
    assert wording("the-longest-row-has") in told[0].text


@pytest.mark.parametrize("overlong", ["cut", "drop"])
def test_a_plan_tells_what_preparing_has_refused(tmp_path, overlong):
    manifest = an_expert_of(tmp_path, LONG, overlong=overlong)
    with pytest.raises(DataError) as refused:
        prepare(manifest)
    assert str(refused.value) in [each.text for each in plan(manifest).remarks]


SEED = wording("another-larger-draws-other")


@pytest.mark.parametrize(
    ("long_rows", "split", "other_rows_would_do"),
    [(range(60), "train", False), (range(40), "validation", False), (None, "validation", True)],
)
def test_other_rows_are_advised_only_where_those_that_are_learnt_have_answers(
    tmp_path, long_rows, split, other_rows_would_do
):
    dataset = {"path": "train.jsonl", "validation_split": 0.03}
    manifest = an_expert(tmp_path, dataset=dataset)
    rows = [{"instruction": f"Say {n}.", "output": f"number {n}"} for n in range(60)]
    (tmp_path / "train.jsonl").write_text(lines(rows), encoding="utf-8")
    made = prepare(manifest).validation
    assert made is not None
    held_out = {int(number) for number in made.index.piece_document}
    for number in {*(long_rows or ()), *held_out}:
        rows[number] = {**rows[number], "instruction": f"Say {number}. {'word ' * 400}"}
    (tmp_path / "train.jsonl").write_text(lines(rows), encoding="utf-8")
    with pytest.raises(
        DataError, match=rf"^{split}: .*larger training\.config\.max_seq"
    ) as refused:
        prepare(manifest)
    assert (SEED in str(refused.value)) == other_rows_would_do


def test_other_rows_are_not_advised_where_they_have_a_file_of_their_own(tmp_path):
    manifest = an_expert(tmp_path, dataset={"path": "a.jsonl", "validation_path": "b.jsonl"})
    for name, rows in (("a", ROWS[:30]), ("b", LONG)):
        (tmp_path / f"{name}.jsonl").write_text(lines(rows), encoding="utf-8")
    with pytest.raises(DataError, match=r"^validation: ") as refused:
        prepare(manifest)
    assert SEED not in str(refused.value)


def test_a_check_of_the_data_tells_them_and_the_tokens_that_are_lost(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)
    report = check_dataset(manifest)
    lengths = report.splits[0].lengths
    assert (lengths["unlearnt"], lengths["left"]) == (30, 30)
    assert lengths["tokens_lost"] == prepare(manifest).train.index.overlong.tokens_lost > 0
    assert any(line.startswith(TOLD) for line in report.warnings())
    assert any("30 examples longer than max_seq_length: " in line for line in report.warnings())
    whole = check_dataset(manifest, overrides=("overlong=split",))
    assert (whole.splits[0].lengths["tokens_lost"], whole.splits[0].not_learnt) == (0, "")


def test_a_diagnosis_before_a_run_tells_them_prepared_or_not(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)
    for of in ("the first 60 rows", "60 rows"):
        facts = check_data(open_run(manifest, data="counted"))
        found = {each.name: each for each in facts.findings}["rows-not-learnt"]
        assert found.severity == "warning"
        assert found.evidence.startswith(wording("train-left-out", of=of))
        assert found.fix.startswith("a larger training.config.max_seq_length")
        prepare(manifest)
