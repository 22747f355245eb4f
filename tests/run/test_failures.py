"""What an error means for the plan, and what is tried on a card before a run begins."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert.model import attention
from expert.parallel.group import Group
from expert.run.build import PlanUnsupported, check_attention, check_precision
from expert.run.session import instruments
from expert.run.session.failures import failure_of
from expert.training.recovery import (
    CompileFailed,
    KernelUnavailable,
    OutOfMemory,
    PrecisionUnsupported,
)

CARD = torch.device("cuda")


class OfACompiler(RuntimeError):
    """As torch.compile raises them."""


OfACompiler.__module__ = "torch._dynamo.exc"


def plan(**kernels: Any) -> Any:
    own = {"compile": True, "attention": "sdpa", "precision": "bf16", "fused_loss": True}
    return SimpleNamespace(kernels=SimpleNamespace(**own | {"fused_blocks": False} | kernels))


def test_memory_that_runs_out_while_compiling_is_missing_memory():
    wrapped = OfACompiler("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("Tried to allocate 2 GiB")
    said = OfACompiler("backend='inductor' raised: CUDA out of memory. Tried to allocate 2 GiB")
    handled = OfACompiler("backend failed")
    handled.__context__ = ValueError("in between")
    handled.__context__.__context__ = torch.OutOfMemoryError("Tried to allocate 2 GiB")
    for error in (wrapped, said, handled):
        failure = failure_of(error)
        assert isinstance(failure, OutOfMemory)
        assert "Tried to allocate 2 GiB" in failure.message
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one  # each is looked at once
    assert failure_of(one) is None


@pytest.mark.parametrize(
    "error",
    [
        OfACompiler("no such operation"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]),
    ],
)
def test_compiled_parts_are_disabled_one_after_the_other(error):
    assert isinstance(failure_of(error, "training", plan()), CompileFailed)
    for attended, kernel in (("flex", "attention"), ("flash", "fused_loss")):
        failure = failure_of(error, "training", plan(compile=False, attention=attended))
        assert isinstance(failure, KernelUnavailable)
        assert failure.kernel == kernel
        fused = plan(compile=False, attention=attended, fused_blocks=True)
        failure = failure_of(error, "training", fused)
        assert isinstance(failure, KernelUnavailable)
        assert failure.kernel == "triton"


def test_attention_that_fails_or_is_not_deterministic_where_that_was_asked_for_is_given_up():
    cudnn = RuntimeError("Expected mha_graph.execute(handle).is_good() to be true, but got false.")
    failed = failure_of(cudnn)
    assert isinstance(failed, KernelUnavailable)
    assert failed.kernel == "attention"
    error = RuntimeError("flex backward does not have a deterministic implementation, but ...")
    asked = plan(attention="flex", deterministic=True)
    failure = failure_of(error, "training", asked)
    assert failure == KernelUnavailable(kernel="attention", reason=str(error))
    assert failure_of(error, "training", plan(deterministic=False)) is None


def test_a_card_without_bf16_is_another_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(PlanUnsupported) as caught:
        check_precision(plan(), CARD)
    no_bf16 = PrecisionUnsupported(precision="bf16", reason="the card has no bf16")
    assert failure_of(caught.value) == no_bf16
    check_precision(plan(precision="fp16"), CARD)
    check_precision(plan(), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    check_precision(plan(), CARD)


def model(*layers: tuple[int, int]) -> Any:
    """With attention of these widths of heads and numbers of queries that share keys."""
    parts = [SimpleNamespace(head_dim=width, num_key_value_groups=many) for width, many in layers]
    shape = SimpleNamespace(hidden_size=64, num_attention_heads=4)
    whole = SimpleNamespace(get_text_config=lambda: shape)
    lm = SimpleNamespace(config=whole, modules=lambda: [SimpleNamespace(), *parts])
    return SimpleNamespace(module=None, causal_lm=lm)


def test_flash_attention_is_tried_with_the_heads_of_the_model(monkeypatch):
    asked = []
    why = "RuntimeError: FlashAttention only supports Ampere GPUs or newer."

    def works(*facts: Any) -> Any:
        asked.append(facts)
        return why

    monkeypatch.setattr(attention, "attention_failure", works)
    with pytest.raises(PlanUnsupported) as caught:
        check_attention(plan(attention="flash"), model((16, 4), (32, 2)), CARD)
    assert failure_of(caught.value) == KernelUnavailable(kernel="attention", reason=why)
    why = "OutOfMemoryError: CUDA out of memory."
    check_attention(plan(attention="flash"), model(), CARD)
    assert [facts[3:] for facts in asked] == [(32, 4, 2), (16, 4, 4)]
    assert {facts[2] for facts in asked} == {torch.bfloat16}
    check_attention(plan(attention="sdpa"), model(), CARD)
    check_attention(plan(attention="flash"), model(), torch.device("cpu"))
    assert len(asked) == 2


def test_what_the_card_does_goes_into_step_events_as_numbers_without_compiling(monkeypatch):
    asked: list[tuple[float, float]] = []

    def step_fields(since, *, steady_since):
        asked.append((since, steady_since))
        return {"power_watts": 300.0}

    gpu = SimpleNamespace(step_fields=step_fields)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    now = iter([100.0, 130.0, 140.0])
    monkeypatch.setattr(instruments.time, "monotonic", lambda: next(now))
    meter = SimpleNamespace(steady_since=125.0)
    looking: Any = SimpleNamespace(gpu=gpu, device=CARD, meter=meter, emit=None, group=Group())
    fields = instruments.Instruments._more_fields(looking, None, workers=1)
    found = fields(1)
    fields(2)
    assert asked == [(125.0, 125.0), (130.0, 125.0)]
    assert found["power_watts"] == 300.0
    assert not any(isinstance(value, str) for value in found.values())
