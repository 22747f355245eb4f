"""Preference training computes what two separate rows would give, and the losses of the papers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from expert.planning.run_plan import ObjectivePlan
from expert.training.objectives.judged import JudgedAnswers
from expert.training.objectives.preference import LOSSES, Answers, Preference
from tests.each import each
from tests.model.models import VOCABULARY, load, tiny_model
from tests.training.preferences import Row, batches_of, documents_of

# Float64 throughout: what is left is the order of summation.
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def plan(loss: str = "sigmoid", **values: float) -> ObjectivePlan:
    return ObjectivePlan(method="dpo", loss=loss, **{"beta": 0.1, **values})


def answers(policy: float, reference: float, tokens: int) -> Answers:
    numbers = (torch.tensor([each], dtype=torch.float64) for each in (policy, reference, tokens))
    return Answers(*numbers)


@each(
    "loss, values, expected",
    [
        ("sigmoid", {}, 0.6209570),
        ("sigmoid", {"label_smoothing": 0.1}, 0.6359570),
        ("robust", {"label_smoothing": 0.1}, 0.6022070),
        ("hinge", {}, 0.85),
        ("ipo", {}, 21.855625),
        ("apo_zero", {}, 0.9625234),
        ("apo_down", {}, 0.9875493),
        ("simpo", {"beta": 2.0, "simpo_gamma": 1.0}, 0.3132617),
        ("orpo", {"sft_weight": 1.0}, 2.0288751),
        ("cpo", {"sft_weight": 1.0}, 2.5981389),
    ],
)
def test_every_loss_has_its_published_value(loss, values, expected):
    chosen, rejected = answers(-10, -11, 5), answers(-12, -11.5, 4)
    its = plan(loss, **values)
    value = LOSSES[loss](chosen, rejected, its) - its.sft_weight * chosen.mean
    assert float(value) == pytest.approx(expected, abs=5e-8)  # the table has seven decimals


def test_the_gradient_of_dpo_has_its_published_value():
    chosen, rejected = answers(-10, -11, 5), answers(-12, -11.5, 4)
    chosen.policy.requires_grad_()
    LOSSES["sigmoid"](chosen, rejected, plan()).sum().backward()
    assert float(chosen.policy.grad) == pytest.approx(-0.0462570, abs=5e-8)


class Scored:
    """A model that gives these log-probabilities: of a good, a bad and a mismatched answer."""

    def __init__(self, *logps: float) -> None:
        self.logps = torch.tensor(logps, dtype=torch.float64)

    def answer_logps(self, batch):
        return self.logps, (self.logps != 0).long()

    answering = staticmethod(nullcontext)


@each(
    ("logps", "reference", "loss", "metric"),
    [
        ((-10, 0, -3.8), (-11, 0, -4), 0.4800107, {"rewards/chosen": 0.1, "kl": 0.2}),
        ((0, -12, -3.8), (0, -11.5, -4), 0.4825071, {"rewards/rejected": -0.05, "kl": 0.2}),
        # A negative estimate of the divergence counts as none.
        ((-10, 0, -5), (-11, 0, -4), 0.4750208, {"kl": 0.0}),
    ],
)
def test_kto_has_its_published_values(logps, reference, loss, metric):
    objective = JudgedAnswers(plan("kto"))
    batch = SimpleNamespace(reference=torch.tensor(reference, dtype=torch.float64))
    model = Scored(*logps)
    engine = SimpleNamespace(
        device="cpu", evaluate=lambda sums, batch: sums(model, batch), summed=lambda total: total
    )
    objective.begin_step(engine, [batch])
    value, sums = objective.loss_sum(model, batch)
    # The divergence is float32, as on a device.
    assert float(value) == pytest.approx(loss, abs=1e-7)
    for name, expected in metric.items():
        assert float(sums[name]) == pytest.approx(expected, abs=1e-7)


def some_rows() -> list[Row]:
    """Rows of many shapes: a prompt of one token, an answer of one token (only its end), equal
    answers, a longer rejected answer, answers that begin alike."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(5, VOCABULARY, (count,), generator=generator).tolist()

    same, start = draw(6), draw(3)
    return [
        (draw(12), draw(5), draw(9)),
        (draw(1), draw(4), draw(3)),
        (draw(7), [2], draw(8)),
        (draw(9), same, same),
        (draw(5), [*start, *draw(4)], [*start, *draw(2)]),
        (draw(20), draw(2), [2]),
        (draw(3), draw(11), draw(1)),
    ]


@pytest.fixture
def in_float64(monkeypatch):
    """Norms compute in float32 whatever they are given; here in float64."""

    def forward(self, hidden):
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden * scale

    for kind in (LlamaRMSNorm, MistralRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(kind, "forward", forward)


def a_model(folder, family, *, shape=None, **changes):
    loaded = load(tiny_model(folder, family, **(shape or {})), **changes)
    loaded.module.double()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in loaded.trainable:
        if "lora_B" in name:  # zero at the start: then A would have no gradient
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).double()
    return loaded


def plain_sums(loaded, rows):
    """Log-probabilities of every answer, each in a row of its own after its prompt, padded to the
    longest: PEFT's model, nothing of ours."""
    loaded.causal_lm.set_attn_implementation("sdpa")  # eager has its softmax in float32
    texts = [([*prompt], [*answer]) for prompt, *both in rows for answer in both]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    sums = []
    for prompt, answer in texts:
        ids = torch.tensor([[*prompt, *answer] + [0] * (width - len(prompt) - len(answer))])
        mask = torch.arange(width)[None] < len(prompt) + len(answer)
        logits = loaded.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0]
        logps = F.log_softmax(logits, -1)
        here = torch.arange(len(prompt), len(prompt) + len(answer))
        sums.append(logps[here - 1, ids[0, here]].sum())
    loaded.causal_lm.set_attn_implementation(f"expert_{loaded.kernels.attention}")
    return torch.stack(sums).view(-1, 2)


def our_sums(loaded, rows, **layout):
    """The same from packed batches, in the order of the rows."""
    store = documents_of(rows)
    marks = torch.arange(2 * len(rows), dtype=torch.float32).view(-1, 2)
    store.reference = (marks + 1).numpy()  # which answer each is
    found = {}
    for batch in batches_of(rows, store=store, **layout):
        sums, tokens = loaded.answer_logps(batch)
        for mark, value, count in zip(batch.reference.tolist(), sums, tokens.tolist(), strict=True):
            if mark:
                found[int(mark) - 1] = value, count
    sums = torch.stack([found[number][0] for number in sorted(found)]).view(-1, 2)
    return sums, [found[number][1] for number in sorted(found)]


@pytest.mark.parametrize(
    ("family", "attention", "layout"),
    [
        ("qwen3", "eager", {"length": 64, "bins": 2}),
        ("llama", "sdpa", {"length": 48, "bins": 1}),
        ("mistral", "sdpa", {"length": 64, "bins": 8, "flat": True}),
    ],
)
def test_packed_answers_that_share_their_prompt_equal_padded_rows(
    tmp_path, in_float64, family, attention, layout
):
    window = {"sliding_window": 6} if family == "mistral" else {}
    loaded = a_model(tmp_path / "model", family, shape=window, attention=attention)
    rows = some_rows()
    ours, tokens = our_sums(loaded, rows, **layout)
    plain = plain_sums(loaded, rows)
    assert tokens == [len(answer) for _, *both in rows for answer in both]
    torch.testing.assert_close(ours, plain, **EXACT)

    def gradients(sums):
        loaded.module.zero_grad()
        F.logsigmoid(sums[:, 0] - sums[:, 1]).sum().backward()
        return {name: weight.grad.clone() for name, weight in loaded.trainable}

    expected = gradients(plain)
    assert max(float(each.abs().max()) for each in expected.values()) > 0.1
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], **EXACT, msg=name)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_one_batch_equals_many(tmp_path, in_float64, adapter):
    """The sums over micro-batches of one sequence are those of a batch of all; and with a trained
    head, whose gradient is computed in the backward."""
    loaded = a_model(tmp_path / "model", "qwen3", kind=adapter)
    objective = Preference(plan(sft_weight=0.3))

    def total(bins):
        loaded.module.zero_grad()
        metrics = {}
        for batch in batches_of(some_rows(), length=64, bins=bins):
            loss, its = objective.loss_sum(loaded, batch)
            loss.backward()
            for name, value in {**its, "loss": loss.detach()}.items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics, {name: weight.grad.clone() for name, weight in loaded.trainable}

    (alone, of_alone), (together, of_together) = total(1), total(8)
    for name, value in alone.items():
        torch.testing.assert_close(value, together[name], **EXACT, msg=name)
    for name, value in of_alone.items():
        torch.testing.assert_close(value, of_together[name], **EXACT, msg=name)
