"""Rows that an earlier version packed or grouped: indexes are made again, runs keep their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from expert.core.rundir import RunFolder
from expert.data.pack import pack
from expert.data.pack.pack_index import IndexName
from expert.jobs.validate.held_out import Run, TrainedRowsUnknown, restore_split
from expert.planning.run_plan import RunPlan
from expert.run.open import prepare
from expert.run.session import identity
from expert.run.stored.trained_rows import trained_rows
from expert.training.checkpoint import CheckpointError
from tests.each import each
from tests.jobs.runs import copied, events_of, losses_of, plan_of, run, write_expert

SETTINGS = {"epochs": 1, "save_steps": 1, "save_total_limit": None, "batch_size": 4}
NAMED = IndexName(
    split="train",
    tokens=("a",),
    documents="b",
    packing="best-fit",
    length=376,
    overlong="cut",
    soft_tokens=0,
    seed=1,
    most_rows=None,
    leaves_out=False,
)


@contextmanager
def an_earlier_version() -> Iterator[None]:
    """Longest first, without a mark in the name; whole steps grouped by length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_fit", pack._fit_longest_first)
        patch.setattr(IndexName, "file", property(lambda self: self._file(None)))
        patch.setattr(identity, "GROUPED", True)
        order_of = identity._order_of
        patch.setattr(
            identity,
            "_order_of",
            lambda *args: {k: v for k, v in order_of(*args).items() if k != "fitted"},
        )
        yield


@pytest.fixture(scope="module")
def before(tmp_path_factory, base) -> tuple[Path, Path]:
    """A run of an earlier version, to its end."""
    manifest = write_expert(tmp_path_factory.mktemp("before"), base, SETTINGS)
    with an_earlier_version():
        return manifest, run(manifest).folder


def index_of(folder: Path) -> list[str]:
    return [event["index"] for event in events_of(folder, "data") if event["split"] == "train"]


def test_an_index_of_an_earlier_version_is_made_again_and_no_token_is(tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS)
    with an_earlier_version():
        old = prepare(manifest).train
    new = prepare(manifest).train
    assert new.index_file != old.index_file
    assert not new.index_hit
    assert [folder.hit for folder in new.folders] == [True]
    assert prepare(manifest).train.index_hit


def test_only_the_names_of_packed_rows_changed():
    named = replace(NAMED, packing="none", length=64)
    assert named.file == named._file(None)
    assert named.before({named.file}, longest=64, most=4) is None


def test_a_run_that_resumes_keeps_the_order_an_earlier_version_gave_it(before, tmp_path):
    manifest, folder = before
    copy = copied(folder, tmp_path / "copy")
    done = run(manifest, resume=str(copy / "checkpoints" / "step-000002"))
    assert set(index_of(done.folder)) == set(index_of(folder))
    later = {step: loss for step, loss in losses_of(folder).items() if step > 2}
    assert losses_of(done.folder) == later
    assert later
    [resumed] = events_of(done.folder, "resumed")
    assert resumed["changed"] == []


def test_a_run_whose_index_is_gone_is_refused_unless_changes_are_allowed(before, tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS)
    with an_earlier_version():
        folder = run(manifest).folder
    [name] = index_of(folder)
    [file] = tmp_path.rglob(name)
    file.unlink()
    last = str(copied(folder, tmp_path / "copy") / "checkpoints" / "step-000002")
    with pytest.raises(CheckpointError) as reported:
        run(manifest, resume=last)
    assert (
        "its rows were packed differently, perhaps by an earlier version of Expert, "
        f"and the index it started with, {name}, no longer exists"
    ) in str(reported.value)
    assert "data.index: was" not in str(reported.value)
    assert run(manifest, resume=last, allow_changed=True).steps > 2


def test_the_rows_of_a_run_are_known_whichever_version_packed_them(before, tmp_path, base):
    manifest = write_expert(tmp_path, base, SETTINGS)
    with an_earlier_version():
        folder = run(manifest).folder
    for name in index_of(folder):
        next(tmp_path.rglob(name)).unlink()
    its_rows = Run(RunFolder(folder), RunPlan.model_validate(plan_of(folder)), tmp_path)
    made = restore_split(its_rows)
    assert made.made.train.index_file.name not in trained_rows(RunFolder(folder)).indexes
    text = (tmp_path / "train.jsonl").read_text(encoding="utf-8")
    (tmp_path / "train.jsonl").write_text(text.replace("cat", "cow"), encoding="utf-8")
    with pytest.raises(TrainedRowsUnknown):
        restore_split(its_rows)


@each(
    ("packing", "streaming", "text"),
    [
        (
            True,
            True,
            "  - an earlier version of Expert packed the rows of the stream, longest first\n",
        ),
        (False, False, "an earlier version of Expert made each step of rows of one length"),
    ],
)
def test_a_stream_or_grouped_steps_of_an_earlier_version_are_refused_in_words(
    packing, streaming, text, tmp_path, base
):
    config, dataset = {"packing": packing, "max_steps": 2}, {"streaming": streaming}
    manifest = write_expert(tmp_path, base, SETTINGS | config, dataset=dataset)
    with an_earlier_version():
        folder = run(manifest).folder
    with pytest.raises(CheckpointError) as reported:
        run(manifest, resume=str(folder / "checkpoints" / "step-000001"))
    assert text in str(reported.value)


def test_the_name_an_index_had_is_found_with_whatever_length_was_chosen():
    old = replace(NAMED, length=384, most_rows=17)._file(None)
    assert NAMED.before({old, "index-train-x.arrow"}, longest=512, most=32) == old
    assert replace(NAMED, seed=2).before({old}, longest=512, most=32) is None
