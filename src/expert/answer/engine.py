"""Answers to many prompts, generated together, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from expert.answer.decoding import DecodingSettings, end_tokens, stop_texts
from expert.answer.grammar import Grammar
from expert.answer.scheduler import AnswerRow, Scheduler
from expert.answer.steps import AnswerModel
from expert.answer.writer import Answer, AnswerWriter, Tell
from expert.core.errors import ExpertError
from expert.core.text import counted
from expert.data.records import Example, Segment
from expert.model.device_memory import release_memory


class PromptTooLong(ExpertError):
    """A prompt that leaves no room for an answer."""


def answer_row(
    answer_model: AnswerModel,
    text: str,
    how: DecodingSettings,
    *,
    seed: int,
    number: int = 0,
    plain: bool = False,
    special: bool = False,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    ids: Sequence[int] | None = None,
    tell: Tell | None = None,
    end: Callable[[str], None] = lambda failed: None,
) -> AnswerRow:
    """The row that continues a text, the whole input of the model; PromptTooLong if there is no
    room for an answer: positions beyond the context were never trained.

    `number`: random numbers depend on it and the seed. `plain`: the text has no turns. `special`:
    special tokens are part of the answer, which may be a call of a tool: it has no grammar then,
    nor has a plain text. `stop`: further texts that end it. `ids`: of the text, if they are known.
    """
    encoder, template = answer_model.trained.encoder, answer_model.trained.template
    if ids is None:
        ids = encoder.encode([[Segment(text, learn=False)]]).ids.tolist()
    room = answer_model.context - answer_model.soft_tokens - len(ids)
    if not ids:
        raise PromptTooLong("an empty text cannot be continued  (write a word)")
    if room <= 0:
        raise PromptTooLong(
            f"the prompt has {len(ids) + answer_model.soft_tokens:,} tokens with its template, and "
            f"the context is {answer_model.context:,} including the answer  (shorten it, or use a "
            "model with a longer context)"
        )
    cut = ""
    if room < how.max_new_tokens:
        cut = f"cut after {counted(room, 'token')}: the model's context is full"
        how = replace(how, max_new_tokens=room)
    stops = [*stop_texts(how, encoder, template, plain=plain), *stop]
    ends = end_tokens(encoder, template)
    writer = AnswerWriter(encoder.tokenizer, ends, stops, tell, strip=not plain, special=special)
    grammar = None
    if how.grammar and not plain and not special:
        grammar = Grammar(how.grammar, encoder, answer_model.vocabulary, ends)
    return AnswerRow(
        *(ids, how, writer),
        seed=seed,
        number=number,
        cut=cut,
        end=end,
        grammar=grammar,
        logprobs=logprobs,
    )


def finish_rows(
    work: Scheduler, rows: Sequence[AnswerRow], *, tell: Callable[[int], None] = lambda done: None
) -> None:
    """Generate the answers of all rows, in smaller batches if memory runs out. `tell` is called
    with the number of finished answers."""
    # Longest first: a lack of memory shows at once, and rows of similar length need less padding.
    work.waiting.extend(sorted(rows, key=lambda row: -len(row.prompt)))
    done = 0
    with torch.no_grad():  # not inference_mode: what it caches could not be trained with
        while work.busy:
            failure: RuntimeError | None = None
            try:
                work.turn()
            except RuntimeError as error:
                failure = error
            if failure is not None:
                if not work.retry(failure):
                    raise failure
                del failure  # its traceback holds tensors
                release_memory(work.device)
            now = sum(row.is_over for row in rows)
            if now > done:
                done = now
                tell(done)


def answer_all(
    trained: Any,
    questions: Sequence[Example],
    how: DecodingSettings,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    rows: int | None = None,
    tell: Callable[[int, int], None] = lambda done, of: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[Answer]:
    """Answer every question, in order; an answer does not depend on the other questions.

    `trained`: see AnswerModel. `numbers`: the questions' indices, if they are some of several;
    sampling depends on them. `rows`: of the largest batch; None: as many as fit.
    """
    answer_model, refused = AnswerModel(trained, note), dict[int, Answer]()
    asked: dict[int, AnswerRow] = {}
    for place, question in enumerate(questions):
        text = trained.template.prompt(question.turns, question.tools)
        number = place if numbers is None else numbers[place]
        try:
            own = replace(how, grammar="") if question.tools else how
            asked[place] = answer_row(answer_model, text, own, seed=seed, number=number)
        except PromptTooLong:
            full = "the prompt fills the context"
            refused[place] = Answer(text="", marked="", tokens=0, ended=False, refused=full)
    finish_rows(
        Scheduler(answer_model, most=rows),
        list(asked.values()),
        tell=lambda done: tell(done + len(refused), len(questions)),
    )
    return [refused.get(place) or asked[place].answer() for place in range(len(questions))]
