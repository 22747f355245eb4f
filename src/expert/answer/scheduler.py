"""Continuous batching for one model: rows join and leave between tokens.

Rounding depends on the batch. In float32, if the best token leads by less than TIE, its row leaves
the batch and is repeated alone from its prompt, exactly as in `expert sample`. Greedy answers
therefore equal those of `expert sample` at any load. In bfloat16 and float16 rounding exceeds many
leads, and close decisions may differ.

Rows of a model whose cache cannot be fixed are a batch if they start together; no row joins it.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from expert.answer.decoding import DecodingSettings
from expert.answer.grammar import Grammar
from expert.answer.prompt_reader import PromptReader
from expert.answer.sampler import Scored, choose_tokens, row_draws
from expert.answer.steps import NO_CONTEXT_LIMIT, AnswerModel, FixedSteps, Steps, cache_growth
from expert.answer.writer import Answer, AnswerWriter
from expert.model.attention import disable_failed_cudnn
from expert.model.device_memory import is_out_of_memory

MOST_ROWS = {"cpu": 128, "cuda": 512}
"""Largest batch. 300 answers of 25 tokens took `tiny` 4.1 s on one CPU core with 128 rows, 4.0 s
with 64, 5.5 s with 32. On a GPU, a step of a small model takes as long for a few rows as for
hundreds: 512 is derived from that, not measured."""
SMALL_BATCH = 8
"""Largest batch if the size of the KV cache is unknown."""
CACHE_SHARE = 0.4
"""Share of free memory for keys and values."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens prefilled between two tokens of running answers, or in one pass; at least one
prompt. A growing cache is filled by one pass alone, of up to GROWING_TIMES as many."""
GROWING_TIMES = 4
REPLAY_TOKENS = 8
"""Tokens that a row which left the batch repeats between two tokens of the others."""
JOIN_EVERY = 2
"""On a GPU, tokens of running answers between two prefills: one for several prompts takes little
longer than one for a single prompt. 32 clients of a 135M model on an H200 got 3,423 tokens/s with
2, 2,592 with 1, 2,559 with 4; 128 clients 5,777, 5,855 and 5,324."""
ONE_PASS = 8192
"""On a GPU, prompts with fewer tokens, padding included, are prefilled in one pass."""


class AnswerRow:
    """One answer while it is generated."""

    def __init__(
        self,
        prompt: Sequence[int],
        how: DecodingSettings,
        writer: AnswerWriter,
        *,
        seed: int,
        number: int = 0,
        cut: str = "",
        end: Callable[[str], None] = lambda failed: None,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> None:
        """`cut`: a note for an answer that does not end by itself. `end` is called once, with the
        reason if the answer failed. `logprobs`: how many tokens' probabilities are reported beside
        that of the chosen one; None: none at all. Uses no device, since another thread may be
        capturing a CUDA graph."""
        self.prompt, self.how, self.writer, self.end = list(prompt), how, writer, end
        self.number, self._cut, self.grammar, self.logprobs = number, cut, grammar, logprobs
        self.scored: list[Scored] = []
        self._stopped = False  # by its grammar
        self.cancelled = False
        self.draws = row_draws(how, seed, number) if how.temperature > 0 else None

    @property
    def ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.writer.ids

    @property
    def most(self) -> int:
        """Largest length of prompt and answer."""
        return len(self.prompt) + self.how.max_new_tokens

    @property
    def is_over(self) -> bool:
        full = len(self.writer.ids) >= self.how.max_new_tokens
        return self.writer.ended or self._stopped or full

    def take(self, token: int, scored: Scored | None = None) -> bool:
        """Add a token; returns whether it was the last."""
        if scored is not None and not self.writer.is_end(token):
            self.scored.append(scored)
        self.writer.take(token)
        if self.grammar is not None and self.grammar.take(token):
            fault = self.grammar.fault
            self._cut = f"cut, its grammar is too complex: {fault}" if fault else self._cut
            self.writer.ended, self._stopped = not fault, True
        if self.is_over:
            self.writer.end()
            self.end("")
        return self.is_over

    def answer(self) -> Answer:
        """The answer so far."""
        writer = self.writer
        return Answer(
            text=writer.text(),
            marked=writer.text(special=True),
            tokens=len(writer.ids),
            ended=writer.ended,
            note="" if writer.ended else self._cut,
            number=self.number,
            scored=tuple(self.scored),
        )


class _Batch:
    """Rows that are computed together; None is a free slot."""

    def __init__(self, rows: Sequence[AnswerRow] = (), *, alone: bool = False) -> None:
        """`alone`: one row, computed as if there were no others."""
        self.slots: list[AnswerRow | None] = list(rows)
        self.steps: Steps | None = None
        self.alone = alone
        self.replay = deque(rows[0].writer.ids if alone else ())
        """Tokens that the row has generated in another batch, to be repeated."""

    @property
    def live(self) -> list[int]:
        return [slot for slot, row in enumerate(self.slots) if row]

    @property
    def rows(self) -> list[AnswerRow]:
        return [row for row in self.slots if row]


class Scheduler:
    """All rows of one model; used by one thread."""

    def __init__(
        self,
        answer_model: AnswerModel,
        *,
        most: int | None = None,
        share: float = 1.0,
        alone: bool = False,
    ) -> None:
        """`most`: rows of the largest batch; None: as many as fit. `share`: of the KV cache memory,
        which all models share. `alone`: every row is computed as if there were no others."""
        kind = answer_model.device.type
        self.waiting: deque[AnswerRow] = deque()
        self._model, self.device, self._on_cpu = answer_model, answer_model.device, kind == "cpu"
        self._alone = alone
        self._prefill_tokens = PREFILL_TOKENS.get(kind, PREFILL_TOKENS["cpu"])
        self._bytes = answer_model.kv_bytes_per_token
        self._budget = share * CACHE_SHARE * answer_model.free_bytes()
        self.most = most or MOST_ROWS.get(kind, MOST_ROWS["cpu"])
        if not self._bytes:
            self.most = min(self.most, SMALL_BATCH)
        self._most_at_first = self.most
        self._exact = next(answer_model.model.parameters()).element_size() == 4
        # On ARM oneDNN multiplies some dozens of rows 2 to 10 times slower than BLAS (LoRA on
        # 256 x 512, one thread of a Neoverse-N1: 10 rows 1.74 ms, not 0.17).
        arm = platform.machine().lower() in ("aarch64", "arm64")
        self._with_onednn = not (self._on_cpu and self._exact and arm)
        self._since_join = 0
        """Turns since rows last joined."""
        self._clear()

    def _clear(self) -> None:
        self._open = _Batch()
        """The batch with a fixed cache, which rows may join."""
        self._closed: list[_Batch] = []
        self._joining: list[AnswerRow] = []
        """Rows being prefilled."""
        self._reader = PromptReader(self._model)

    @property
    def rows(self) -> list[AnswerRow]:
        running = (row for batch in (self._open, *self._closed) for row in batch.rows)
        return [*running, *self._joining]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def turn(self) -> int:
        """Generate one token for every row; returns the number of tokens."""
        self._drop_cancelled()
        was_enabled = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(was_enabled and self._with_onednn)
        try:
            self._admit()
            rows = self.rows
            before = sum(len(row.writer.ids) for row in rows)
            for batch in list(self._closed):
                self._step(batch)
                if not batch.rows:
                    self._closed.remove(batch)
            self._step(self._open)
        finally:
            torch._C._set_mkldnn_enabled(was_enabled)
        if not self._open.rows:
            self._open.slots = []
            if self._on_cpu:
                self._open = _Batch()
        return sum(len(row.writer.ids) for row in rows) - before

    def retry(self, error: Exception) -> bool:
        """After an error queue all rows again: without cuDNN's attention if that failed, in smaller
        batches if memory ran out; returns whether one of these may help."""
        rows = self.rows
        if isinstance(error, RuntimeError) and (text := disable_failed_cudnn(error)):
            self._model.note(text)
        elif is_out_of_memory(error) and len(rows) > 1:
            self.most = max(1, min(self.most, len(rows)) // 2)
        else:
            return False
        self._clear()
        self.waiting.extendleft(reversed(rows))
        return True

    def fail(self, reason: str, *, waiting: bool) -> None:
        """End all running rows with this reason; with `waiting`, queued ones too."""
        rows = self.rows
        if waiting:
            rows += self.waiting
            self.waiting.clear()
        self._clear()
        for row in rows:
            row.end(reason)

    def restore_batch_size(self) -> None:
        """Called when idle: restore the batch size from before memory ran out."""
        self.most = self._most_at_first

    def drop_idle_cache(self) -> None:
        """Free the KV cache and CUDA graphs if no row uses them: another model lacks memory."""
        if not self.rows:
            self._clear()

    def _drop_cancelled(self) -> None:
        self.waiting = deque(row for row in self.waiting if not row.cancelled)
        for batch in (self._open, *self._closed):
            batch.slots = [None if row and row.cancelled else row for row in batch.slots]

    # --- rows that join ---------------------------------------------------------------------------

    def _admit(self) -> None:
        running, joining = self.rows, self._joining
        self._since_join += 1
        if running and not self._on_cpu and self._since_join < JOIN_EVERY:
            return
        fixed = self._model.fixed
        most_tokens, tokens = self._prefill_tokens * (1 if fixed else GROWING_TIMES), 0
        while self.waiting and len(running) + len(joining) < self.most:
            row = self.waiting[0]
            if not joining or row.ids != joining[-1].ids:  # a prompt is read once for all its rows
                tokens += len(row.ids)
            if joining and tokens > most_tokens and (running or not fixed):
                break
            if (running or joining) and not self._fits([*running, *joining, row]):
                break
            joining.append(self.waiting.popleft())
        if not joining:
            return
        self._since_join = 0
        if self._alone:
            self._closed += [_Batch([row], alone=True) for row in joining]
        elif not fixed:
            self._closed.append(_Batch(joining, alone=len(joining) == 1))
        else:
            joining.sort(key=lambda row: -len(row.ids))
            self._join(joining, self._grouped([row.ids for row in joining]))
        self._joining = []

    def _fits(self, rows: Sequence[AnswerRow]) -> bool:
        length = max(row.most for row in rows) + self._model.soft_tokens
        if not self._on_cpu:  # allocated in powers of two, with room to move in
            length += cache_growth(self.device.type, length, captured=True)
        # Scores are float32; sorting and summing them for sampling takes ten times their size.
        times = 10 if any(row.how.temperature for row in rows) else 4
        row_bytes = length * self._bytes + times * 4 * self._model.vocabulary
        return self._rounded(len(rows)) * row_bytes <= self._budget

    def _grouped(self, prompts: list[list[int]]) -> list[list[list[int]]]:
        """Prompts, longest first, in groups for a pass: none is padded to more than twice its
        length, unless all are read in one. Equal neighbours are one prompt."""
        count = sum(1 for _ in groupby(prompts))
        if not self._on_cpu and count * len(prompts[0]) <= ONE_PASS:
            return [prompts]
        groups: list[list[list[int]]] = []
        room = 0
        for prompt, alike in groupby(prompts):
            longest = len(groups[-1][0]) if groups else 0
            if room >= longest and 2 * len(prompt) >= longest > 0:
                groups[-1].extend(alike)
            else:
                groups.append([*alike])
                room, longest = self._prefill_tokens, len(prompt)
            room -= longest
        return groups

    def _join(self, joining: list[AnswerRow], groups: list[list[list[int]]]) -> None:
        """Read prompts into free slots, or into a new batch, with the memory and the CUDA graphs of
        the last one if they fit."""
        batch, live = self._open, self._open.live
        rows = self._rounded(len(live) + len(joining))
        if not live:
            longest = max(row.most for row in joining) + self._model.soft_tokens
            if not (isinstance(batch.steps, FixedSteps) and batch.steps.suits(rows, longest)):
                batch.steps = None  # before the new one is allocated
                batch.steps = FixedSteps(self._model, NO_CONTEXT_LIMIT, rows, self._reader)
            batch.slots = []
        assert isinstance(batch.steps, FixedSteps)
        free = [slot for slot, row in enumerate(batch.slots) if row is None]
        if len(joining) > len(free):
            free += range(len(batch.slots), rows)
            batch.slots += [None] * (rows - len(batch.slots))
            batch.steps.widen(rows, live)
        batch.steps.join(groups, free[: len(joining)])
        for slot, row in zip(free, joining, strict=False):
            batch.slots[slot] = row

    def _rounded(self, rows: int) -> int:
        """On a GPU a CUDA graph is captured per batch size: powers of two keep them few."""
        return rows if self._on_cpu else 2 ** (rows - 1).bit_length()

    # --- one token more ---------------------------------------------------------------------------

    def _step(self, batch: _Batch) -> None:
        """Choose a token for every row of a batch, and compute the scores of the next."""
        rows = batch.rows
        if not rows:
            return
        if batch.steps is None:
            prompts = [row.prompt if batch.alone else row.ids for row in rows]
            room = max(row.how.max_new_tokens for row in rows)
            batch.steps = self._model.begin(prompts, room)
        for _ in range(min(REPLAY_TOKENS, len(batch.replay))):
            batch.steps.advance(self._tensor([batch.replay.popleft()]))
        if batch.replay:
            return
        live, exact = batch.live, self._exact and not batch.alone
        scores = batch.steps.scores[self._tensor(live)]
        tokens, doubtful, scored = choose_tokens(scores, rows, exact=exact)
        taken = dict(zip(live, tokens, strict=True))
        for place, (slot, row) in enumerate(zip(live, rows, strict=True)):
            if doubtful[place]:
                self._closed.append(_Batch([row], alone=True))
            if doubtful[place] or row.take(tokens[place], scored.get(place)):
                batch.slots[slot] = None
        self._advance(batch, batch.steps, taken)
        for row in batch.rows:  # on the host, while a GPU computes the scores
            if row.grammar is not None:
                row.grammar.mask()

    def _advance(self, batch: _Batch, steps: Steps, taken: dict[int, int]) -> None:
        live = batch.live
        if not live:
            return
        if len(live) <= steps.compact_below * len(batch.slots):
            steps.keep(self._tensor(live))
            spare = 0
            if isinstance(steps, FixedSteps):
                spare = self._rounded(len(live)) - len(live)
                steps.widen(len(live) + spare, range(len(live)))
            taken = {place: taken[slot] for place, slot in enumerate(live)}
            batch.slots = [*(batch.slots[slot] for slot in live), *[None] * spare]
        tokens = [taken.get(slot, 0) for slot in range(len(batch.slots))]
        steps.advance(self._tensor(tokens), batch.live)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.device)
