"""A KV cache at a fixed address gives the logits of a growing one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from expert.answer.cache import (
    _decoding_attention,
    attention_for,
    supports_fixed_cache,
)
from expert.answer.steps import AnswerModel, FixedSteps, GrowingSteps
from tests.model.models import documents, family_config

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
