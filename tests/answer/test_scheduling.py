"""Answers do not depend on other requests: rows join, leave, wait and fail independently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from expert.answer import cache as answer_cache
from expert.answer import steps as answer_steps
from expert.answer.scheduler import AnswerRow
from expert.answer.writer import Answer
from expert.jobs.sample.sample import Conversation, load_expert
from expert.jobs.serve import engine as engines
from expert.jobs.serve.body import RequestError
from expert.jobs.serve.engine import AnswerEngine
from expert.jobs.serve.models import load_models
from expert.jobs.serve.requests import ChatRequest
from tests.jobs.runs import WORDS, until
from tests.jobs.trained_runs import finished

PROMPTS = [
    f"say {word} {number} {'please ' * (number * 7 % 11)}" for number in range(2) for word in WORDS
]
LENGTHS = [1 + (7 * place) % 12 for place in range(len(PROMPTS))]


@cache
def models(kind: str = "lora") -> Any:
    return load_models([f"demo={finished(kind)}"], device="cpu")


@cache
def alone(kind: str = "lora", **more: Any) -> list[str]:
    """Each prompt by itself, as `expert sample` answers it."""
    loaded = load_expert(finished(kind), device="cpu", seed=5, decoding=more)
    return [
        Conversation(replace(loaded, decoding=replace(loaded.decoding, max_new_tokens=n)))
        .ask(prompt)
        .text
        for prompt, n in zip(PROMPTS, LENGTHS, strict=True)
    ]


def request(prompt: str, **more: Any) -> ChatRequest:
    given = {"model": "demo", "seed": 5, **more}
    return ChatRequest(messages=[{"role": "user", "content": prompt}], **given)


def request_for(place: int, **more: Any) -> ChatRequest:
    given = {"max_tokens": LENGTHS[place], "stream": place % 2 == 0, **more}
    return request(PROMPTS[place], **given)


async def last_of(engine: AnswerEngine, question: ChatRequest) -> Answer:
    found = [piece async for piece in (await engine.ask(question)).pieces()]
    assert isinstance(found[-1], Answer)
    return found[-1]


@contextmanager
def working(kind: str = "lora", **how: Any) -> Iterator[AnswerEngine]:
    engine = AnswerEngine(models(kind), **how)
    with closing(engine):
        yield engine


def all_at_once(engine: AnswerEngine, **more: Any) -> list[str]:
    async def together() -> list[Answer]:
        return await asyncio.gather(
            *(last_of(engine, request_for(place, **more)) for place in range(len(PROMPTS)))
        )

    return [each.text for each in asyncio.run(together())]


@pytest.mark.parametrize("parallel", [3, None])
def test_batched_answers_equal_expert_sample(parallel, monkeypatch):
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": 4})  # it grows every few tokens
    with working(parallel=parallel) as engine:
        assert all_at_once(engine) == alone()
    assert len(set(alone())) > 5, "all alike would prove nothing"


@contextmanager
def as_on_a_card(**how: Any) -> Iterator[AnswerEngine]:
    with working(**how) as engine:
        engine._schedulers["demo"]._on_cpu = False
        yield engine


@pytest.mark.parametrize("room", [6, 40])
def test_rows_join_and_leave_steps_that_are_captured(room, recorder, monkeypatch):
    """With little room memory is allocated anew often, with more it is moved in place."""
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": room})
    with as_on_a_card(parallel=6) as engine:
        assert all_at_once(engine) == alone()
        assert all_at_once(engine) == alone()
    assert recorder.replayed > recorder.recorded > 2


def test_a_batch_that_shrinks_and_grows_again_captures_each_size_once(recorder, monkeypatch):
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": 128})
    record, captured, kept = answer_steps.FixedSteps._capture_step, [], []

    def told(self: Any, *args: Any) -> None:
        kept.append(self._lengths)  # so that no later one has its address
        captured.append((self._lengths.data_ptr(), self.active))
        record(self, *args)

    monkeypatch.setattr(answer_steps.FixedSteps, "_capture_step", told)
    with as_on_a_card() as engine:
        for _ in range(2):
            assert all_at_once(engine) == alone()
    assert len(set(captured)) == len(captured), "never twice in the same memory"
    sizes = {rows for _, rows in captured}
    assert len(sizes) > 2
    assert sizes <= {1, 2, 4, 8, 16}


def test_the_cache_of_a_batch_stays_within_its_share_of_the_memory(recorder, monkeypatch):
    """Also where its rows are rounded up to a power of two and its length to what it grows by."""
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": 16})
    advance, used = answer_steps.FixedSteps.advance, list[int]()

    def measured(self: Any, tokens: Any, live: Any = ()) -> None:
        used.append(self.rows * self.size)
        advance(self, tokens, live)

    monkeypatch.setattr(answer_steps.FixedSteps, "advance", measured)
    with as_on_a_card() as engine:
        batch = engine._schedulers["demo"]
        batch._budget = 600 * batch._bytes
        assert all_at_once(engine) == alone()
    assert 100 < max(used) <= 600


@pytest.mark.parametrize("kind", ["soft", "lora+soft"])
def test_soft_prompts_stand_before_rows_that_join(kind):
    with working(kind, parallel=5) as engine:
        assert all_at_once(engine) == alone(kind)


def test_a_row_whose_token_is_nearly_a_tie_continues_alone_with_the_same_words(monkeypatch):
    expected, begun = alone(), list[int]()  # made here: it begins single rows too
    begin = answer_steps.AnswerModel.begin

    def counted(answer_model: Any, prompts: Any, room: int) -> Any:
        begun.append(len(prompts))
        return begin(answer_model, prompts, room)

    monkeypatch.setattr(answer_steps.AnswerModel, "begin", counted)
    monkeypatch.setattr("expert.answer.sampler.TIE", 0.5)
    with working() as engine:
        assert all_at_once(engine) == expected
    assert 3 < begun.count(1) <= len(PROMPTS), "some were tied, and each continued alone once"


def failing(monkeypatch: Any, error: Exception, *, on: int) -> None:
    """The step of this number fails once."""
    steps: list[int] = []
    advance = answer_steps.FixedSteps.advance

    def step(self: Any, tokens: Any, live: Any = ()) -> None:
        steps.append(len(tokens))
        if len(steps) == on:
            raise error
        advance(self, tokens, live)

    monkeypatch.setattr(answer_steps.FixedSteps, "advance", step)


def test_out_of_memory_halves_the_batch(monkeypatch):
    notes: list[str] = []
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), on=4)
    with working(parallel=16, note=notes.append) as engine:
        assert all_at_once(engine) == alone()
        until(lambda: engine._schedulers["demo"].most == 16)  # restored when idle
    assert [note.partition(":")[0] for note in notes] == ["OutOfMemoryError"]
    assert "until the queue is empty" in notes[0]


def test_a_model_that_lacks_memory_gets_that_of_idle_ones(recorder, monkeypatch):
    run = finished("lora")
    engine = AnswerEngine(load_models([f"demo={run}", f"idle={run}"], device="cpu"))
    with closing(engine):
        idle = engine._schedulers["idle"]
        idle._on_cpu = False
        asyncio.run(last_of(engine, request_for(11, model="idle")))
        until(lambda: not idle.busy)
        assert idle._open.steps is not None
        failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), on=2)
        assert all_at_once(engine) == alone()
        assert idle._open.steps is None


def test_a_prompt_too_large_for_memory_fails_alone(monkeypatch):
    read = answer_steps.AnswerModel.read

    def cramped(answer_model: Any, group: Any) -> Any:
        if max(map(len, group)) > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(answer_model, group)

    monkeypatch.setattr(answer_steps.AnswerModel, "read", cramped)

    async def both(engine: AnswerEngine) -> list[Any]:
        each = [last_of(engine, question) for question in (request("word " * 42), request_for(11))]
        return await asyncio.gather(*each, return_exceptions=True)

    with working(parallel=1) as engine:
        failed, answered = asyncio.run(both(engine))
    assert isinstance(failed, RequestError)
    assert "out of memory" in str(failed)
    assert answered.text == alone()[11]


def test_an_answer_that_has_ended_is_not_repeated_for_a_row_that_memory_ran_out_for(monkeypatch):
    """Rows outside the batch, of which one ends in the same turn in which the other fails."""
    monkeypatch.setattr(answer_cache, "supports_fixed_cache", lambda model: False)
    advance, steps = answer_steps.GrowingSteps.advance, []

    def step(self: Any, tokens: Any, live: Any = ()) -> None:
        steps.append(len(tokens))
        if len(steps) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        advance(self, tokens, live)

    engine = AnswerEngine(load_models([f"demo={finished('lora')}"], device="cpu"), parallel=3)
    monkeypatch.setattr(answer_steps.GrowingSteps, "advance", step)
    ended: list[str] = []
    take = AnswerRow.take

    def told(row: Any, token: int, scored: Any = None) -> bool:
        over: bool = take(row, token, scored)
        ended.extend(["over"] if over else [])
        return over

    monkeypatch.setattr(AnswerRow, "take", told)

    async def both() -> None:
        with engine._wake:  # they start together
            found = [await engine.ask(request_for(1, max_tokens=n)) for n in (1, 4, 4)]
        for each in found:
            assert [piece async for piece in each.pieces()]

    with closing(engine):
        asyncio.run(both())
    assert len(ended) == 3


def test_a_fault_ends_the_answers_under_way_and_none_after_them(monkeypatch):
    failing(monkeypatch, RuntimeError("broken"), on=2)
    with working() as engine:
        with pytest.raises(RequestError, match="an internal error"):
            asyncio.run(last_of(engine, request_for(11)))
        assert asyncio.run(last_of(engine, request_for(11))).text == alone()[11]


def test_a_failed_gpu_is_reported_to_all_requests(monkeypatch):
    def gone(lane: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    notes: list[str] = []
    failing(monkeypatch, RuntimeError("CUDA error: an illegal memory access"), on=2)
    monkeypatch.setattr(engines, "_release", gone)
    with working(note=notes.append) as engine:
        with pytest.raises(RequestError):
            asyncio.run(last_of(engine, request_for(11)))
        until(lambda: engine.failed)
        with pytest.raises(RequestError, match="the server has failed and must be restarted"):
            asyncio.run(last_of(engine, request_for(11)))
    assert "the server has failed: restart it" in notes[-1]


def test_a_closed_engine_refuses_and_cuts_what_is_under_way():
    engine = AnswerEngine(models())

    async def cut() -> None:
        waiting = asyncio.ensure_future(last_of(engine, request_for(0, max_tokens=400)))
        while not engine.running:
            await asyncio.sleep(0.001)
        engine.stop_accepting()
        with pytest.raises(RequestError, match="the server is shutting down"):
            await engine.ask(request_for(1))
        engine.cut()
        with pytest.raises(RequestError, match="the server was stopped"):
            await waiting

    asyncio.run(cut())
    engine.close()
