"""The job behind `expert plan` and `expert.plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import expert
from expert.data.splits import data_order
from expert.planning.run_plan import RunPlan
from tests.jobs.runs import write_expert
from tests.run.test_preparing import ROWS, an_expert, lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "expert-json" / "manifest.json"


def test_a_path_and_a_manifest_that_was_read_give_the_same_plan():
    read = expert.read_manifest(EXAMPLE)
    assert expert.plan(EXAMPLE, gpu="rtx-4090") == expert.plan(read, gpu="rtx-4090")
    assert expert.plan(EXAMPLE, gpu="rtx-4090", overrides=("epochs=9",)).length.epochs == 9
    with pytest.raises(ValueError, match="overrides belong to read_manifest"):
        expert.plan(read, overrides=("epochs=9",))


def test_the_package_shows_what_it_has_and_nothing_else():
    for name in expert.__all__:
        assert getattr(expert, name)
    with pytest.raises(AttributeError, match="module 'expert' has no attribute 'nonsense'"):
        expert.nonsense  # noqa: B018
    assert dir(expert) == sorted(expert.__all__)
    assert {"sample", "export", "train", "prepare"} <= set(expert.__all__)


def test_what_packing_replaces_is_honoured_without_it_and_reported_with_it():
    """As docs/REQUIREMENTS.md says of these keys."""
    keys = ("dataloader_num_workers=2", "use_sdpa=true", "group_by_length=true")
    found = {}
    for packing in ("true", "false"):
        read = expert.read_manifest(EXAMPLE, overrides=(*keys, f"packing={packing}"))
        plan = expert.plan(read, gpu="rtx-4090")
        unused = [remark.text for remark in plan.remarks if remark.kind == "superseded"]
        unused += [str(notice) for notice in read.notices if notice.kind == "not used here"]
        done = (plan.loader.workers, plan.kernels.attention, plan.data.group_by_length)
        found[packing] = done, [key for key in keys if key.partition("=")[0] in " ".join(unused)]
    assert found["false"] == ((2, "sdpa", True), [])
    assert found["true"] == ((0, "flash", False), [*keys])


# --- rows that can be counted before a run -------------------------------------------------------


def _expert(folder: Path, rows: int, *, growing: bool = False, **dataset: object) -> Path:
    """`growing`: the longest rows come last."""
    made = [
        {"instruction": f"{'Add. ' * (n % 7)}{n} and 3?", "response": str(n + 3)}
        for n in range(rows)
    ]
    if growing:
        made.sort(key=lambda row: len(row["instruction"]))
    return write_expert(folder, "tiny", {"max_seq_length": 128}, rows=made, dataset=dataset)


def _reason(plan: RunPlan, path: str) -> str:
    return next(decision.because for decision in plan.decisions if decision.path == path)


@pytest.mark.parametrize(
    ("rows", "growing", "because", "off"),
    [
        # Samples of real data were off by 3.3 % at most; these rows are more like each other.
        (5000, False, "counted on a sample of 300 rows", 0.03),
        (2000, True, None, 0.03),
        (200, False, "counted", 0.0),
    ],
)
def test_tokens_are_counted_on_a_sample_and_few_rows_all(tmp_path, rows, growing, because, off):
    path = _expert(tmp_path, rows, growing=growing, validation_split=0)
    plan = expert.plan(path)
    assert because in (None, _reason(plan, "length.tokens_per_epoch"))
    exact = expert.prepare(path).train.index.statistics().tokens
    assert plan.length.tokens_per_epoch == pytest.approx(exact, rel=off, abs=0)


def test_max_samples_is_planned_and_prepared_alike(tmp_path):
    path = _expert(tmp_path, 2000, growing=True, validation_split=0)
    whole = expert.prepare(path)
    limited = ("max_samples=250",)
    plan = expert.plan(path, overrides=limited)
    assert _reason(plan, "length.tokens_per_epoch") == "counted"
    made = expert.prepare(path, overrides=limited)
    assert (whole.train.index.examples, made.train.index.examples) == (2000, 250)
    assert plan.length.tokens_per_epoch == made.train.index.statistics().tokens


def test_a_plan_writes_nothing_but_the_hash_of_the_data(tmp_path):
    path = _expert(tmp_path, 50)
    expert.plan(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["manifest.json", "train.jsonl"]


def test_prepared_tokens_give_the_plan_the_numbers_of_the_run(tmp_path):
    path = _expert(tmp_path, 500)
    made = expert.prepare(path).train
    plan = expert.plan(path)
    order = data_order(plan, made)
    assert plan.length.tokens_per_epoch == made.index.statistics().tokens
    assert plan.length.steps_per_epoch == order.steps_per_epoch
    assert plan.length.total_steps == order.steps_per_epoch * plan.length.epochs
    assert plan.length.rows == made.index.examples == 450
    assert _reason(plan, "length.steps_per_epoch").startswith("prepared: 450 rows")
    other = expert.plan(path, overrides=("max_seq_length=256",))  # packed for other sequences
    assert _reason(other, "length.tokens_per_epoch") == "prepared"
    cache = made.index_file.parent
    before = sorted(cache.iterdir())
    assert _reason(expert.plan(path), "length.tokens_per_epoch") == "prepared"
    assert sorted(cache.iterdir()) == before
    _expert(tmp_path, 300)  # rows that changed are sampled again
    changed = expert.plan(path)
    assert _reason(changed, "length.tokens_per_epoch") == "counted"
    assert changed.length.rows == 270


def test_a_model_that_is_not_here_or_rows_that_cannot_be_read_leave_the_bytes_to_go_by(tmp_path):
    path = _expert(tmp_path, 20)
    plan = expert.plan(path, gpu="rtx-4090", overrides=("base_models[0].name=some/model",))
    assert _reason(plan, "length.tokens_per_epoch").startswith("from the file size: 3.8 bytes")
    (tmp_path / "train.jsonl").write_bytes(b"{broken\n" * 20)
    assert _reason(expert.plan(path), "length.tokens_per_epoch").startswith("from the file size")


@pytest.mark.parametrize("how", [(), ("streaming=true", "max_steps=2"), ("name=owner/elsewhere",)])
def test_a_plan_warns_of_bad_rows_and_of_what_preparing_would_warn_of(tmp_path, how):
    """Also where rows are streamed, and where the tokenizer is not on this machine."""
    path = _expert(tmp_path, 20)
    rows = tmp_path / "train.jsonl"
    odd = {"instruction": "Greet {{name}}.", "response": "Hi.", "split": "test"}
    bad = json.dumps({"instruction": "a", "response": None})
    rows.write_text(f"{json.dumps(odd)}\n{bad}\nbroken\n{rows.read_text(encoding='utf-8')}")
    told = "\n".join(expert.plan(path, overrides=how).warnings)
    assert "2 of the first 23 rows cannot be used, and training.dataset.max_bad_rows" in told
    assert f" tolerates 0: {rows}:2: column 'response' is null" in told
    assert "columns that are not used: split (filled in 1 of 22 rows)" in told
    assert f"placeholder {{{{name}}}} in 1 of the first 21 examples: {rows}:1" in told
    tolerant = expert.plan(path, overrides=(*how, "max_bad_rows=2"))
    assert "rows cannot be used" not in "\n".join(tolerant.warnings)


def test_the_only_row_is_trained_on_and_draws_no_warning(tmp_path):
    plan = expert.plan(_expert(tmp_path, 1))
    assert plan.length.rows == 1
    assert [remark.text for remark in plan.remarks if remark.path == "length.rows"] == []
    assert expert.prepare(tmp_path / "manifest.json").train.index.examples == 1


# --- max_steps that the epochs do not come to -----------------------------------------------------


@pytest.mark.parametrize(("epochs", "words"), [(1, "1 epoch ends"), (2, "2 epochs end")])
def test_a_plan_says_that_the_epochs_end_before_max_steps(tmp_path, epochs, words):
    manifest = _expert(tmp_path, 80)

    def planned(steps: int) -> tuple[RunPlan, list[str]]:
        plan = expert.plan(manifest, overrides=(f"epochs={epochs}", f"max_steps={steps}"))
        return plan, [each.text for each in plan.remarks if each.path == "length.max_steps"]

    for prepared in (False, True):
        if prepared:
            expert.prepare(manifest)
        plan, told = planned(600)
        total = plan.length.total_steps
        [text] = told
        assert text.startswith(f"{words} after {total} steps, before the 600 of max_steps  (raise")
        assert total is not None
        assert planned(total)[1] == planned(total - 1)[1] == []


@pytest.mark.parametrize("name", ["rows.json", "rows.parquet", "rows.jsonl.gz"])
def test_rows_of_files_without_lines_are_counted_and_have_a_time(tmp_path, name):
    import gzip

    import pyarrow as pa
    import pyarrow.parquet

    file = an_expert(tmp_path, dataset={"path": name}, model="tiny")
    place = tmp_path / name
    if name.endswith("json"):
        place.write_text(json.dumps(ROWS), encoding="utf-8")
    elif name.endswith("gz"):
        place.write_bytes(gzip.compress(lines(ROWS).encode()))
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), place)
    made = expert.plan(file)
    by_lines = expert.plan(an_expert(tmp_path, model="tiny"))
    assert made.length.rows == by_lines.length.rows == 108
    assert made.length.tokens_per_epoch == by_lines.length.tokens_per_epoch
    other = an_expert(tmp_path, dataset={"path": name}, model="Qwen/Qwen3-0.6B")
    elsewhere = expert.plan(other, gpu="h200")
    assert elsewhere.length.rows == 108
    assert elsewhere.length.expected_seconds is not None


def test_more_rows_than_are_read_are_told_by_their_bytes_or_their_footer(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet

    monkeypatch.setattr("expert.data.count.MAX_COUNTED_ROWS", 50)
    for rows in (ROWS, ["no object", *ROWS]):
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        made = expert.plan(an_expert(tmp_path, dataset={"path": "rows.json"}))
        assert made.length.rows == pytest.approx(108, rel=0.1)
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    exact = expert.plan(an_expert(tmp_path, dataset={"path": "rows.parquet"}))
    assert exact.length.rows == 108
