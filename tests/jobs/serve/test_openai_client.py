"""OpenAI's own client talks to `expert serve` as it does to OpenAI."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from expert.answer.writer import Answer
from expert.core.errors import Damaged, ExpertError
from expert.core.publish import publishing
from expert.jobs.export.export import export
from expert.jobs.sample.sample import sample
from expert.jobs.serve.models import load_models
from expert.jobs.serve.requests import ChatRequest
from expert.jobs.serve.serve import serving
from tests.core.test_publish import in_hub_cache
from tests.each import each
from tests.jobs.runs import WORDS, base_model, run, write_expert
from tests.jobs.serve.served import Served, served
from tests.jobs.test_validated_calls import TOOLS, WRITTEN, calling
from tests.jobs.trained_runs import exported, finished, finished_characters
from tests.model.models import tiny_model

PROMPTS = [f"say {word} {number} {'please ' * (number % 5)}" for number, word in enumerate(WORDS)]
LONG = PROMPTS[1]
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 4}
"""Greedy answers are short here: these models are hardly trained."""


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served(f"demo={finished('lora')}", f"dora={finished('dora')}", with_base=True) as found:
        yield found


def asking(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": prompt}], **more}


def said(here: Served, prompt: str, **more: Any) -> str:
    found = here.client.chat.completions.create(**asking(prompt, **more))
    return found.choices[0].message.content or ""


def alone(kind: str, *prompts: str, **decoding: Any) -> list[str]:
    found = sample(finished(kind), prompts, device="cpu", seed=3, decoding=decoding)
    return [each.text for each in found.samples]


def test_an_answer_is_that_of_expert_sample_with_its_tokens_counted(here):
    found = here.client.chat.completions.create(**asking(PROMPTS[0]))
    (choice,) = found.choices
    (expected,) = sample(finished("lora"), PROMPTS[:1], device="cpu").samples
    assert choice.message.content == expected.text
    assert choice.finish_reason == ("stop" if expected.ended else "length")
    assert found.usage.completion_tokens == expected.tokens
    assert found.usage.total_tokens == found.usage.prompt_tokens + expected.tokens
    assert here.entries[-1].tokens == expected.tokens


def test_a_stream_gives_the_same_text_in_pieces_and_the_tokens_at_its_end(here):
    stream = here.client.chat.completions.create(
        **asking(LONG, stream=True, stream_options={"include_usage": True}, **DRAWN)
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == said(here, LONG, **DRAWN)
    assert len([piece for piece in pieces if piece]) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage.completion_tokens > 1


def test_every_model_answers_by_its_name_and_adapters_share_their_base(here):
    names = [model.id for model in here.client.models.list()]
    assert names == ["demo", "dora", "base"]
    assert here.client.models.retrieve("dora").id == "dora"
    found = {name: said(here, PROMPTS[2], model=name) for name in names}
    assert found["demo"] == alone("lora", PROMPTS[2])[0]
    assert found["dora"] == alone("dora", PROMPTS[2])[0]
    assert len(set(found.values())) > 1
    weights = [
        model.trained.loaded.causal_lm.get_input_embeddings().weight.data_ptr()
        for model in here.engine.models.values()
    ]
    assert len(set(weights)) == 1


def test_the_same_seed_draws_what_expert_sample_draws_and_several_answers_apart(here):
    how = {"temperature": 0.9, "top_p": 0.9, "max_tokens": 10}
    extra = {"top_k": 20, "min_p": 0.01}
    first = said(here, PROMPTS[3], seed=3, extra_body=extra, **how)
    assert first == said(here, PROMPTS[3], seed=3, extra_body=extra, **how)
    asked = {"temperature": 0.9, "top_p": 0.9, "max_new_tokens": 10, **extra}
    assert [first] == alone("lora", PROMPTS[3], **asked)
    found = here.client.chat.completions.create(
        **asking(PROMPTS[4], n=3, temperature=1.0, seed=3, max_completion_tokens=8)
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in found.choices]
    assert texts[0] == alone("lora", PROMPTS[4], temperature=1.0, max_new_tokens=8)[0]
    assert len(set(texts)) > 1


def test_an_answer_ends_before_a_stop_and_after_so_many_tokens(here):
    whole = said(here, PROMPTS[5])
    stop = whole[3:5]
    assert said(here, PROMPTS[5], stop=[stop]) == whole.partition(stop)[0].strip()
    chunks = list(
        here.client.chat.completions.create(**asking(PROMPTS[5], stop=[stop], stream=True))
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.partition(stop)[0].strip()
    assert chunks[-1].choices[0].finish_reason == "stop"
    short = here.client.chat.completions.create(**asking(PROMPTS[5], max_tokens=2))
    assert short.choices[0].finish_reason == "length"
    assert short.usage.completion_tokens == 2


def test_a_text_is_continued_as_expert_sample_continues_it(here):
    found = here.client.completions.create(model="demo", prompt="say cat", max_tokens=6)
    (expected,) = sample(
        finished("lora"), ["say cat"], plain=True, device="cpu", decoding={"max_new_tokens": 6}
    ).samples
    assert found.choices[0].text == expected.text
    stream = here.client.completions.create(
        model="demo", prompt="say cat", max_tokens=6, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected.text


def test_turns_before_the_question_are_part_of_it(here):
    before = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say dog 1"},
        {"role": "assistant", "content": "dog 1", "refusal": None, "annotations": []},
    ]
    asked = [*before, {"role": "user", "content": [{"type": "text", "text": "say cat 2"}]}]
    found = here.client.chat.completions.create(model="demo", messages=asked, max_tokens=1)
    alone = here.client.chat.completions.create(**asking("say cat 2", max_tokens=1))
    assert found.usage.prompt_tokens > alone.usage.prompt_tokens + 6


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_are_in_the_fields_of_openai(here, stream):
    how = {"logprobs": True, "top_logprobs": 2, "max_tokens": 5, **DRAWN, "seed": 1}
    found = here.client.chat.completions.create(**asking(LONG, stream=stream, **how))
    if stream:
        chunks = [chunk.choices[0] for chunk in found]
        entries = [one for each in chunks if each.logprobs for one in each.logprobs.content]
        text = "".join(each.delta.content or "" for each in chunks)
    else:
        text, entries = found.choices[0].message.content, found.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries).strip() == text
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    for entry in entries:
        best, second = entry.top_logprobs
        assert best.logprob >= second.logprob
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token


def test_every_prompt_of_a_list_is_continued_as_alone(here):
    prompts = ["say cat", "say dog and", "say red 1"]
    how: dict[str, Any] = {"model": "demo", "max_tokens": 4, "seed": 3, "temperature": 1.0}
    found = here.client.completions.create(prompt=prompts, n=2, logprobs=1, **how)
    alone = [here.client.completions.create(prompt=prompt, n=2, **how) for prompt in prompts]
    assert [choice.index for choice in found.choices] == list(range(6))
    texts = [choice.text for choice in found.choices]
    assert texts == [choice.text for each in alone for choice in each.choices]
    assert found.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
    shares = found.choices[0].logprobs
    assert "".join(shares.tokens) == texts[0]
    assert shares.text_offset[0] == 0
    assert [len(top) for top in shares.top_logprobs] == [1] * len(shares.tokens)


def json_as(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def test_answers_are_json_where_that_is_asked_for(here):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    for stream in (False, True):
        found = here.client.chat.completions.create(
            **asking(LONG, response_format=json_as(schema), stream=stream, max_tokens=300)
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in found]
            text, reason = "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason
        else:
            text, reason = found.choices[0].message.content, found.choices[0].finish_reason
        assert reason == "length" or json.loads(text)["a"] in ("x", "y")
        assert text.startswith("{")


@each(
    "schema",
    [
        {"type": "thing"},
        {"$ref": "http://example.com/schema"},
        {"type": "string", "pattern": "("},
        {"not": {"type": "string"}},
        {"enum": []},
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_used_is_refused_in_one_line(here, schema):
    with pytest.raises(openai.BadRequestError) as refused:
        said(here, "say cat 1", response_format=json_as(schema))
    assert refused.value.param == "response_format"
    message = refused.value.body["message"]
    assert message.startswith("response_format: the JSON Schema cannot be used: ")
    assert "\n" not in message
    assert said(here, PROMPTS[0]) == alone("lora", PROMPTS[0])[0]


# --- tools ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    with served(f"demo={calling()}") as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_words_of_the_template_becomes_a_tool_call(caller, stream):
    found = caller.client.chat.completions.create(**asking("say cat 1", tools=TOOLS, stream=stream))
    if stream:
        deltas = [chunk.choices[0] for chunk in found]
        (call,) = [c for each in deltas for c in each.delta.tool_calls or []]
        assert not any(each.delta.content for each in deltas)
        reason = deltas[-1].finish_reason
    else:
        (call,) = found.choices[0].message.tool_calls
        assert found.choices[0].message.content is None
        reason = found.choices[0].finish_reason
    assert (call.function.name, json.loads(call.function.arguments)) == ("ok", {"yes": True})
    assert reason == "tool_calls"
    assert len(call.id) == 9


def test_without_tools_or_with_an_unreadable_call_an_answer_is_text_and_tools_may_answer(caller):
    plain = caller.client.chat.completions.create(
        **asking("say cat 1", tools=TOOLS, tool_choice="none")
    )
    assert plain.choices[0].message.tool_calls is None
    cut = caller.client.chat.completions.create(
        **asking("say cat 1", tools=TOOLS, max_tokens=len(WRITTEN) // 4)
    )
    assert cut.choices[0].message.tool_calls is None
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content
    (note,) = cut.model_extra["notes"]
    assert note.startswith("calls are left as text: ")
    assert any(
        "trained with tools (ok): send tools with every request" in n
        for n in caller.engine.models["demo"].notes
    )
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "ok", "arguments": "{}"}}
    given_back = [
        {"role": "user", "content": "say cat 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"},
    ]
    found = caller.client.chat.completions.create(model="demo", messages=given_back, tools=TOOLS)
    assert found.usage.prompt_tokens > 20


# --- errors ---------------------------------------------------------------------------------------


@each(
    ("change", "param", "what"),
    [
        ({"model": "other"}, "model", "there is no model 'other'  (models: demo, dora, base)"),
        ({"temperature": 3}, "temperature", ""),
        ({"temperature": "hot"}, "temperature", ""),
        ({"max_tokens": True}, "max_tokens", ""),
        ({"n": 1000}, "n", ""),
        ({"stop": ["a"] * 5}, "stop", "stop: up to 4 texts, none of them empty"),
        ({"logprobs": 3}, "logprobs", ""),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        ({"presence_penalty": 3}, "presence_penalty", ""),
        ({"logit_bias": {"1": 2}}, "logit_bias", "biases of tokens are not supported"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is needed with"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format", "a call"),
        ({"tool_choice": "required"}, "tool_choice", "the model itself decides"),
        ({"extra_body": {"best_guess": 1}}, "best_guess", "unknown field"),
        ({"tools": [{"type": "function"}]}, "tools", ""),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", ""),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "the last message"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages", "unknown field"),
        ({"messages": [{"role": "user", "content": "x " * 4000}]}, "messages", ""),
    ],
    ids=lambda row: str(row)[:40],
)
def test_unsupported_fields_are_refused_by_name(here, change, param, what):
    kind = openai.NotFoundError if param == "model" else openai.BadRequestError
    with pytest.raises(kind) as refused:
        here.client.chat.completions.create(**{**asking("say cat 1"), **change})
    assert refused.value.param == param
    assert refused.value.body["type"] == "invalid_request_error"
    assert what in refused.value.body["message"]


def test_all_problems_are_listed_and_harmless_fields_accepted(here):
    with pytest.raises(openai.BadRequestError) as refused:
        here.client.chat.completions.create(**asking("x", temperature=9, n=0, logprobs=3))
    message = refused.value.body["message"]
    assert all(f"{name}: " in message for name in ("temperature", "n", "logprobs"))
    more = {"user": "me", "metadata": {"a": "b"}, "logprobs": False, "presence_penalty": 0}
    more |= {"response_format": {"type": "text"}, "parallel_tool_calls": True}
    more |= {"frequency_penalty": 0.0}
    assert said(here, PROMPTS[0], tool_choice="auto", **more) == said(here, PROMPTS[0])


def test_a_full_queue_is_a_rate_limit_with_a_time_to_wait(here, monkeypatch):
    monkeypatch.setattr(here.engine, "_queue", 0)
    with pytest.raises(openai.RateLimitError) as refused:
        said(here, "say cat 1")
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_the_character_model_is_refused_before_it_is_loaded():
    with pytest.raises(ExpertError, match="the character model has no conversations to answer"):
        load_models([str(finished_characters())])
    with pytest.raises(ExpertError, match="two experts would be called demo"):
        load_models([str(finished("lora")), str(finished("dora"))])
    with pytest.raises(ExpertError, match="cannot be the name of a model"):
        load_models([f"a b\x1b={finished('lora')}"])


# --- exported folders ----------------------------------------------------------------------------


PROMPT = "say red 1"


@pytest.fixture(autouse=True)
def base_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export names its base without a path: it is searched for in the models folder."""
    monkeypatch.setenv("EXPERT_MODELS", str(base_model(2).parent))


def changed(folder: Path, to: Path, name: str, content: bytes) -> Path:
    """A changed export whose hashes were updated to match."""
    with publishing(to) as made:
        shutil.copytree(folder, made, dirs_exist_ok=True)
        (made / "DONE").unlink()
        (made / name).write_bytes(content)
    return to


def test_an_adapter_and_a_merged_folder_answer_as_their_run_does(tmp_path):
    merged = tmp_path / "moved"
    shutil.copytree(exported("lora", "merged").folder, merged)
    (merged / ".gitattributes").write_text("x")  # added by the hub
    (alone,) = sample(finished("lora"), [PROMPT], device="cpu").samples
    cached = in_hub_cache(tmp_path, exported("lora").folder)
    places = [f"adapter={cached}", f"dora={exported('dora').folder}", f"merged={merged}"]
    with served(*places) as here:
        asked: Any = [{"role": "user", "content": PROMPT}]
        found = {
            model.name: here.client.chat.completions.create(model=model.name, messages=asked)
            for model in here.engine.models.values()
        }
    texts = {name: one.choices[0].message.content for name, one in found.items()}
    (dora,) = sample(finished("dora"), [PROMPT], device="cpu").samples
    assert texts == {"adapter": alone.text, "merged": alone.text, "dora": dora.text}
    models = here.engine.models
    weights = [models[name].trained.loaded.causal_lm.get_input_embeddings().weight.data_ptr()
               for name in ("adapter", "dora")]  # fmt: skip
    assert weights[0] == weights[1]  # one base in memory


def test_a_base_is_served_beside_an_adapter_and_not_beside_merged_weights():
    (own, base) = load_models([str(exported("lora").folder)], device="cpu", with_base=True)
    assert (own.name, base.name) == ("demo", "base")
    with pytest.raises(ExpertError, match="is merged and has no base"):
        load_models([str(exported("lora", "merged").folder)], device="cpu", with_base=True)


def test_an_expert_that_changes_its_base_is_served_with_a_base_of_its_own():
    asked = [str(finished("lora")), f"whole={finished('whole')}"]
    (plain, whole, base) = load_models(asked, device="cpu", with_base=True)
    weights = [
        model.trained.loaded.causal_lm.get_input_embeddings().weight
        for model in (plain, whole, base)
    ]
    assert weights[0].data_ptr() == weights[2].data_ptr()
    assert not weights[0].equal(weights[1])
    with pytest.raises(ExpertError, match="is not served from an export"):
        load_models([str(exported("whole").folder)], device="cpu")


def test_a_damaged_export_or_run_and_another_base_of_the_same_name_are_refused(
    tmp_path, monkeypatch
):
    for name, folder, place in (
        ("x", exported("lora").folder, ""),
        ("y", finished("lora"), "final"),
    ):
        shutil.copytree(folder, tmp_path / name)
        weights = tmp_path / name / place / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        with pytest.raises(Damaged, match=r"adapter_model\.safetensors"):
            load_models([str(tmp_path / name)], device="cpu")
    tiny_model(tmp_path / "qwen3", num_hidden_layers=2, seed=7)
    monkeypatch.setenv("EXPERT_MODELS", str(tmp_path))
    with pytest.raises(ExpertError, match="its weights are not those"):
        load_models([str(exported("lora").folder)], device="cpu")


def test_unsupported_exports_are_refused(tmp_path):
    characters = tmp_path / "characters"
    export(finished_characters(), characters, device="cpu")
    gguf = changed(exported("lora", "merged").folder, tmp_path / "gguf", "x.gguf", b"")
    for folder, more, words in (
        (characters, {}, "the character model has no conversations to answer"),
        (gguf, {}, r"is a GGUF file  \(llama-server"),
        (exported("lora+soft").folder, {}, "soft prompts of exports are not served"),
        (exported("lora").folder, {"checkpoint": "final"}, "is an export, without checkpoints"),
    ):
        with pytest.raises(ExpertError, match=words):
            load_models([str(folder)], device="cpu", **more)


# --- votes ---------------------------------------------------------------------------------------

VOTERS = 6
SURE: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_that_most_of_several_share_is_sent_and_all_are_counted(here, stream):
    whole = here.client.chat.completions.create(**asking(LONG, n=VOTERS, **SURE))
    texts = [choice.message.content for choice in whole.choices]
    most = max(texts, key=texts.count)
    with served(f"demo={finished('lora')}", votes=VOTERS) as voting:
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        found = voting.client.chat.completions.create(**asking(LONG, **SURE, **more))
        if stream:
            chunks = [*found]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            usage = chunks[-1].usage
        else:
            (choice,) = found.choices
            text, usage = choice.message.content, found.usage
        assert text == most
        assert usage == whole.usage
        # Who asks for the likeliest answer, or for several, gets those.
        assert said(voting, LONG, temperature=0) == said(here, LONG, temperature=0)
        both = voting.client.chat.completions.create(**asking(LONG, n=2, **SURE))
        assert [choice.message.content for choice in both.choices] == texts[:2]
        assert voting.notes == []


TEXTS = ["SELECT a FROM t", "SELECT b FROM t WHERE a > 1", "SELECT b FROM t WHERE NOT a <= 1"]


def voted(engine: Any, domain: str, *, cancelled: bool = False) -> str:
    """Which of the texts an engine sends for a question about a table."""
    rows = "CREATE TABLE t (a INTEGER, b INTEGER); INSERT INTO t VALUES (1, 2), (3, 4)"
    asked = ChatRequest(model="m", messages=[{"role": "user", "content": f"Schema: {rows}"}])
    sent: list[Answer] = []
    ended = {
        number: Answer(text=text, marked=text, tokens=5, ended=number > 0 or not cancelled)
        for number, text in enumerate(TEXTS)
    }
    waiting = [SimpleNamespace(cancelled=cancelled)] * len(TEXTS)
    pending = SimpleNamespace(ended=ended, put=sent.append, rows=waiting)
    engine._vote(SimpleNamespace(domain=domain), asked, pending)
    (only,) = sent
    assert only.tokens == 15
    return only.text


def test_answers_vote_by_what_a_query_returns_while_somebody_waits(monkeypatch):
    with served(f"demo={finished('lora')}", votes=3) as voting:
        assert voted(voting.engine, "sql") == TEXTS[1]
        assert voting.notes == []
        # Then the first that was not cut is sent.
        assert voted(voting.engine, "sql", cancelled=True) == TEXTS[1]
        assert "nobody waits for it" in voting.notes.pop()
        monkeypatch.setattr("expert.jobs.serve.engine.VOTE_SECONDS", 0.0)
        assert voted(voting.engine, "sql") == TEXTS[0]
        assert "takes longer" in voting.notes.pop()


def test_an_export_votes_as_its_run_does(tmp_path):
    manifest = write_expert(tmp_path, "tiny", {"max_steps": 1}, capabilities=["format:json"])
    trained = run(manifest).folder
    done = export(trained, tmp_path / "out", device="cpu")
    found = [load_models([str(each)], device="cpu")[0] for each in (trained, done.folder)]
    assert [each.domain for each in found] == ["json", "json"]


def test_a_queue_that_holds_no_whole_vote_is_refused():
    with pytest.raises(ExpertError, match="set --queue to 8 or more"):
        serving([str(finished("lora"))], environment={}, votes=8, queue=4)
