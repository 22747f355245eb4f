"""`expert serve` on a card: the answers of `expert sample`, from adapters of several kinds on one
base and from quantised bases, and a card whose memory is full while it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from expert.jobs.sample import answer_steps
from expert.jobs.sample.sample import Conversation, ready
from expert.parallel.graphs import CudaCapture
from tests.gpu.real_model import DEVICE, ON_CARD, needs_card, note
from tests.gpu.test_answers_on_card import CrampedOnce
from tests.jobs.runs import WORDS, place, run, write_expert
from tests.jobs.serve.served import Served, served, until
from tests.wording import wording

pytestmark = [pytest.mark.gpu, needs_card]
card_only = pytest.mark.skipif(not ON_CARD, reason="only a card has memory that can be filled")

CLIENTS, FEW = 32, 8
PROMPTS = [f"say {WORDS[n % 8]} {n} {'please ' * (n % 7)}" for n in range(CLIENTS)]
EXACT = {"bf16": False, "tf32": False}  # a tie in float32 is answered alone
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "lora": (EXACT, "none"),
    "dora": ({**EXACT, "adapter_type": "dora"}, "none"),
    "bf16": ({}, "none"),
    "NF4": ({}, "int4"),
    "int8": ({}, "int8"),
    "fp8": ({}, "fp8"),
}


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """As in a process that only serves: a run that was trained here may have switched TF32 on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@cache
def trained(kind: str) -> Path:
    config, quantization = KINDS[kind]
    own = {"max_steps": 16, "learning_rate": 2e-3, "rank": 8, "torch_compile": False}
    manifest = write_expert(
        place() / f"serving-{kind}",
        "tiny",
        {**own, "eval_steps": 16, "save_steps": 16, "device": DEVICE, **config},
        model={"quantization": quantization},
        decoding={"max_new_tokens": 24},
    )
    return run(manifest).folder


@cache
def sampled(kind: str, count: int = CLIENTS) -> list[str]:
    """Each prompt by itself, as `expert sample` answers it."""
    loaded = ready(trained(kind), device=DEVICE)
    return [Conversation(loaded).ask(prompt).text for prompt in PROMPTS[:count]]


def ask(here: Served, model: str, number: int) -> str:
    asked: list[Any] = [{"role": "user", "content": PROMPTS[number]}]
    create: Any = here.client.chat.completions.create
    if number % 2:
        return create(model=model, messages=asked).choices[0].message.content or ""
    stream = create(model=model, messages=asked, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def all_at_once(here: Served, *models: str, count: int = CLIENTS) -> list[str]:
    """Every client asks one prompt of one of these models, in turn."""
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda n: ask(here, models[n % len(models)], n), range(count)))


def several(here: Served) -> set[str]:
    """Several answers to the first prompt that begin together."""
    asked: Any = [{"role": "user", "content": PROMPTS[0]}]
    found = here.client.chat.completions.create(model="demo", messages=asked, n=FEW)
    assert len(found.choices) == FEW
    return {choice.message.content or "" for choice in found.choices}


def test_clients_at_once_get_the_answers_of_expert_sample(monkeypatch):
    recorded: list[str] = []
    record = CudaCapture.__call__

    def counted(self: Any, run: Any) -> Any:
        recorded.append("a step")
        return record(self, run)

    expected = sampled("lora")
    assert len(set(expected)) > CLIENTS / 2, "all alike would prove nothing"
    monkeypatch.setattr(CudaCapture, "__call__", counted)
    with served(f"demo={trained('lora')}", device=DEVICE) as here:
        for _ in range(2):
            assert all_at_once(here, "demo") == expected
        assert here.notes == []
        assert {entry.status for entry in here.entries} == {200}
    assert bool(recorded) == ON_CARD


def test_adapters_of_several_kinds_share_their_base_on_the_card():
    places = [f"{kind}={trained(kind)}" for kind in ("lora", "dora")]
    with served(*places, with_base=True, device=DEVICE) as here:
        found = all_at_once(here, "lora", "dora", "base")
        for number, text in enumerate(found):
            kind = ["lora", "dora", "base"][number % 3]
            expected = ask(here, "base", number) if kind == "base" else sampled(kind)[number]
            assert text == expected, (kind, PROMPTS[number])
        models = [each.trained.loaded.causal_lm for each in here.engine.models.values()]
        words = {model.get_input_embeddings().weight.data_ptr() for model in models}
        assert len(words) == 1
        tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
        assert {tensor.device.type for tensor in tensors} == {DEVICE}
        assert here.notes == []


@pytest.mark.parametrize("kind", ["bf16", "NF4", "int8", "fp8"])
def test_a_base_that_is_rounded_answers_several_clients(kind, request):
    """In bfloat16 rows among others are rounded otherwise, and what is nearly a tie may go another
    way: most answers are those of `expert sample`, not all."""
    expected = sampled(kind, FEW)
    with served(f"demo={trained(kind)}", device=DEVICE) as here:
        found = all_at_once(here, "demo", count=FEW)
        one_by_one = [ask(here, "demo", number) for number in range(FEW)]
        assert here.notes == []
    shares = {
        "at once": sum(map(str.__eq__, found, expected)) / FEW,
        "one by one": sum(map(str.__eq__, one_by_one, expected)) / FEW,
    }
    note("serving.jsonl", request.node.name, shares)
    assert min(shares.values()) >= 0.5


@contextmanager
def full_card() -> Iterator[None]:
    """No memory of the card is left but what is in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    held, size = [], 2**30
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@card_only
def test_memory_that_runs_out_while_prompts_are_read_costs_no_answer(monkeypatch):
    read, rows = answer_steps.read, []

    def cramped(speaker: Any, group: Any) -> Any:
        rows.append(len(group))
        if len(rows) > 1:
            return read(speaker, group)
        with full_card():
            return read(speaker, group)

    expected = sampled("lora")
    with served(f"demo={trained('lora')}", device=DEVICE) as here:
        monkeypatch.setattr(answer_steps, "read", cramped)
        assert several(here) == {expected[0]}
        assert rows[:2] == [FEW, FEW // 2]
        assert [text.partition(":")[0] for text in here.notes] == ["OutOfMemoryError"]
        assert all_at_once(here, "demo") == expected


@card_only
def test_memory_that_runs_out_while_a_step_is_recorded_costs_no_answer(monkeypatch):
    expected = sampled("lora")
    monkeypatch.setattr(CrampedOnce, "failed", 0)
    monkeypatch.setattr(answer_steps, "recorder_of", lambda device: CrampedOnce())
    with served(f"demo={trained('lora')}", device=DEVICE) as here:
        assert several(here) == {expected[0]}
        assert CrampedOnce.failed == 1
        assert [text.partition(":")[0] for text in here.notes] == ["OutOfMemoryError"]
        assert all_at_once(here, "demo") == expected


@card_only
def test_a_card_that_is_full_refuses_requests_and_answers_again_when_it_is_not():
    with served(f"demo={trained('lora')}", device=DEVICE) as here:
        assert ask(here, "demo", 0) == sampled("lora")[0]

        def refused(number: int) -> openai.APIError:
            with pytest.raises(openai.APIError) as caught:
                ask(here, "demo", number)
            return caught.value

        until(lambda: not here.engine.running)
        with full_card(), ThreadPoolExecutor(FEW) as clients:
            errors = list(clients.map(refused, range(FEW)))
        for number, error in enumerate(errors):
            assert wording("out-of-memory") in str(error)
            if number % 2:  # a stream has begun with 200 and ends with the error
                assert isinstance(error, openai.InternalServerError)
                assert (error.status_code, error.type) == (503, "server_error")
        assert all_at_once(here, "demo") == sampled("lora")
        health = httpx.get(f"{here.address}/health").json()
        assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)
