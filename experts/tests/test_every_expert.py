"""What is promised of every expert that comes with the repository."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from data_making.files import CASES, cases_text, main, make_cases
from data_making.judged import judge
from data_making.loading import generator_of
from data_making.nearest import Nearest
from data_making.rows import SPLITS, Made, NoMoreRows, make_rows, split_of
from nearest_row import DOMAINS, baseline

from expert.judging.oracles.oracle import missing_packages
from expert.manifest.reader import read_manifest

EXPERTS = Path(__file__).parents[1]
MODELS = ("tiny", "smollm2-135m", "Qwen/Qwen3-0.6B")
PERFORMANCE = (
    "bf16 use_tf32 use_sdpa pretokenized_cache dataloader_num_workers dataloader_prefetch_factor "
    "dataloader_persistent_workers dataloader_pin_memory packing optim gradient_checkpointing "
    "torch_compile"
).split()

every = pytest.mark.parametrize("name", sorted(DOMAINS))


def draw_of(name: str):
    return generator_of(EXPERTS / name).draw


def needs_oracle(name: str) -> None:
    missing = missing_packages(DOMAINS[name])
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[validate]'")


def test_the_list_of_experts_is_that_of_the_folders():
    found = {path.parent.name for path in EXPERTS.glob("*/make_data.py")}
    assert found == set(DOMAINS)
    assert len(found) == 4


@every
def test_the_same_seed_makes_the_same_rows_and_another_seed_others(name):
    draw = draw_of(name)
    first, again, other = (make_rows(draw, 20, "train", seed) for seed in (7, 7, 8))
    assert first == again
    assert not {row.prompt for row in first} & {row.prompt for row in other}


@every
def test_nothing_of_the_test_rows_is_in_the_training_rows_of_any_seed(name):
    draw = draw_of(name)
    made = {split: make_rows(draw, 150, split, 7) for split in SPLITS}
    made["train"] += make_rows(draw, 150, "train", 2024)  # the seed of the test cases
    made["test"] += make_cases(draw)
    for held_out in ("validation", "test"):
        for part in ("prompt", "output", "skeleton"):
            learnt = {getattr(row, part) for row in made["train"]}
            assert not learnt & {getattr(row, part) for row in made[held_out]}, part
    assert not {r.skeleton for r in made["validation"]} & {r.skeleton for r in made["test"]}


@every
def test_the_committed_cases_are_those_the_generator_makes(name):
    text = (EXPERTS / name / "test_cases.json").read_text(encoding="utf-8")
    assert text == cases_text(DOMAINS[name], make_cases(draw_of(name)))
    found = json.loads(text)
    assert (found["version"], found["domain"], len(found["cases"])) == (1, DOMAINS[name], CASES)
    # Every task of the generator occurs.
    tasks = {row.task for row in make_rows(draw_of(name), 100, "train", 3)}
    assert {case["task"] for case in found["cases"]} == tasks


@every
def test_every_expected_answer_passes_and_a_wrong_one_fails(name):
    needs_oracle(name)
    cases = make_cases(draw_of(name))[:15]
    for case in cases:
        assert judge(DOMAINS[name], case, case.output).passed is True, case
    for case, other in pairwise(cases):
        assert judge(DOMAINS[name], case, other.output).passed is not True, (case, other)


@every
def test_the_nearest_training_row_rarely_has_the_answer(name):
    needs_oracle(name)
    # 4000 rows and 200 questions gave 0.0 %, 0.5 %, 0.5 % and 0.0 %; half is the promise.
    assert baseline(name, rows=300, test=20) < 0.5


def test_the_baseline_answers_with_the_row_that_is_most_alike():
    rows = [
        Made(task="t", instruction=text, input="", output=answer, skeleton=answer)
        for text, answer in (("count the red cars", "1"), ("name the river", "2"))
    ]
    assert Nearest(rows).answer("count the blue cars") == "1"
    assert Nearest(rows).answer("name a river") == "2"


def test_of_all_skeletons_a_tenth_is_for_the_test_and_a_tenth_for_validation():
    found = [split_of(f"skeleton {number}") for number in range(2000)]
    for split in ("validation", "test"):
        # 2000 draws of one in ten: 5 standard deviations are 67.
        assert abs(found.count(split) - 200) < 67


def test_asking_for_more_rows_than_there_are_is_told():
    one = Made(task="t", instruction="a", input="b", output="c", skeleton="skeleton 1")
    with pytest.raises(NoMoreRows, match="after 1 rows no new one was found"):
        make_rows(lambda source, wanted: one, 2, split_of(one.skeleton), 1)


@every
def test_make_data_writes_rows_that_training_reads(name, tmp_path, capsys):
    from expert.data.examples.column_survey import survey_rows
    from expert.data.examples.columns import detect_columns
    from expert.data.examples.formats import example_of
    from expert.data.records import Example, Row

    main(draw_of(name), DOMAINS[name], tmp_path, ["--rows", "12", "--held-out", "5"])
    assert "12 rows" in capsys.readouterr().out
    sizes = {}
    for split in SPLITS:
        text = (tmp_path / "datasets" / f"{split}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        sizes[split] = len(rows)
        for row in rows:
            read = Row(values=row, file="f", line=1)
            found = example_of(read, detect_columns(survey_rows([read])))
            assert isinstance(found, Example)
            said = "".join(turn.text for turn in found.turns)
            assert "setup" not in said  # what judges a row is not shown to the model
            assert "equals" not in said
    assert sizes == {"train": 12, "validation": 5, "test": 5}


@every
def test_the_manifest_reads_strictly_names_three_models_and_the_performance_keys(name):
    path = EXPERTS / name / "manifest.json"
    read = read_manifest(path, strict=True)
    assert not [notice for notice in read.notices if notice.kind == "warning"]
    assert tuple(model.name for model in read.manifest.base_models) == MODELS
    written = json.loads(path.read_text(encoding="utf-8"))["training"]["config"]
    assert set(PERFORMANCE) <= written.keys()
    assert read.manifest.name == name


@every
@pytest.mark.parametrize("model", MODELS)
def test_the_manifest_plans_for_every_model(name, model):
    from expert.run.open import plan

    read = read_manifest(EXPERTS / name / "manifest.json")
    made = plan(read, gpu="rtx-4090", model=model)
    assert made.model.name == model
    assert made.fits
