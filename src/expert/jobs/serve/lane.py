"""Continuous batching for one model: rows join and leave between tokens.

Rounding depends on the batch. In float32, if the best token leads by less than TIE, its row leaves
the batch and is repeated alone from its prompt, exactly as in `expert sample`. Greedy answers
therefore equal those of `expert sample` at any load. In bfloat16 and float16 rounding exceeds many
leads, and close decisions may differ.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.jobs.sample.answer_steps import (
    CACHE_SHARE,
    MOST_ROWS,
    NO_CONTEXT_LIMIT,
    AnswerModel,
    FixedSteps,
    Steps,
    cache_growth,
)
from expert.jobs.sample.token_choice import Penalty, row_draws, sample_tokens, seen_tokens
from expert.jobs.serve.prompt_reader import PromptReader

if TYPE_CHECKING:
    from torch import Tensor

    from expert.jobs.sample.answer_writer import AnswerWriter
    from expert.jobs.sample.decoding import DecodingSettings

TIE = 1e-3
"""Float32 logits in a batch differ from those of a row alone by up to 3e-5 with `tiny`, 9e-5 with
SmolLM2-135M."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens prefilled between two tokens of running answers; at least one prompt."""
REPLAY_TOKENS = 8
"""Tokens that a row which left the batch repeats between two tokens of the others."""
SMALL_BATCH = 8
"""Largest batch if the size of the KV cache is unknown, or the model cannot batch."""
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
        number: int,
        end: Callable[[str], None],
    ) -> None:
        """`end` is called once, with the reason if the answer failed. Uses no device, since another
        thread may be capturing a CUDA graph."""
        self.prompt, self.how, self.writer, self.end = list(prompt), how, writer, end
        self.cancelled = False
        self.draws: Tensor | None = None
        self.penalty: Penalty | None = None
        if how.temperature > 0:
            self.draws = row_draws(how, [number], seed)[0]

    def begin(self, answer_model: AnswerModel) -> None:
        """Called before the first token, on the engine's thread."""
        if self.how.repetition_penalty != 1.0 and self.penalty is None:
            seen = seen_tokens([self.prompt], answer_model.vocabulary).to(answer_model.device)
            self.penalty = Penalty(self.how.repetition_penalty, seen)

    @property
    def ids(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.writer.ids

    @property
    def most(self) -> int:
        """Largest length of prompt and answer."""
        return len(self.prompt) + self.how.max_new_tokens

    def take(self, token: int) -> bool:
        """Add a token; returns whether it was the last."""
        import torch

        self.writer.take(token)
        if self.writer.ended or len(self.writer.ids) >= self.how.max_new_tokens:
            self.writer.end()
            self.end("")
            return True
        if self.penalty is not None:
            self.penalty.add(torch.tensor([token], device=self.penalty.device))
        return False


@dataclass(eq=False)
class _SingleRow:
    """A row outside the batch."""

    row: AnswerRow
    to_replay: deque[int]
    """Tokens generated in the batch, to be repeated."""
    steps: Steps | None = None
    """None before the prefill."""


class Lane:
    """All rows of one model; used by one thread."""

    def __init__(
        self, answer_model: AnswerModel, *, most: int | None = None, share: float = 1.0
    ) -> None:
        """`share`: of the KV cache memory, which the lanes of all models share."""
        kind = answer_model.device.type
        self.waiting: deque[AnswerRow] = deque()
        self._answer_model, self.device, self._on_cpu = (
            answer_model,
            answer_model.device,
            kind == "cpu",
        )
        self._prefill_tokens = PREFILL_TOKENS.get(kind, PREFILL_TOKENS["cpu"])
        self.most = most or MOST_ROWS.get(kind, MOST_ROWS["cpu"])
        self._bytes = answer_model.kv_bytes_per_token
        self._budget = share * CACHE_SHARE * answer_model.free_bytes()
        if not self._bytes or not answer_model.fixed:
            self.most = min(self.most, SMALL_BATCH)
        self._most_at_first = self.most
        self._exact = next(answer_model.model.parameters()).element_size() == 4
        arm = platform.machine().lower() in ("aarch64", "arm64")
        self._without_onednn = self._on_cpu and self._exact and arm
        self._slots: list[AnswerRow | None] = []
        self._steps: FixedSteps | None = None
        self._reader = PromptReader(answer_model)
        self._single_rows: list[_SingleRow] = []
        self._joining: list[AnswerRow] = []
        """Rows being prefilled."""
        self._since_join = 0
        """Turns since rows last joined."""

    @property
    def rows(self) -> list[AnswerRow]:
        batch = [row for row in self._slots if row]
        return [*batch, *(single.row for single in self._single_rows), *self._joining]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._single_rows or any(self._slots))

    def turn(self) -> int:
        """Generate one token for every row; returns the number of tokens."""
        self._drop_cancelled()
        with self._products():
            self._admit()
        rows = self.rows
        before = sum(len(row.writer.ids) for row in rows)
        self._step_single_rows()
        with self._products():
            self._step_batch()
        return sum(len(row.writer.ids) for row in rows) - before

    @contextmanager
    def _products(self) -> Iterator[None]:
        """Disable oneDNN on ARM, where it multiplies some dozens of rows 2 to 10 times slower than
        BLAS (LoRA on 256 x 512, one thread of a Neoverse-N1: 10 rows 1.74 ms, not 0.17; 100 rows
        2.76, not 0.91). Not for rows outside the batch, which compute like `expert sample`."""
        import torch

        was_enabled = torch._C._get_mkldnn_enabled()
        if self._without_onednn:
            torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(was_enabled)

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

    def requeue(self, *, halve: bool) -> bool:
        """Queue all rows again, in batches of half the size if `halve`; False if a single row ran
        out of memory."""
        rows = self.rows
        if halve and len(rows) <= 1:
            return False
        self._clear()
        if halve:
            self.most = max(1, min(self.most, len(rows)) // 2)
        self.waiting.extendleft(reversed(rows))
        return True

    def drop_idle_cache(self) -> None:
        """Free the KV cache and CUDA graphs if no row uses them: another model lacks memory."""
        if not self.rows:
            self._steps, self._reader = None, PromptReader(self._answer_model)

    def _clear(self) -> None:
        self._slots, self._steps, self._single_rows, self._joining = [], None, [], []
        self._reader = PromptReader(self._answer_model)

    def _drop_cancelled(self) -> None:
        self.waiting = deque(row for row in self.waiting if not row.cancelled)
        self._slots = [None if row and row.cancelled else row for row in self._slots]
        self._single_rows = [single for single in self._single_rows if not single.row.cancelled]

    # --- rows that join ---------------------------------------------------------------------------

    def _admit(self) -> None:
        running, tokens = self.rows, 0
        joining = self._joining
        self._since_join += 1
        if running and not self._on_cpu and self._since_join < JOIN_EVERY:
            return
        while self.waiting and len(running) + len(joining) < self.most:
            row = self.waiting[0]
            tokens += len(row.ids)
            if joining and tokens > self._prefill_tokens:
                break
            if (running or joining) and not self._fits([*running, *joining, row]):
                break
            joining.append(self.waiting.popleft())
        if not joining:
            return
        self._since_join = 0
        for row in joining:
            row.begin(self._answer_model)
        if self._answer_model.fixed:
            joining.sort(key=lambda row: -len(row.ids))
            prompts = [row.ids for row in joining]
            one_pass = not self._on_cpu and len(prompts) * len(prompts[0]) <= ONE_PASS
            self._join(joining, [prompts] if one_pass else _grouped_by_length(prompts))
        else:
            self._single_rows += [_SingleRow(row, deque(row.writer.ids)) for row in joining]
        self._joining = []

    def _fits(self, rows: Sequence[AnswerRow]) -> bool:
        length = max(row.most for row in rows) + self._answer_model.soft_tokens
        if not self._on_cpu:  # allocated in powers of two, with room to move in
            length += cache_growth(self.device.type, length, captured=True)
        return self._rounded(len(rows)) * length * self._bytes <= self._budget

    def _join(self, joining: list[AnswerRow], groups: list[list[list[int]]]) -> None:
        import torch

        if not any(self._slots):
            self._begin(joining, groups)
            return
        assert self._steps is not None
        live = [slot for slot, row in enumerate(self._slots) if row]
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        slots = len(self._slots)
        if len(joining) > len(free):
            rows = self._rounded(len(live) + len(joining))
            self._steps.widen(rows, torch.tensor(live, device=self.device))
            self._slots += [None] * (rows - slots)
            free += range(slots, rows)
        self._steps.join(groups, free[: len(joining)])
        for slot, row in zip(free, joining, strict=False):
            self._slots[slot] = row

    def _begin(self, joining: list[AnswerRow], groups: list[list[list[int]]]) -> None:
        """A new batch, in the memory and with the CUDA graphs of the last one if they fit."""
        rows = self._rounded(len(joining))
        longest = max(row.most for row in joining) + self._answer_model.soft_tokens
        if self._steps is None or not self._steps.suits(rows, longest):
            self._steps = None  # before the new one is allocated
            self._steps = FixedSteps(
                self._answer_model, groups, NO_CONTEXT_LIMIT, rows=rows, reader=self._reader
            )
        else:
            self._steps.clear(rows)
            self._steps.join(groups, range(len(joining)))
        self._slots = [*joining, *[None] * (rows - len(joining))]

    def _rounded(self, rows: int) -> int:
        """On a GPU a CUDA graph is captured per batch size: powers of two keep them few."""
        return rows if self._on_cpu else 2 ** (rows - 1).bit_length()

    # --- one token more ---------------------------------------------------------------------------

    def _step_batch(self) -> None:
        import torch

        live = [slot for slot, row in enumerate(self._slots) if row]
        if self._steps is not None and live:
            rows = [row for row in self._slots if row]
            index = torch.tensor(live, device=self.device)
            tokens, doubtful = choose_tokens(self._steps.scores[index], rows, exact=self._exact)
            taken = dict(zip(live, tokens, strict=True))
            for slot, row, doubt in zip(live, rows, doubtful, strict=True):
                if doubt:
                    self._single_rows.append(_SingleRow(row, deque(row.writer.ids)))
                if doubt or row.take(taken[slot]):
                    self._slots[slot] = None
            self._advance(taken)
        if not any(self._slots):
            self._slots = []
            if self._on_cpu:
                self._steps = None

    def _advance(self, taken: dict[int, int]) -> None:
        import torch

        assert self._steps is not None
        device = self.device
        live = [slot for slot, row in enumerate(self._slots) if row]
        if not live:
            return
        tokens = [taken.get(slot, 0) for slot in range(len(self._slots))]
        if len(live) <= self._steps.compact_below * len(self._slots):
            self._steps.keep(torch.tensor(live, device=device))
            spare = self._rounded(len(live)) - len(live)
            self._steps.widen(len(live) + spare, torch.arange(len(live), device=device))
            self._slots = [*(self._slots[slot] for slot in live), *[None] * spare]
            tokens = [*(taken[slot] for slot in live), *[0] * spare]
            live = list(range(len(live)))
        self._steps.make_room(torch.tensor(live, device=device))
        self._steps.advance(torch.tensor(tokens, device=device))

    def _step_single_rows(self) -> None:
        import torch

        def one(token: int) -> Tensor:
            return torch.tensor([token], device=self.device)

        for single in list(self._single_rows):
            if single.steps is None:
                room = single.row.how.max_new_tokens
                single.steps = self._answer_model.begin([[single.row.prompt]], room)
            for _ in range(min(REPLAY_TOKENS, len(single.to_replay))):
                single.steps.advance(one(single.to_replay.popleft()))
            if not single.to_replay:
                (token,), _ = choose_tokens(single.steps.scores.clone(), [single.row], exact=False)
                if single.row.take(token):
                    self._single_rows.remove(single)
                else:
                    single.steps.advance(one(token))


def choose_tokens(
    scores: Tensor, rows: Sequence[AnswerRow], *, exact: bool
) -> tuple[list[int], list[bool]]:
    """The next token of every row, and whether rounding may have decided it; changes `scores`. Rows
    with the same sampling settings are sampled together."""
    import torch

    alike: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(rows):
        if row.penalty is not None:
            scores[place : place + 1] = row.penalty(scores[place : place + 1])
        if row.draws is not None:
            how = row.how
            key = (how.temperature, how.top_p, how.top_k, how.min_p)
            alike.setdefault(key, []).append(place)
    tokens = scores.argmax(-1)
    doubtful = [False] * len(rows)
    if exact:
        first, second = scores.topk(2).values.unbind(-1)
        doubtful = (first - second < TIE).tolist()
    for places in alike.values():
        index = torch.tensor(places, device=scores.device)
        group = [rows[place] for place in places]
        draws = torch.stack([r.draws[len(r.writer.ids)] for r in group if r.draws is not None])
        tokens[index] = sample_tokens(scores[index], group[0].how, draws.to(scores.device))
        for place in places:
            doubtful[place] = False
    ids: list[int] = tokens.tolist()
    return ids, doubtful


def _grouped_by_length(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Group prompts, longest first, for prefill: none is padded to more than twice its length."""
    groups: list[list[list[int]]] = []
    for prompt in prompts:
        if groups and 2 * len(prompt) >= len(groups[-1][0]):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups
