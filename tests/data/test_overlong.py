"""Rows that are too long: split or cut as the plan settles it; those whose answers are cut off are
left out with a warning, or refused if none is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from expert.data.records import DataError
from expert.jobs.datasets.check import check_dataset
from expert.run.open import plan, prepare
from tests.each import each
from tests.run.test_preparing import ROWS, an_expert, lines, texts_of

WORDS = " ".join(f"word{n}" for n in range(400))
LONG = [{"instruction": f"Read this. {'word ' * 400}", "output": f"answer {n}"} for n in range(30)]
TOLD = "train: 30 of 60 rows (50%) are left out: the answer starts after max_seq_length"
SEED = "another training.config.seed or a larger validation_split draws other rows"


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


@each("rows", [None, [{"text": WORDS}] * 2])
def test_long_texts_are_trained_on_completely(tmp_path, rows):
    manifest = an_expert_of(tmp_path, rows)
    made = prepare(manifest)
    over, tokens = made.train.index.overlong, int(made.train.open().lengths.sum())
    assert (over.split, over.cut, over.tokens_lost) == (2, 0, 0)
    # A last part of one token is left out: nothing predicts it, so it is not trained on.
    assert tokens - 2 <= made.train.index.statistics().tokens <= tokens
    checked = check_dataset(manifest).splits[0]
    assert checked.lengths["tokens_lost"] == 0
    assert not any("longer than" in line for line in checked.warnings())


@each(
    ("rows", "config", "settled", "because"),
    [
        (None, {}, "split", "plain text: every part is trained on"),
        (ROWS[:3], {}, "cut", "rows with answers"),
        (ROWS[:3], {"overlong": "split"}, "split", "set in the manifest"),
        ([{"text": WORDS}], {"tokenize": "late", "packing": False}, "cut", "tokenize: late"),
    ],
)
def test_the_plan_settles_it_with_a_reason(tmp_path, rows, config, settled, because):
    made = plan(an_expert_of(tmp_path, rows, **config))
    (decision,) = [each for each in made.decisions if each.path == "data.overlong"]
    assert (made.data.overlong, decision.value) == (settled, settled)
    assert because in decision.because


# --- rows without trained tokens ------------------------------------------------------------------


@each("packing", [True, False])
def test_rows_whose_answer_is_cut_off_are_left_out_with_a_warning(tmp_path, packing):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG, packing=packing)
    for _ in range(2):  # and again where the index lies in the cache
        made = prepare(manifest)
        index = made.train.index
        assert (index.examples, index.overlong.cut, index.overlong.unlearnt) == (30, 30, 30)
        assert not any("Read this" in text for text in texts_of(made, "train"))
        (doubt,) = made.doubts
        assert doubt.text.startswith(TOLD)
        assert "overlong: split" in doubt.text
        assert "the longest row has" in doubt.text


def test_rows_with_a_truncated_answer_stay_and_many_give_a_warning(tmp_path):
    partly = [{"instruction": "a", "output": "word " * 400}] * 3
    few = prepare(an_expert_of(tmp_path / "few", ROWS[:30] + partly[:1]))
    assert (few.train.index.overlong.cut, few.doubts) == (1, ())
    made = prepare(an_expert_of(tmp_path / "many", ROWS[:30] + partly))
    assert (made.train.index.examples, made.train.index.overlong.unlearnt) == (33, 0)
    (doubt,) = made.doubts
    assert doubt.text.startswith("train: 3 of 33 rows (9%) are cut at ")
    assert "a larger training.config.max_seq_length" in doubt.text


def test_rows_that_are_learnt_whole_split_or_laid_end_to_end_leave_no_answer_out(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)
    for setting in ("train_on_prompt=true", "packing=concat", "overlong=split"):
        made = prepare(manifest, overrides=(setting,))
        assert made.train.index.overlong.unlearnt == 0
    # Of split rows the parts before the answer are left out.
    assert made.train.index.examples == 60
    assert sum("answer" in text for text in texts_of(made, "train")) == 30


@each("split", ["train", "validation", "test"])
def test_a_split_of_which_no_answer_is_left_is_refused(tmp_path, split):
    names = {name: f"{name}.jsonl" for name in ("train", "validation", "test")}
    dataset = {"path": names["train"], "validation_path": names["validation"]}
    manifest = an_expert(tmp_path, dataset={**dataset, "test_path": names["test"]})
    for name, file in names.items():
        rows = LONG if name == split else ROWS[:30]
        (tmp_path / file).write_text(lines(rows), encoding="utf-8")
    words = (
        f"{split}: 30 of 30 rows \\(100%\\) are left out: .* \\(a larger training.config.max_seq"
    )
    for _ in range(2):
        with pytest.raises(DataError, match=words) as refused:
            prepare(manifest)
        assert SEED not in str(refused.value), "they have a file of their own"
    problems = check_dataset(manifest).problems
    assert [text.partition(" are")[0] for text in problems] == [f"{split}: 30 of 30 rows (100%)"]


def test_the_plan_warns_before_and_after_preparing_and_packing(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)

    def told() -> str:
        (remark,) = [each for each in plan(manifest).remarks if "left out" in each.text]
        assert remark.path == "training.config.max_seq_length"
        return remark.text

    assert told().startswith("train: 30 of 60 sampled rows (50%) are left out")
    prepare(manifest, overrides=("max_seq_length=2048",))  # nothing is packed for another one
    assert told().startswith(TOLD)
    assert "the longest row has" in told()
    prepare(manifest)
    assert told().startswith(TOLD)


def test_dataset_check_reports_overlong_rows_and_lost_tokens(tmp_path):
    manifest = an_expert_of(tmp_path, ROWS[:30] + LONG)
    report = check_dataset(manifest)
    lengths = report.splits[0].lengths
    assert (lengths["unlearnt"], lengths["left"]) == (30, 30)
    assert lengths["tokens_lost"] == prepare(manifest).train.index.overlong.tokens_lost > 0
    assert any(line.startswith(TOLD) for line in report.warnings())
    assert any("30 examples longer than max_seq_length: " in line for line in report.warnings())
    whole = check_dataset(manifest, overrides=("overlong=split",))
    assert (whole.splits[0].lengths["tokens_lost"], whole.splits[0].not_learnt) == (0, "")
