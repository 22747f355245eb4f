"""Batched answers: each row as if it were alone, and alone as `expert sample` answers."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from expert.answer import cache as answer_cache
from expert.answer import steps
from expert.answer.decoding import DecodingSettings, end_tokens, generation_config
from expert.answer.engine import answer_all
from expert.answer.steps import AnswerModel
from expert.core.errors import ExpertError
from expert.core.rundir import RunFolder
from expert.data.records import Example, Segment, Turn
from expert.jobs.sample.sample import sample
from expert.jobs.validate.row_losses import row_losses
from expert.run.stored.choose_checkpoint import BASE, choose
from expert.run.stored.load import load_base, load_trained, read_plan
from expert.training import evaluation
from tests.each import each
from tests.jobs.runs import WORDS
from tests.jobs.trained_runs import finished, finished_characters

CPU = torch.device("cpu")
PROMPTS = [f"say {word} {number} {'please ' * (number % 5)}" for number, word in enumerate(WORDS)]
GREEDY = DecodingSettings(
    temperature=0.0,
    top_p=1.0,
    top_k=None,
    min_p=0.0,
    repetition_penalty=1.0,
    max_new_tokens=12,
    stop_sequences=(),
)
WAYS = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, repetition_penalty=1.3),
    "drawn": replace(GREEDY, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01),
    "stopped": replace(GREEDY, stop_sequences=("and", "1")),
}


@cache
def loaded(kind: str):
    folder = RunFolder(finished(kind))
    return load_trained(folder, read_plan(folder), choose(folder, "final"), device=CPU)


def question(prompt: str) -> Example:
    return Example((Turn("user", prompt),))


QUESTIONS = [question(prompt) for prompt in PROMPTS]
ANSWERED = [Example((*asked.turns, Turn("assistant", "cat"))) for asked in QUESTIONS]
LENGTHS = [question(f"say {'cat and ' * count}dog") for count in (20, 19, 5, 14, 1, 0, 2, 6)]


@each(
    ("kind", "way"), [*(("lora", way) for way in WAYS), ("soft", "drawn"), ("lora+soft", "greedy")]
)
def test_batched_answers_are_those_of_expert_sample(kind, way):
    how = asdict(WAYS[way])
    alone = sample(finished(kind), PROMPTS, plain=False, seed=0, device="cpu", decoding=how)
    found = answer_all(loaded(kind), QUESTIONS, WAYS[way], numbers=[0] * len(QUESTIONS))
    assert [answer.text for answer in found] == [one.text for one in alone.samples]
    assert len({answer.text for answer in found}) > 1, "all alike would prove nothing"


@each("way", ["greedy", "penalised"])
def test_answers_are_those_of_transformers(way):
    """Its own generate, prompt by prompt; the others are drawn with other numbers."""
    how, trained = WAYS[way], loaded("lora")
    model, encoder, template = trained.loaded.causal_lm, trained.encoder, trained.template
    ends = end_tokens(encoder, template)
    model.generation_config = config = generation_config(how, ends)
    for asked, answer in zip(QUESTIONS, answer_all(trained, QUESTIONS, how), strict=True):
        text = template.prompt(asked.turns)
        ids = torch.tensor([encoder.encode([[Segment(text, learn=False)]]).ids.tolist()])
        reported = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        said = [token for token in reported[0, ids.shape[1] :].tolist() if token not in ends]
        assert encoder.tokenizer.decode(said).strip() == answer.text


def test_the_seed_determines_sampled_answers():
    how, trained = replace(GREEDY, temperature=1.5), loaded("lora")
    first = answer_all(trained, QUESTIONS, how, seed=1)
    assert answer_all(trained, QUESTIONS, how, seed=1, rows=3) == first
    assert answer_all(trained, QUESTIONS, how, seed=2) != first
    numbers = [1, 4, 7]  # some of the questions are drawn as among all
    some = [QUESTIONS[number] for number in numbers]
    found = answer_all(trained, some, how, seed=1, numbers=numbers)
    assert [one.text for one in found] == [first[number].text for number in numbers]
    likeliest = answer_all(trained, QUESTIONS, GREEDY)
    for one_token in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert answer_all(trained, QUESTIONS, replace(how, **one_token)) == likeliest


@each("temperature", [0.0, 0.9])
def test_rows_that_have_ended_are_cleared_away(temperature, monkeypatch):
    how = replace(GREEDY, repetition_penalty=1.3, temperature=temperature)
    # A stop sequence in the first answer, so that it ends before the others.
    first = answer_all(loaded("lora"), QUESTIONS, how)[0].text
    how = replace(how, stop_sequences=(first[len(first) // 2],))
    expected = answer_all(loaded("lora"), QUESTIONS, how)
    assert len({answer.tokens for answer in expected}) > 1
    for share in (0.0, 1.0):  # never, and at once
        monkeypatch.setattr(steps, "COMPACT_BELOW", share)
        assert answer_all(loaded("lora"), QUESTIONS, how) == expected


def test_what_does_not_fit_is_halved_and_nothing_is_lost(monkeypatch):
    read, sizes = AnswerModel.read, []

    def small_card(answer_model, group):
        sizes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(answer_model, group)

    expected = answer_all(loaded("lora"), QUESTIONS, GREEDY)
    monkeypatch.setattr(AnswerModel, "read", small_card)
    reported: list[tuple[int, int]] = []
    found = answer_all(loaded("lora"), QUESTIONS, GREEDY, tell=lambda *done: reported.append(done))
    assert found == expected
    assert {6, 4, 2} <= set(sizes)
    assert reported[-1] == (8, 8)


@pytest.fixture
def cudnn():
    """cuDNN's attention, as it was afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def failing_cudnn():
    if torch.backends.cuda.cudnn_sdp_enabled():
        raise RuntimeError("Expected mha_graph.execute(handle).is_good() to be true")


def test_where_cudnns_kernel_fails_answers_and_losses_come_from_others(monkeypatch, cudnn):
    expected = answer_all(loaded("lora"), QUESTIONS, GREEDY)
    losses = row_losses(loaded("lora"), ANSWERED)
    for module, name in ((AnswerModel, "read"), (evaluation, "evaluate")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own: failing_cudnn() or own(*given))
    reported: list[str] = []
    assert answer_all(loaded("lora"), QUESTIONS, GREEDY, note=reported.append) == expected
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert row_losses(loaded("lora"), ANSWERED, note=reported.append) == losses
    assert ["cuDNN" in text for text in reported] == [True, True]


def test_losses_on_a_small_card_are_those_of_smaller_batches(monkeypatch):
    plan = loaded("lora").plan.with_values({"batch.eval_batch": 3}, "", "preset")
    trained = replace(loaded("lora"), plan=plan)
    expected, own = row_losses(trained, ANSWERED), evaluation.evaluate

    def small_card(engine, objective, batches):
        if len(batches[0].tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(engine, objective, batches)

    monkeypatch.setattr(evaluation, "evaluate", small_card)
    found = row_losses(trained, ANSWERED)
    assert (found.targets, found.examples) == (expected.targets, expected.examples)
    # Sums of float32 in another order.
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@each("way", WAYS)
def test_prompts_of_all_lengths_are_read_in_groups_and_answered_alike(way, monkeypatch):
    how = replace(WAYS[way], max_new_tokens=16)  # more than there is room for at first
    expected = answer_all(loaded("lora"), LENGTHS, how, rows=1)
    read, groups = AnswerModel.read, []

    def counted(answer_model, group):
        groups.append(len(group))
        return read(answer_model, group)

    monkeypatch.setattr(AnswerModel, "read", counted)
    monkeypatch.setattr(steps, "CACHE_GROWTH", {"cpu": 3})
    assert answer_all(loaded("lora"), LENGTHS, how) == expected
    assert groups == [3, 2, 2, 1]


def test_a_step_that_cannot_be_captured_is_run_and_reported_once(monkeypatch):
    def refuses(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = answer_all(loaded("lora"), LENGTHS, GREEDY)
    monkeypatch.setattr(steps, "step_capture", lambda device: refuses)
    monkeypatch.setattr("expert.answer.prompt_reader.MOST_TOKENS", 0)
    notes: list[str] = []
    assert answer_all(loaded("lora"), LENGTHS, GREEDY, rows=3, note=notes.append) == expected
    assert sum("a step cannot be captured" in note for note in notes) == 1
    how = asdict(GREEDY)
    done = sample(finished("lora"), PROMPTS[:3], plain=False, seed=0, device="cpu", decoding=how)
    assert sum("a step cannot be captured" in note for note in done.notes) == 1


def test_models_without_a_fixed_cache_give_the_same_answers_in_batches(monkeypatch):
    expected = answer_all(loaded("lora"), LENGTHS, WAYS["penalised"])
    monkeypatch.setattr(answer_cache, "supports_fixed_cache", lambda model: False)
    read, sizes = AnswerModel.read, []
    monkeypatch.setattr(
        AnswerModel, "read", lambda *given: sizes.append(len(given[1])) or read(*given)
    )
    assert answer_all(loaded("lora"), LENGTHS, WAYS["penalised"]) == expected
    assert max(sizes) == len(LENGTHS)


def test_a_prompt_that_fills_the_context_is_refused_and_the_others_are_answered():
    config = loaded("lora").loaded.causal_lm.config
    prompts = ["say cat " * config.max_position_embeddings, PROMPTS[0]]
    long, short = answer_all(loaded("lora"), [question(p) for p in prompts], GREEDY)
    assert (long.refused, long.text) == ("the prompt fills the context", "")
    assert short.text == answer_all(loaded("lora"), QUESTIONS, GREEDY)[0].text


def test_the_base_has_no_trained_weights_and_the_character_model_has_no_base():
    folder = RunFolder(finished("full"))
    base = load_base(read_plan(folder), device=CPU)
    assert (base.choice.name, base.loaded.adapter.type) == (BASE, "none")
    tuned = dict(loaded("full").loaded.module.named_parameters())
    own = dict(base.loaded.module.named_parameters())
    assert any(not torch.equal(own[name], tuned[name]) for name in own)
    other = load_base(read_plan(RunFolder(finished("lora"))), device=CPU)
    for name, value in other.loaded.module.named_parameters():
        assert torch.equal(value, own[name]), name
    plan = read_plan(RunFolder(Path(finished_characters())))
    with pytest.raises(ExpertError, match="is trained from scratch, it has no base"):
        load_base(plan, device=CPU)
