"""A KV cache at a fixed address gives the logits of a growing one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from expert.answer import prompt_reader
from expert.answer import steps as answer_steps
from expert.answer.cache import (
    _decoding_attention,
    attention_for,
    supports_fixed_cache,
)
from expert.answer.prompt_reader import PromptReader
from expert.answer.steps import AnswerModel, FixedSteps, GrowingSteps
from tests.answer.test_scheduling import all_at_once, alone, as_on_a_card, models
from tests.model.models import documents, family_config
from tests.parallel.fake_capture import FakeCapture

CPU = torch.device("cpu")


def model_of(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.set_attn_implementation(attention_for(model.config))
    return model.eval()


def answering(model):
    loaded = SimpleNamespace(causal_lm=model, soft_prompts=None)
    trained: Any = SimpleNamespace(loaded=loaded, device=CPU)
    return AnswerModel(trained)


def growing(model, prompts):
    return GrowingSteps(answering(model), prompts)


def said(steps, count: int) -> list[torch.Tensor]:
    """The scores of some steps, each taking the likeliest token."""
    found = [steps.scores.clone()]
    for _ in range(count):
        steps.advance(found[-1].argmax(-1))
        found.append(steps.scores.clone())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@torch.inference_mode()
def test_prompts_read_in_groups_go_on_as_those_read_together(family):
    model = model_of(family_config(family))
    prompts = documents(60, 41, 40, 9, 3)
    together = said(growing(model, prompts), 70)
    steps = FixedSteps(answering(model), 100, len(prompts))
    steps.join([prompts[:1], prompts[1:3], prompts[3:]], range(len(prompts)))
    apart = said(steps, 70)
    for one, other in zip(together, apart, strict=True):
        # float64 but for the scores, which are float32: 6e-8 of up to 10.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5])
def test_heads_that_share_keys_need_no_copies_of_them(length):
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, places: int) -> torch.Tensor:
        return torch.randn(3, heads, places, 8, generator=generator, dtype=torch.float64)

    module: Any = torch.nn.Module()
    module.num_key_value_groups = 3
    query, key, value = draw(6, length), draw(2, 20), draw(2, 20)
    mask = torch.rand(3, 1, length, 20, generator=generator) > 0.3
    mask[..., 0] = True
    right, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    ours, _ = _decoding_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, right)


@torch.inference_mode()
def test_scores_that_are_capped_in_training_are_capped_in_answers():
    """Gemma 2, whose padding must not become NaN: as without a cache, prompt by prompt."""
    model = model_of(family_config("gemma2")).float()
    prompts = documents(30, 21, 9)
    steps = growing(model, prompts)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(12):
        chosen = steps.scores.argmax(-1)
        texts = [[*text, int(token)] for text, token in zip(texts, chosen, strict=True)]
        steps.advance(chosen)
    for text, scores in zip(texts, steps.scores, strict=True):
        right = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float()
        # float32: 6e-8 of scores up to 10, through two blocks.
        torch.testing.assert_close(scores, right, rtol=1e-5, atol=1e-4)


def test_layers_that_see_a_window_are_left_to_transformers():
    assert not supports_fixed_cache(model_of(family_config("mistral", sliding_window=8)))
    assert supports_fixed_cache(model_of(family_config("mistral", sliding_window=None)))


# --- prompts read by captured passes -------------------------------------------------------------


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
