"""The weights in training answer prompts, and groups of their answers become the batches of a step
(GRPO)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from expert.answer.cache import attention_for
from expert.answer.decoding import resolve_decoding
from expert.answer.engine import answer_row, finish_rows
from expert.answer.scheduler import CACHE_SHARE, AnswerRow, Scheduler
from expert.answer.steps import AnswerModel
from expert.data.feed.batches import BatchShape
from expert.data.feed.feed import FedStep, PackedFeed, StepWork
from expert.data.pack.pack_index import OverlongCounts, PackIndex
from expert.data.records import Example, Segment
from expert.data.template.text_tools import text_tools
from expert.data.tokens.documents import FlatDocuments, Shard
from expert.data.tokens.encoder import edges_of
from expert.model.device_memory import release_memory
from expert.run.session.session import model_of
from expert.training.objectives.rewarded import advantages

if TYPE_CHECKING:
    from expert.data.feed.order import StepBins
    from expert.run.session.session import Session

Rewarded = tuple[Sequence[int], float]
"""The tokens of an answer, and its reward."""


class Prompt(NamedTuple):
    text: str
    ids: list[int]


class Sampler:
    """Answers with the weights in training, where they are."""

    def __init__(self, session: Session, count: int, note: Callable[[str], None]) -> None:
        """`count`: answers to each prompt."""
        self._built, plan = model_of(session), session.plan
        loaded, device = self._built.loaded, session.device
        assert loaded.folder is not None
        encoder, template = text_tools(loaded.folder, plan.model.prompt_template)
        trained = SimpleNamespace(loaded=loaded, device=device, encoder=encoder, template=template)
        self._model, self._count = AnswerModel(trained, note), count
        self._encoder, self._template = encoder, template
        # Neither penalties nor limits nor a grammar: what they draw is not what the weights would.
        neutral = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        how, _ = resolve_decoding(plan, neutral)
        self._how = replace(how, top_k=None, frequency_penalty=0, presence_penalty=0, grammar="")
        self._work: Scheduler | None = None
        free, needed = self._model.free_bytes(), plan.memory.peak_bytes or 0
        if device.type == "cuda":
            needed -= torch.cuda.memory_allocated(device)
        self._stays = (1 - CACHE_SHARE) * free > needed
        """Whether the KV cache, and the graphs that use it, have room beside a step."""

    def prompt(self, example: Example) -> Prompt | None:
        """A prompt as the model reads it; None if it leaves no room for an answer."""
        text = self._template.prompt(example.turns[:-1], example.tools)
        ids = self._encoder.encode([[Segment(text, learn=False)]]).ids.tolist()
        return Prompt(text, ids) if len(ids) < self._model.context else None

    def answers(self, prompts: Sequence[Prompt], *, seed: int) -> list[AnswerRow]:
        """So many answers to each prompt, in order."""
        asked = [prompt for prompt in prompts for _ in range(self._count)]
        rows = [
            answer_row(self._model, each.text, self._how, seed=seed, number=number, ids=each.ids)
            for number, each in enumerate(asked)
        ]
        with self._answering():
            self._work = self._work or Scheduler(self._model)
            finish_rows(self._work, rows)
        if not self._stays:
            self._work = None
            release_memory(self._model.device)
        return rows

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """With a KV cache, and without dropout and what is compiled for training."""
        loaded, model = self._built.loaded, self._model.model
        before = model.config._attn_implementation, model.config.use_cache
        compiles, compiler = loaded.kernels.compile, torch.compiler
        eager = compiler.set_stance("force_eager") if compiles else nullcontext()
        model.set_attn_implementation(attention_for(model.config))
        model.config.use_cache = True
        try:
            # Rounded weights are not kept: captured steps would read them after they changed.
            with eager, loaded.answering(), self._built.engine.precision(keeps=False):
                yield
        finally:
            model.set_attn_implementation(before[0])
            model.config.use_cache = before[1]


# --- batches of answers ---------------------------------------------------------------------------


def laid_out(
    groups: Sequence[tuple[Sequence[int], Sequence[Rewarded]]], count: int, places: int
) -> tuple[FlatDocuments, PackIndex] | None:
    """Groups of a prompt and its answers: those with a difference, as documents of at most `count`
    answers, in bins of at most `places` tokens where that is possible; None if there is none."""
    documents: list[tuple[Sequence[int], list[tuple[Sequence[int], float]]]] = []
    for prompt, own in groups:
        gains, room = advantages([reward for _, reward in own]), 0
        for (ids, _), gain in zip(own, gains, strict=True):
            if not any(gains):
                break
            needed = 1 + len(ids)
            if needed > room:
                documents.append((prompt, []))
                room = places - len(prompt) + 1
            documents[-1][1].append((ids, gain))
            room -= needed
    if not documents:
        return None
    tokens, spans = list[int](), list[int]()
    lengths = list[int]()
    reference = np.zeros((len(documents), count), np.float32)
    for number, (prompt, answers) in enumerate(documents):
        row = list(prompt[:-1])
        for place, (ids, gain) in enumerate(answers):
            # A branch begins with the end of the prompt, from which its first token is predicted.
            begin = len(row)
            row += [prompt[-1], *ids]
            spans += [begin, begin, begin + 1, len(row)]
            reference[number, place] = gain
        spans += [len(row)] * (4 * (count - len(answers)))
        tokens += row
        lengths.append(len(row))
    sizes = np.array(lengths, np.int32)
    edges = edges_of(np.full(len(sizes), 4 * count, np.int32))
    shard = Shard(np.array(tokens, np.int32), edges_of(sizes), np.array(spans, np.int32), edges)
    store = FlatDocuments([shard])
    store.reference = reference
    bins, filled = [0], 0
    for number, size in enumerate(lengths):
        if filled and filled + size > places:
            bins.append(number)
            filled = 0
        filled += size
    index = PackIndex(
        rule="best-fit",
        length=max(places, *lengths),
        soft_tokens=0,
        examples=len(sizes),
        overlong=OverlongCounts(),
        piece_document=np.arange(len(sizes), dtype=np.int32),
        piece_start=np.zeros_like(sizes),
        piece_stop=sizes,
        bin_offsets=np.array([*bins, len(sizes)], np.int64),
    )
    return store, index


def fed_batches(
    step: StepBins,
    packed: tuple[FlatDocuments, PackIndex],
    count: int,
    *,
    device: torch.device,
    pin: bool = False,
) -> Iterator[FedStep]:
    """The batches of a step, each a bin."""
    store, index = packed
    feed = PackedFeed(
        [StepWork(replace(step, bins=np.arange(index.bins)), index, store)],
        BatchShape.for_index(index, 1, branches=count),
        batches_per_step=index.bins,
        device=device,
        pin=pin,
        flat=True,
    )
    with feed:
        for fed in feed:
            yield replace(fed, step=step)
