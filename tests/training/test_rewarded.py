"""Learning from groups of answers computes what GRPO does with a padded row for each answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from expert.data.feed.order import StepBins
from expert.run.session.groups import fed_batches, laid_out
from expert.training.objectives.rewarded import RewardedAnswers, advantages
from tests.each import each
from tests.model.models import VOCABULARY
from tests.training.test_preference import EXACT, a_model, in_float64  # noqa: F401

CLIP, COUNT = 0.2, 4


@each(
    "rewards, expected",
    [
        ([1.0, 0.0], [0.70700680, -0.70700680]),
        ([1.0, 0.0, 0.0, 0.0], [1.49970006, -0.49990002, -0.49990002, -0.49990002]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([0.1, 0.1, 0.1], [0.0, 0.0, 0.0]),
        ([1.0], [0.0]),
    ],
)
def test_an_answer_is_as_good_as_it_is_better_than_its_group(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected, abs=1e-8)


def groups():
    """Prompts with answers of many lengths, their rewards, and two groups without a difference."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> list[int]:
        return torch.randint(5, VOCABULARY, (count,), generator=generator).tolist()

    shapes = [
        (9, [(3, 1.0), (7, 0.0), (1, 0.0), (4, 1.0)]),
        (1, [(2, 0.25), (5, 1.0), (5, 0.0), (9, 0.5)]),
        (6, [(4, 1.0)] * COUNT),
        (14, [(11, 0.0), (2, 0.0), (2, 1.0), (2, 0.0)]),
        (4, [(3, 0.0)] * COUNT),
    ]
    return [(draw(size), [(draw(n), reward) for n, reward in own]) for size, own in shapes]


def plain(loaded, start, beta):
    """The loss of all groups with a difference: PEFT's model, one row for each answer, the ratio
    clipped, the mean over all tokens."""
    loaded.causal_lm.set_attn_implementation("sdpa")
    total, tokens = torch.zeros((), dtype=torch.float64), 0

    def logps_of(prompt, ids):
        row = torch.tensor([[*prompt, *ids]])
        scores = F.log_softmax(loaded.module(input_ids=row, use_cache=False).logits[0], -1)
        return scores[torch.arange(len(prompt), row.shape[1]) - 1, ids]

    def put(weights):
        for (_, weight), values in zip(loaded.trainable, weights, strict=True):
            weight.copy_(values)

    own = [weight.detach().clone() for _, weight in loaded.trainable]
    with torch.no_grad():
        put(start)
        before = iter([logps_of(prompt, ids) for prompt, answers in groups() for ids, _ in answers])
        put(own)
    for prompt, answers in groups():
        rewards = torch.tensor([reward for _, reward in answers], dtype=torch.float64)
        references = [next(before) for _ in answers]
        if not rewards.std():
            continue
        gains = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).float().double()
        for (ids, _), gain, reference in zip(answers, gains, references, strict=True):
            logps = logps_of(prompt, ids)
            ratio = (logps - logps.detach()).exp()
            losses = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
            if beta:
                losses = losses + beta * ((reference - logps).exp() - (reference - logps) - 1)
            total, tokens = total + losses.sum(), tokens + len(ids)
    loaded.causal_lm.set_attn_implementation(f"expert_{loaded.kernels.attention}")
    return total / tokens


@pytest.mark.parametrize(("places", "beta"), [(24, 0.0), (4096, 0.0), (64, 0.3)])
def test_groups_that_share_their_prompt_equal_padded_rows(tmp_path, in_float64, places, beta):  # noqa: F811
    loaded = a_model(tmp_path / "model", "qwen3", attention="sdpa")
    objective = RewardedAnswers(beta)
    objective.begin(loaded)
    start = [weight.detach().clone() for _, weight in loaded.trainable]
    with torch.no_grad():
        for _, weight in loaded.trainable:
            weight.mul_(1.3)

    def gradients(loss):
        loaded.module.zero_grad()
        loss.backward()
        return {name: weight.grad.clone() for name, weight in loaded.trainable}

    expected_loss = plain(loaded, start, beta)
    expected = gradients(expected_loss)
    packed = laid_out(groups(), COUNT, places)
    assert packed is not None
    engine = SimpleNamespace(evaluate=torch.no_grad()(lambda sums, batch: sums(loaded, batch)))
    total, weight = torch.zeros((), dtype=torch.float64), 0
    step = StepBins(0, 0, 0, None)
    for fed in fed_batches(step, packed, COUNT, device=torch.device("cpu")):
        assert (len(fed.batches) > 1) == (places < 100)
        objective.begin_step(engine, fed.batches)
        for batch in fed.batches:
            total = total + objective.loss_sum(loaded, batch)[0]
            weight += objective.weight(batch)
        found = gradients(total / weight)
    torch.testing.assert_close(total / weight, expected_loss, **EXACT)
    assert max(float(each.abs().max()) for each in expected.values()) > 0.01
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **EXACT, msg=name)


def test_groups_without_a_difference_make_no_batch():
    assert laid_out([([1, 2], [([5], 1.0), ([6, 7], 1.0)])], 2, 64) is None
