"""Answers that keep to a grammar, beside others; penalties and probabilities against plain code."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from expert.answer import grammar as grammars
from expert.answer.engine import answer_all
from expert.answer.grammar import BadGrammar
from expert.core.rundir import RunFolder
from expert.data.records import Segment, Turn
from expert.jobs.sample.sample import sample
from expert.jobs.serve.engine import AnswerEngine
from expert.manifest.reader import read_manifest
from expert.run.open import plan as plan_job
from expert.run.stored.load import read_plan
from tests.answer.test_answering import GREEDY, PROMPTS, QUESTIONS, loaded
from tests.answer.test_scheduling import (
    alone,
    as_on_a_card,
    last_of,
    request,
    request_for,
    working,
)
from tests.each import each
from tests.jobs.runs import base_model, write_expert
from tests.jobs.trained_runs import finished

SCHEMAS: dict[str, Any] = {
    "flat": {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
                       "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": ["a", "bb", None, 3]}, "minItems": 2,
              "maxItems": 4},
    "one of several": {"anyOf": [{"const": {"x": [1, "é\"\n"]}}, {"type": "null"}]},
    "text": {"type": "string", "minLength": 2, "maxLength": 6},
    "date": {"type": "object", "properties": {"on": {"type": "string", "format": "date"}},
             "required": ["on"], "additionalProperties": False},
    "nested": {
        "$defs": {"leaf": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
        "required": ["left", "right"],
        "additionalProperties": False,
    },
}  # fmt: skip
PLACES = range(0, 12, 2)


def asked(place: int, schema: Any, **more: Any) -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return request_for(place, response_format=form, max_tokens=150, **more)


def all_of(engine: AnswerEngine, requests: list[Any]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*(last_of(engine, each) for each in requests))

    return asyncio.run(together())


@pytest.mark.parametrize("card", [False, True])
def test_every_answer_fits_its_schema_and_neighbours_answer_as_if_alone(card, request):
    """Drawn from a model that knows no JSON, in one batch with answers of any form; with captured
    steps too."""
    if card:
        request.getfixturevalue("recorder")
    wanted = [asked(place, schema, temperature=1.0, seed=seed)
              for place, schema in enumerate(SCHEMAS.values()) for seed in (1, 2, 3)]  # fmt: skip
    others = [request_for(place) for place in range(len(alone()))]
    with as_on_a_card() if card else working() as engine:
        found = all_of(engine, [*wanted, *others])
    schemas = [schema for schema in SCHEMAS.values() for _ in range(3)]
    whole = [
        (answer, schema) for answer, schema in zip(found, schemas, strict=False) if answer.ended
    ]
    assert len(whole) > len(wanted) / 3, "the others are cut: they begin with endless white space"
    for answer, schema in whole:
        jsonschema.validate(json.loads(answer.text), schema)
    assert len({answer.text for answer, _ in whole}) > len(SCHEMAS)
    assert [answer.text for answer in found[len(wanted) :]] == alone()


def test_an_answer_with_a_grammar_is_the_same_in_a_batch_and_repeated_alone(
    monkeypatch,
):
    wanted = [asked(place, schema) for place, schema in enumerate(SCHEMAS.values())]
    with working(parallel=1) as engine:
        expected = [each.text for each in all_of(engine, wanted)]
    with working() as engine:
        assert [each.text for each in all_of(engine, wanted)] == expected
    monkeypatch.setattr("expert.answer.sampler.TIE", 0.5)
    with working() as engine:
        assert [each.text for each in all_of(engine, wanted)] == expected


def test_a_schema_too_complex_to_follow_cuts_its_answer_alone():
    endless = {"type": "string", "pattern": "^(([a-z]{0,100}){0,100}){0,100}$"}
    with working() as engine:
        cut, *others = all_of(
            engine, [asked(0, endless), *(request_for(place) for place in PLACES)]
        )
    assert not cut.ended
    assert "its grammar is too complex: " in cut.note
    assert [answer.text for answer in others] == [alone()[place] for place in PLACES]


@each(
    ("grammar", "allowed"),
    [
        ('start: "SELECT " /[a-z]{1,3}/ ";"', r"SELECT [a-z]{1,3};"),
        ('{"enum": ["one", "two"]}', r'"(one|two)"'),
    ],
)
def test_sample_and_validation_keep_to_a_grammar(grammar, allowed):
    how = replace(GREEDY, grammar=grammar, max_new_tokens=40)
    for answer in answer_all(loaded("lora"), QUESTIONS, how):
        assert re.fullmatch(allowed, answer.text), answer.text
        assert answer.ended
    given = {"grammar": grammar, "max_new_tokens": 40}
    (one,) = sample(finished("lora"), ["say cat 1"], device="cpu", decoding=given).samples
    assert re.fullmatch(allowed, one.text)


def test_a_grammar_that_cannot_be_used_and_a_package_that_is_missing_are_named(monkeypatch):
    with pytest.raises(BadGrammar, match="the grammar cannot be used: "):
        answer_all(loaded("lora"), QUESTIONS[:1], replace(GREEDY, grammar="start: nothing"))
    monkeypatch.setattr(grammars.importlib.util, "find_spec", lambda name: None)
    found = sample(finished("lora"), ["say cat"], device="cpu", decoding={"grammar": "{}"})
    (note,) = [note for note in found.notes if "grammar" in note]
    assert "llguidance is not installed" in note


def test_a_manifest_asks_for_json_a_file_or_is_told_that_there_is_none(tmp_path):
    (tmp_path / "some.lark").write_text('start: "x"')
    (tmp_path / "list.json").write_text("[]")
    table: list[tuple[dict[str, Any], Any, str]] = [
        ({"grammar_type": "json"}, "{}", ""),
        ({"grammar_file": "some.lark"}, 'start: "x"', ""),
        ({"grammar_type": "sql"}, None, "there is no grammar for sql answers"),
        ({"grammar_file": "list.json"}, None, "expected a JSON object"),
        ({"grammar_file": "other.lark"}, None, "No such file"),
    ]
    for decoding, grammar, warned in table:
        own = {"use_grammar": True, **decoding}
        plan = plan_job(read_manifest(write_expert(tmp_path, base_model(2), {}, decoding=own)))
        assert plan.decoding.get("grammar") == grammar
        said = [each.text for each in plan.remarks if "grammar" in each.path]
        assert len(said) == bool(warned)
        assert warned in "".join(said)
    assert "grammar" not in read_plan(RunFolder(finished("lora"))).decoding


# --- against plain code ---------------------------------------------------------------------------


def plain_scores(ids: list[int]) -> torch.Tensor:
    model = loaded("lora").loaded.causal_lm
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found.float().clone()


def prompt_ids(prompt: str) -> list[int]:
    trained = loaded("lora")
    assert trained.template is not None
    text = trained.template.prompt([Turn("user", prompt)])
    return list(trained.encoder.encode([[Segment(text, learn=False)]]).ids.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_are_those_of_a_plain_forward_pass(temperature):
    prompt = PROMPTS[0]
    wanted = request(prompt, logprobs=True, top_logprobs=3, max_tokens=8, temperature=temperature,
                     frequency_penalty=0.5, stream=False)  # fmt: skip
    with working() as engine:
        *_, answer = all_of(engine, [*(request_for(place) for place in PLACES), wanted])
    ids = prompt_ids(prompt)
    shares = plain_scores([*ids, *(token for token, *_ in answer.scored)]).log_softmax(-1)
    assert len(answer.scored) > 2
    for place, (token, share, top) in enumerate(answer.scored, len(ids) - 1):
        # Float32 sums of batches are rounded otherwise: TIE in the sampler.
        assert share == pytest.approx(float(shares[place, token]), abs=1e-4)
        expected = shares[place].topk(3).values.tolist()
        assert [value for _, value in top] == pytest.approx(expected, abs=1e-4)


@each(
    "how",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.3, "presence_penalty": 0.7, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_penalties_are_those_of_a_slow_loop(how):
    prompt = PROMPTS[0]
    ids, written = prompt_ids(prompt), list[int]()
    for _ in range(12):
        scores = plain_scores([*ids, *written])[-1]
        for token in {*ids, *written}:
            times = how.get("repetition_penalty", 1.0)
            scores[token] = scores[token] / times if scores[token] >= 0 else scores[token] * times
        for token, count in Counter(written).items():
            scores[token] -= count * how.get("frequency_penalty", 0.0)
            scores[token] -= how.get("presence_penalty", 0.0)
        written.append(int(scores.argmax()))
    wanted = request(prompt, max_tokens=12, logprobs=True, stream=False, **how)
    with working() as engine:
        *_, answer = all_of(engine, [*(request_for(place) for place in PLACES), wanted])
    found = [token for token, *_ in answer.scored]
    assert found == written[: len(found)]
    assert len(found) == 12 or answer.ended
