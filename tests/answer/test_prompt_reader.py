"""Prompts read by captured passes give what the model gives without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expert.answer import prompt_reader
from expert.answer import steps as answer_steps
from expert.answer.prompt_reader import PromptReader
from expert.answer.steps import AnswerModel
from tests.answer.test_scheduling import all_at_once, alone, as_on_a_card, models
from tests.parallel.fake_capture import FakeCapture

GROUPS = [
    [[5, 9, 30, 7], [8, 6]],
    [[11, 12, 13], [14, 15, 16], [17]],  # one row of padding
    [list(range(40, 80))],  # wider than the shape of the others
]


@pytest.fixture
def capture(monkeypatch: Any) -> FakeCapture:
    """A stand-in for CUDA graphs, on a card that is always waiting for launches."""
    found = FakeCapture()
    monkeypatch.setattr(answer_steps, "step_capture", lambda device: found)
    monkeypatch.setattr(prompt_reader, "is_launch_bound", lambda run, device: run() is not None)
    return found


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    for kind in ("lora", "soft"):
        models(kind)  # trained with gradients
    with torch.inference_mode():
        yield


def model(kind: str = "lora") -> AnswerModel:
    served: AnswerModel = models(kind)[0].answer_model
    return served


def test_every_pass_over_a_group_gives_what_the_model_gives_for_it_alone(capture):
    reader = PromptReader(model())
    for _ in range(5):
        for group in GROUPS:
            past, scores, mask = reader(group)
            expected, expected_scores, expected_mask = model().read(group)
            # Float32 sums of other widths are rounded otherwise, by a few parts in 10^7.
            torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-4)
            assert torch.equal(mask, expected_mask)
            used = mask.bool()[:, None, :, None]
            for layer, right in zip(past.layers, expected.layers, strict=True):
                for name in ("keys", "values"):
                    own, other = (getattr(one, name) * used for one in (layer, right))
                    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    assert capture.recorded == len(GROUPS)
    assert capture.replayed == 3 * len(GROUPS) - 1, "the first group of all is read without"


def test_answers_from_captured_prompts_equal_expert_sample(capture, monkeypatch):
    monkeypatch.setattr(answer_steps.FixedSteps, "_capture_step", lambda steps, capture: None)
    with as_on_a_card(parallel=6) as engine:
        for _ in range(4):
            assert all_at_once(engine) == alone()
        shapes = engine._schedulers["demo"]._reader._shapes.values()
    assert any(shape.replay for shape in shapes)


def test_a_shape_that_keeps_the_card_busy_is_neither_captured_nor_padded(capture, monkeypatch):
    monkeypatch.setattr(prompt_reader, "is_launch_bound", lambda run, device: run() is None)
    reader, read = PromptReader(model()), list[int]()
    whole = AnswerModel.read
    monkeypatch.setattr(AnswerModel, "read", lambda *it: read.append(len(it[1])) or whole(*it))
    for _ in range(5):
        reader(GROUPS[0])
    assert read == [2, 2, 2], "all but the two padded ones"
    assert not capture.recorded


def test_prompts_are_read_without_a_graph_if_their_shape_is_too_large(capture, monkeypatch):
    monkeypatch.setattr(prompt_reader, "MOST_TOKENS", 2 * prompt_reader.WIDTH_MULTIPLE)
    reader = PromptReader(model())
    for _ in range(5):
        reader(GROUPS[0])
        reader(GROUPS[1])
    assert list(reader._shapes) == [(2, 32)]
    assert capture.recorded == 1


def test_soft_prompts_are_read_without_a_graph(capture):
    reader = PromptReader(model("soft"))
    found = [reader(GROUPS[0])[1] for _ in range(5)]
    assert torch.equal(found[4], model("soft").read(GROUPS[0])[1])
    assert not capture.recorded


FAILURES = {
    "refused": RuntimeError("operation not permitted when stream is capturing"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_prompts_are_read_without_graphs_once_a_capture_has_failed(failure, capture, monkeypatch):
    def fails(run: Any) -> Any:
        raise FAILURES[failure]

    monkeypatch.setattr(answer_steps, "step_capture", lambda device: fails)
    notes: list[str] = []
    served = AnswerModel(models()[0].trained, notes.append)
    reader = PromptReader(served)
    for _ in range(8):
        scores = reader(GROUPS[0])[1]
    assert torch.equal(scores, served.read(GROUPS[0])[1])
    assert [note.partition(":")[0] for note in notes] == [
        "prompts are read without CUDA graphs, more slowly"
    ]
    assert reader._past is None
    assert reader._shapes == {}
