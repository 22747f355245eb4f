"""`expert serve` on a card: the answers of `expert sample`, from adapters of several kinds on one
base and from quantised bases, and a card whose memory is full while it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from expert.answer import steps as answer_steps
from expert.jobs.sample.sample import Conversation, load_expert
from expert.jobs.serve.body import RequestError
from expert.jobs.serve.engine import AnswerEngine
from expert.jobs.serve.models import load_models
from expert.jobs.serve.requests import ChatRequest
from expert.parallel.graphs import CudaCapture
from tests.answer.test_scheduling import last_of
from tests.gpu.real_model import DEVICE, ON_CARD, card_only, needs_card, note
from tests.jobs.runs import WORDS, place, run, until, write_expert
from tests.jobs.serve.served import served

pytestmark = [pytest.mark.gpu, needs_card]

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
    loaded = load_expert(trained(kind), device=DEVICE)
    return [Conversation(loaded).ask(prompt).text for prompt in PROMPTS[:count]]


@contextmanager
def serving(*places: str, with_base: bool = False) -> Iterator[tuple[AnswerEngine, list[str]]]:
    """Without a port: the packages of the server need not be there."""
    notes: list[str] = []
    models = load_models(places, device=DEVICE, with_base=with_base)
    engine = AnswerEngine(models, note=notes.append)
    try:
        yield engine, notes
    finally:
        engine.close()


def question(number: int, model: str = "demo", **more: Any) -> ChatRequest:
    given = {"model": model, "stream": number % 2 == 0, **more}
    return ChatRequest(messages=[{"role": "user", "content": PROMPTS[number]}], **given)


def all_at_once(engine: AnswerEngine, *models: str, count: int = CLIENTS) -> list[Any]:
    """Every client asks one prompt of one of these models, in turn; its answer, or why not."""
    asked = [question(number, models[number % len(models)]) for number in range(count)]

    async def together() -> list[Any]:
        clients = [last_of(engine, one) for one in asked]
        return await asyncio.gather(*clients, return_exceptions=True)

    return [getattr(each, "text", each) for each in asyncio.run(together())]


def several(engine: AnswerEngine) -> list[str]:
    """Several answers to the first prompt, which begin together."""

    async def texts() -> list[str]:
        asked = await engine.ask(question(1, n=FEW))
        return [piece.text async for piece in asked.pieces()]

    return asyncio.run(texts())


def test_clients_at_once_get_the_answers_of_expert_sample(monkeypatch):
    recorded: list[str] = []
    record = CudaCapture.__call__

    def counted(self: Any, run: Any) -> Any:
        recorded.append("a step")
        return record(self, run)

    expected = sampled("lora")
    assert len(set(expected)) > CLIENTS / 2, "all alike would prove nothing"
    monkeypatch.setattr(CudaCapture, "__call__", counted)
    with serving(f"demo={trained('lora')}") as (engine, notes):
        for _ in range(4):  # a shape of prompts is captured when it comes a third time
            assert all_at_once(engine, "demo") == expected
        alone = [asyncio.run(last_of(engine, question(1))).text for _ in range(4)]
        assert alone == [expected[1]] * 4
        assert notes == []
        shapes = engine._schedulers["demo"]._reader._shapes.values()
        assert any(shape.replay for shape in shapes) == ON_CARD
    assert bool(recorded) == ON_CARD


def test_adapters_of_several_kinds_share_their_base_on_the_card():
    places = [f"{kind}={trained(kind)}" for kind in ("lora", "dora")]
    with serving(*places, with_base=True) as (engine, notes):
        found = all_at_once(engine, "lora", "dora", "base")
        alone = all_at_once(engine, "base", count=FEW)
        for number, text in enumerate(found):
            kind = ("lora", "dora", "base")[number % 3]
            if kind != "base":
                assert text == sampled(kind)[number], (kind, PROMPTS[number])
            elif number < FEW:
                assert text == alone[number], PROMPTS[number]
        models = [each.trained.loaded.causal_lm for each in engine.models.values()]
        words = {model.get_input_embeddings().weight.data_ptr() for model in models}
        assert len(words) == 1
        tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
        assert {tensor.device.type for tensor in tensors} == {DEVICE}
        assert notes == []


@pytest.mark.parametrize("kind", ["bf16", "NF4", "int8", "fp8"])
def test_a_base_that_is_rounded_answers_several_clients(kind, request):
    """In bfloat16 rows among others are rounded otherwise, and what is nearly a tie may go another
    way: most answers are those of `expert sample`, not all."""
    expected = sampled(kind, FEW)
    with serving(f"demo={trained(kind)}") as (engine, notes):
        found = all_at_once(engine, "demo", count=FEW)
        one_by_one = [asyncio.run(last_of(engine, question(n))).text for n in range(FEW)]
        assert notes == []
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
    read, rows = answer_steps.AnswerModel.read, []

    def cramped(answer_model: Any, group: Any) -> Any:
        rows.append(len(group))
        if len(rows) > 1:
            return read(answer_model, group)
        with full_card():
            return read(answer_model, group)

    expected = sampled("lora")
    with serving(f"demo={trained('lora')}") as (engine, notes):
        monkeypatch.setattr(answer_steps.AnswerModel, "read", cramped)
        assert several(engine) == [expected[1]] * FEW
        assert rows[:2] == [1, 1]  # equal prompts are read once
        assert [text.partition(":")[0] for text in notes] == ["OutOfMemoryError"]
        assert all_at_once(engine, "demo") == expected


@card_only
def test_a_card_that_is_full_refuses_questions_and_answers_again_when_it_is_not():
    expected = sampled("lora")
    with serving(f"demo={trained('lora')}") as (engine, _):
        assert all_at_once(engine, "demo", count=1) == expected[:1]
        until(lambda: not engine.running)
        with full_card():
            errors = all_at_once(engine, "demo", count=FEW)
        # What the engine frees itself may be enough for one of them.
        refused = [error for error in errors if isinstance(error, RequestError)]
        assert {str(error) for error in refused} == {"out of memory"}
        assert {each for each in errors if isinstance(each, str)} <= set(expected)
        assert all_at_once(engine, "demo") == expected
        until(lambda: not (engine.running or engine.waiting))


@card_only
def test_a_request_to_a_full_card_gets_503_in_openai_s_shape():
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPTS[0]}]}
    head = {"Content-Type": "application/json"}
    with served(f"demo={trained('lora')}", device=DEVICE) as here:
        place = f"{here.address}/v1/chat/completions"
        asked = Request(place, json.dumps(body).encode(), head)
        with full_card(), pytest.raises(HTTPError) as refused:
            urlopen(asked)
        error = json.load(refused.value)["error"]
        assert (refused.value.status, error["type"]) == (503, "server_error")
        assert error["message"] == "out of memory"
        with urlopen(asked) as answer:
            told = json.load(answer)["choices"][0]["message"]["content"]
        assert told == sampled("lora")[0]
        with urlopen(f"{here.address}/health") as answer:
            assert json.load(answer)["status"] == "ok"
