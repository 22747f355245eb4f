"""Batched answers: each row as if it were alone, and alone as `expert sample` answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from expert.core.rundir import RunFolder
from expert.data.records import Example, Turn
from expert.jobs.sample import answer_steps
from expert.jobs.sample.decoding import DecodingSettings, generation_config
from expert.jobs.sample.sample import sample
from expert.jobs.validate import answering
from expert.jobs.validate.answering import answer_all
from expert.jobs.validate.row_losses import batch_sums
from expert.model import fixed_cache
from expert.run.stored.choose_checkpoint import BASE, StateNotFound, choose
from expert.run.stored.load import load_base, load_trained, read_plan
from expert.training import evaluation
from tests.each import each
from tests.jobs.runs import WORDS
from tests.jobs.trained_runs import finished, finished_characters
from tests.parallel.fake_capture import FakeCapture

CPU = torch.device("cpu")
EVAL_BATCH = {"batch.eval_batch": 3}
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


def with_changes(**changes) -> DecodingSettings:
    return replace(GREEDY, **changes)


@cache
def loaded(kind: str):
    folder = RunFolder(finished(kind))
    return load_trained(folder, read_plan(folder), choose(folder, "final"), device=CPU)


def question(prompt: str) -> Example:
    return Example((Turn("user", prompt),))


def asked(
    kind: str, how: DecodingSettings, *, rows: int | None = None, seed: int = 0, prompts=PROMPTS
):
    found = answer_all(loaded(kind), [question(p) for p in prompts], how, seed=seed, rows=rows)
    return [(one.text, one.tokens, one.ended) for one in found]


WAYS = {
    "greedy": GREEDY,
    "penalised": with_changes(repetition_penalty=1.3),
    "drawn": with_changes(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01),
    "stopped": with_changes(stop_sequences=("and", "1")),
}


@each(
    ("kind", "way"), [*(("lora", way) for way in WAYS), ("soft", "drawn"), ("lora+soft", "greedy")]
)
def test_batched_answers_are_those_of_each_prompt_alone(kind, way):
    together = asked(kind, WAYS[way], rows=len(PROMPTS))
    one_by_one = asked(kind, WAYS[way], rows=1)
    assert together == one_by_one
    assert len({text for text, _, _ in together}) > 1, "all alike would prove nothing"


@each("way", ["greedy", "penalised", "stopped"])
def test_answers_are_those_of_expert_sample(way):
    how = WAYS[way]
    given = {name: getattr(how, name) for name in DecodingSettings.__annotations__}
    alone = sample(finished("lora"), PROMPTS, plain=False, seed=0, device="cpu", decoding=given)
    assert [text for text, _, _ in asked("lora", how)] == [one.text for one in alone.samples]


@each("way", ["greedy", "penalised"])
def test_answers_are_those_of_transformers(way):
    """Its own generate, prompt by prompt; the others are drawn with other numbers."""
    how, trained = WAYS[way], loaded("lora")
    work = answering._AnswerJob(trained, [question(p) for p in PROMPTS], how, 0, pytest.fail)
    config = generation_config(how, sorted(work.ends))
    model = trained.loaded.causal_lm
    model.generation_config = config
    answers = answer_all(trained, [question(p) for p in PROMPTS], how)
    for prompt, answer in zip(work.prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        reported = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        said = [token for token in reported[0, len(prompt) :].tolist() if token not in work.ends]
        assert work.tokenizer.decode(said).strip() == answer.text


def test_the_seed_determines_sampled_answers():
    how = with_changes(temperature=1.5)
    first = asked("lora", how, seed=1)
    assert asked("lora", how, seed=1, rows=3) == first
    assert asked("lora", how, seed=2) != first
    for one_token in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):  # which is the likeliest
        assert asked("lora", replace(how, **one_token)) == asked("lora", GREEDY)


@each("temperature", [0.0, 0.9])
def test_rows_that_have_ended_are_cleared_away(temperature, monkeypatch):
    how = with_changes(repetition_penalty=1.3, temperature=temperature)
    # A stop sequence in the first answer, so that it ends before the others.
    first = asked("lora", how)[0][0]
    how = replace(how, stop_sequences=(first[len(first) // 2],))
    expected = asked("lora", how)
    assert len({tokens for _, tokens, _ in expected}) > 1
    for share in (0.0, 1.0):  # never, and at once
        monkeypatch.setattr(answer_steps, "COMPACT_BELOW", share)
        assert asked("lora", how) == expected


def test_what_does_not_fit_is_halved_and_nothing_is_lost(monkeypatch):
    read = answer_steps.AnswerModel.read
    sizes = []

    def small_card(answer_model, group):
        sizes.append(len(group))
        if len(group) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(answer_model, group)

    expected = asked("lora", GREEDY)
    monkeypatch.setattr(answer_steps.AnswerModel, "read", small_card)
    reported: list[tuple[int, int]] = []
    found = answer_all(
        loaded("lora"),
        [question(p) for p in PROMPTS],
        GREEDY,
        tell=lambda *more: reported.append(more),
    )
    assert [(one.text, one.tokens, one.ended) for one in found] == expected
    assert {8, 4, 2} <= set(sizes)
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
    said = (Turn("assistant", "cat"),)
    rows = [Example((*question(p).turns, *said)) for p in PROMPTS]
    expected, losses = asked("lora", GREEDY), batch_sums(loaded("lora"), rows)
    for module, name in ((answer_steps.AnswerModel, "read"), (evaluation, "evaluate")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, own=own: failing_cudnn() or own(*given))
    reported: list[str] = []
    found = answer_all(loaded("lora"), [question(p) for p in PROMPTS], GREEDY, note=reported.append)
    assert [(one.text, one.tokens, one.ended) for one in found] == expected
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert batch_sums(loaded("lora"), rows, note=reported.append) == losses
    assert [text.partition(":")[0] for text in reported] == [
        "cuDNN's attention kernel failed to run"
    ] * 2


def test_answers_to_some_of_the_questions_are_drawn_as_among_all():
    every, how = [question(p) for p in PROMPTS], WAYS["drawn"]
    expected = answer_all(loaded("lora"), every, how, seed=5)
    for place in range(3):
        numbers = list(range(len(every)))[place::3]
        some = [every[number] for number in numbers]
        found = answer_all(loaded("lora"), some, how, seed=5, numbers=numbers)
        assert found == expected[place::3]


@each("most", [3, 1])
def test_batches_that_are_shared_out_are_those_of_one_process(most, monkeypatch):
    """Also where one process has to halve its own."""
    said = (Turn("assistant", "cat"),)
    rows = [Example((*question(p).turns, *said)) for p in PROMPTS]
    trained = replace(
        loaded("lora"), plan=loaded("lora").plan.with_values(EVAL_BATCH, "", "preset")
    )
    expected = batch_sums(trained, rows)
    assert len(expected) == 3
    own = evaluation.evaluate

    def small_card(engine, batches):
        if len(batches[0].tokens) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(engine, batches)

    found = [batch_sums(trained, rows, place=place, of=4) for place in (0, 1, 3)]
    assert found == [[expected[0]], [expected[1]], []]
    monkeypatch.setattr(evaluation, "evaluate", small_card)
    last = batch_sums(trained, rows, place=2, of=4)
    assert len(last) == -(-2 // most)
    assert sum(one.examples for one in last) == expected[2].examples
    assert sum(one.targets for one in last) == expected[2].targets


LENGTHS = [question(f"say {'cat and ' * count}dog") for count in (20, 19, 5, 14, 1, 0, 2, 6)]


@each("way", WAYS)
def test_prompts_of_all_lengths_are_read_in_groups_and_answered_alike(way, monkeypatch):
    how = replace(WAYS[way], max_new_tokens=16)  # more than there is room for at first
    expected = answer_all(loaded("lora"), LENGTHS, how, rows=1)
    read, groups = answer_steps.AnswerModel.read, []

    def counted(answer_model, group):
        groups.append(len(group))
        return read(answer_model, group)

    monkeypatch.setattr(answer_steps.AnswerModel, "read", counted)
    monkeypatch.setattr(answering, "MIN_PASS_TOKENS", 0)
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": 3})
    assert answer_all(loaded("lora"), LENGTHS, how) == expected
    assert groups == [3, 2, 2, 1]


class Undone(FakeCapture):
    """As on a card, a captured step is not executed: what it changed is undone."""

    def __call__(self, run):
        changed = [self.steps._positions, self.steps._mask, self.steps._cache.place]
        before = [tensor.clone() for tensor in changed]
        found = super().__call__(run)
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return found


@each("way", WAYS)
def test_captured_steps_give_the_same_answers(way, monkeypatch):
    how = replace(WAYS[way], max_new_tokens=20)
    expected = answer_all(loaded("lora"), LENGTHS, how)
    recorder = Undone()
    make = answer_steps.FixedSteps.__init__

    def reported(self, *args):
        recorder.steps = self
        make(self, *args)

    monkeypatch.setattr(answer_steps.FixedSteps, "__init__", reported)
    monkeypatch.setattr(answer_steps, "step_capture", lambda device: recorder)
    for compact_below in (0.0, 0.99):
        monkeypatch.setattr(answer_steps, "COMPACT_CAPTURED_BELOW", compact_below)
        assert answer_all(loaded("lora"), LENGTHS, how, note=pytest.fail) == expected
    assert recorder.recorded >= 2  # once for each of the two
    assert recorder.replayed > 30


def test_a_step_that_cannot_be_captured_is_run_and_reported_once(monkeypatch):
    def refuses(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = answer_all(loaded("lora"), LENGTHS, GREEDY)
    monkeypatch.setattr(answer_steps, "step_capture", lambda device: refuses)
    notes: list[str] = []
    assert answer_all(loaded("lora"), LENGTHS, GREEDY, rows=3, note=notes.append) == expected
    assert notes == [
        (
            "answers were generated without CUDA graphs, more slowly: a step cannot be "
            "captured: operation not permitted when stream is capturing"
        )
    ]
    given = {name: getattr(GREEDY, name) for name in DecodingSettings.__annotations__}
    done = sample(finished("lora"), PROMPTS[:3], plain=False, seed=0, device="cpu", decoding=given)
    reported = [note for note in done.notes if "a step cannot be captured" in note]
    assert len(reported) == 1  # once for all of them


def test_models_without_a_fixed_cache_give_the_same_answers(monkeypatch):
    expected = answer_all(loaded("lora"), LENGTHS, WAYS["penalised"])
    monkeypatch.setattr(fixed_cache, "supports_fixed_cache", lambda model: False)
    assert answer_all(loaded("lora"), LENGTHS, WAYS["penalised"]) == expected


@each("tokens", [2, 60])
def test_keys_and_values_fit_into_their_share_of_memory(tokens, monkeypatch):
    """Forty prompts, one of which is long: its memory is not taken forty times."""
    questions = [LENGTHS[0], *([LENGTHS[5]] * 39)]
    how = replace(GREEDY, max_new_tokens=tokens)
    work = answering._AnswerJob(loaded("lora"), questions, how, 0, pytest.fail)
    free = 60_000_000
    monkeypatch.setattr(answer_steps.AnswerModel, "free_bytes", lambda answer_model: free)
    monkeypatch.setattr(answer_steps, "CACHE_GROWTH", {"cpu": 128})
    for rows in (work.order, work.order[1:]):
        some = rows[: answering._rows_that_fit(work, rows)]
        assert len(some) > 1
        groups = answering._groups(work, [work.prompts[row] for row in some])
        cache = work.answer_model.begin(groups, tokens)._cache
        assert cache.size >= len(work.prompts[some[0]]) + tokens
        taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert taken <= answering.CACHE_SHARE * free


def test_a_prompt_that_fills_the_context_is_refused_and_the_others_are_answered():
    config = loaded("lora").loaded.causal_lm.config
    prompts = ["say cat " * config.max_position_embeddings, PROMPTS[0]]
    long, short = answer_all(loaded("lora"), [question(p) for p in prompts], GREEDY)
    assert (long.refused, long.text) == ("the prompt fills the context", "")
    assert (short.text, short.tokens, short.ended) == asked("lora", GREEDY)[0]


def test_answers_are_returned_with_special_tokens_too():
    work = answering._AnswerJob(loaded("lora"), [question(PROMPTS[0])], GREEDY, 0, print)
    mark, word = (work.tokenizer.encode(text).ids for text in ("<|im_start|>", "cat"))
    work._writers[0].ids = [*mark, *word, *work.ends]
    (answer,) = work.answers()
    assert (answer.text, answer.marked) == ("cat", "<|im_start|>cat")


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
    with pytest.raises(StateNotFound, match="is trained from scratch, it has no base"):
        load_base(plan, device=CPU)
