"""What becomes of rows that are too long, where nobody says: texts are split, answers are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expert.jobs.datasets.check import check_dataset
from expert.manifest.reader import read_manifest
from expert.run.open import plan, prepare
from tests.each import each
from tests.run.test_preparing import ROWS, an_expert, lines
from tests.wording import wording

WORDS = " ".join(f"word{n}" for n in range(400))


def an_expert_of(folder: Path, rows: list[dict[str, Any]] | None, **config: Any) -> Path:
    """Rows as JSON lines, or a folder with two text files."""
    path = "train.jsonl" if rows else "texts"
    dataset = {"path": path, "validation_split": 0}
    manifest = an_expert(folder, dataset=dataset, **config)
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
