"""Evaluations compute no padding that can be left out, and come to the same loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from expert.data.feed.run_data import evaluation_shape, split_batches
from expert.data.feed.streaming import divided
from expert.run.build import build
from expert.run.open import open_run
from expert.training.evaluation import evaluate
from expert.training.objectives.next_token import NextToken
from tests.jobs.runs import WORDS, base_model, write_expert

CPU = torch.device("cpu")
ROWS = [
    {"instruction": f"say {word}", "response": f"{word} " * (1 + number * number)}
    for number in range(6)
    for word in WORDS
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The plan, the held-out rows (at most two to a sequence) and the model of an expert on a CPU,
    ready to be evaluated."""
    folder = tmp_path_factory.mktemp("evaluated")
    base = base_model()
    config = {"max_seq_length": 256, "device": "cpu"}
    file = write_expert(folder, base, config, rows=ROWS, dataset={"validation_split": 0.5})
    opened = open_run(file)
    split = opened.data.validation
    built = build(opened.plan, opened.data.encoder, device=CPU)
    built.loaded.module.eval()
    return opened.plan, replace(split, index=divided(split.index, 2)), built


def widths_and_loss(plan, split, built, rows):
    widths = []

    def seen(batches):
        for batch in batches:
            widths.append(batch.tokens.shape[1])
            yield batch

    with split_batches(plan, split, rows=rows, device=CPU) as batches:
        sums = evaluate(built.engine, NextToken(), seen(batches))
    return widths, sums.sums["loss"].item() / sums.weight


@pytest.mark.parametrize("rows", [1, 3])
def test_an_evaluation_without_padding_or_end_to_end_comes_to_the_loss_of_one_with_it(
    opened, rows: int
):
    plan, split, built = opened
    assert plan.data.trim
    whole = plan.with_values({"data.trim": False}, "to compare", "machine")
    widths, loss = widths_and_loss(plan, split, built, rows)
    all_of_one, expected = widths_and_loss(whole, split, built, rows)
    assert set(all_of_one) == {256}
    assert min(widths) < max(widths)
    assert sum(widths) < 0.75 * sum(all_of_one)
    assert widths == sorted(widths, reverse=True)  # what does not fit shows at once
    assert loss == pytest.approx(expected, rel=1e-6)  # float32 sums over other widths: 2e-7 here
    flat = whole.with_values({"data.flat": True}, "to try", "machine")
    widths, loss = widths_and_loss(flat, split, built, rows)
    assert max(widths) > 256 or rows == 1
    assert loss == pytest.approx(expected, rel=1e-6)  # as above


def test_the_batches_of_an_evaluation_hold_every_row_once(opened):
    plan, split, _ = opened
    with split_batches(plan, split, rows=3, device=CPU) as batches:
        bins = [number for batch in batches for number in batch.bins]
    assert sorted(bins) == list(range(split.index.bins))


def test_all_evaluations_of_a_compiled_run_have_one_shape_and_the_same_loss(opened):
    plan, held_out, built = opened
    values = {"data.trim": False, "kernels.compile": True}
    compiled = plan.with_values(values, "to compare", "machine")
    splits = [held_out, replace(held_out, index=divided(held_out.index, 1))]
    shape = evaluation_shape(compiled, splits, rows=3)
    assert evaluation_shape(plan, splits, rows=3) is None
    shapes, losses = set(), []
    for one in (shape, None):
        for split in splits:
            with split_batches(compiled, split, rows=3, device=CPU, shape=one) as batches:
                kept = []
                for batch in batches:
                    kept.append(built.engine.evaluate(NextToken().evaluate, batch)["loss"].item())
                    if one is not None:
                        shapes.add((*batch.tokens.shape, *batch.boundaries.shape, batch.whole_rows))
            losses.append(sum(kept))
    assert len(shapes) == 1
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)  # float32 sums over other shapes
