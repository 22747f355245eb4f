"""The answers of one model while they are generated: rows join and leave between tokens.

Rows that share a batch are rounded otherwise than alone. In float32 a likeliest token that leads by
less than TIE is not taken from the batch: its row continues alone, from its prompt on, exactly as
`expert sample` would. Greedy answers are therefore those of `expert sample` however many others
are asked. In bfloat16 and float16 rounding is as large as many leads, and ties may fall otherwise.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expert.jobs.sample.answer_steps import CACHE_SHARE, ENDLESS, MOST_ROWS, FixedSteps, Speaker
from expert.jobs.sample.token_choice import Penalty, drawn, row_draws, seen_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from expert.jobs.sample.answer_steps import Steps
    from expert.jobs.sample.answer_writer import AnswerWriter
    from expert.jobs.sample.decoding import DecodingSettings

TIE = 1e-3
"""In float32 scores of a batch differ from those alone by up to 3e-5 with `tiny`, 9e-5 with
SmolLM2-135M."""
READ_AT_ONCE = {"cpu": 2048, "cuda": 16384}
"""Prompt tokens read between two tokens of the answers that are under way; one prompt at least."""
REPLAYED = 8
"""Tokens of a row that continues alone which are repeated between two tokens of the others."""
FEW = 8
"""Rows at once of a model that does not tell how much it remembers, or answers row by row."""


class Row:
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
        """`end` is called once, with the reason where the answer failed. Nothing is on a device
        yet: another thread may be recording there."""
        self.prompt, self.how, self.writer, self.end = list(prompt), how, writer, end
        self.cancelled = False
        self.draws: Tensor | None = None
        self.penalty: Penalty | None = None
        if how.temperature > 0:
            self.draws = row_draws(how, [number], seed)[0]

    def begin(self, speaker: Speaker) -> None:
        """Before its first token, on the thread that computes."""
        if self.how.repetition_penalty != 1.0 and self.penalty is None:
            seen = seen_tokens([self.prompt], speaker.vocabulary).to(speaker.device)
            self.penalty = Penalty(self.how.repetition_penalty, seen)

    @property
    def ids(self) -> list[int]:
        """The prompt and what was said so far."""
        return self.prompt + self.writer.ids

    @property
    def most(self) -> int:
        """Tokens that prompt and answer may have together."""
        return len(self.prompt) + self.how.max_new_tokens

    def take(self, token: int) -> bool:
        """One token more; whether that was the last."""
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
class _Alone:
    """A row that is answered by itself."""

    row: Row
    behind: deque[int]
    """What it said among others and has to repeat."""
    steps: Steps | None = None
    """None before its prompt is read."""


class Lane:
    """All rows of one model; used by one thread."""

    def __init__(self, speaker: Speaker, *, most: int | None = None, share: float = 1.0) -> None:
        """`share`: of the memory for keys and values, beside the lanes of other models."""
        kind = speaker.device.type
        self.waiting: deque[Row] = deque()
        self._speaker, self.device, self._on_cpu = speaker, speaker.device, kind == "cpu"
        self._read_at_once = READ_AT_ONCE.get(kind, READ_AT_ONCE["cpu"])
        self.most = most or MOST_ROWS.get(kind, MOST_ROWS["cpu"])
        self._bytes = speaker.remembered_bytes
        self._budget = share * CACHE_SHARE * speaker.free_bytes()
        if not self._bytes or not speaker.fixed:
            self.most = min(self.most, FEW)
        self._most_at_first = self.most
        self._exact = next(speaker.model.parameters()).element_size() == 4
        arm = platform.machine().lower() in ("aarch64", "arm64")
        self._without_onednn = self._on_cpu and self._exact and arm
        self._slots: list[Row | None] = []
        self._steps: FixedSteps | None = None
        self._alone: list[_Alone] = []
        self._joining: list[Row] = []
        """Whose prompts are being read."""

    @property
    def rows(self) -> list[Row]:
        """Those that are being answered."""
        there = [row for row in self._slots if row] + [each.row for each in self._alone]
        return there + self._joining

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._alone or any(self._slots))

    def turn(self) -> int:
        """One token more for every row; returns how many were said."""
        self._let_go()
        with self._products():
            self._admit()
        rows = self.rows
        before = sum(len(row.writer.ids) for row in rows)
        self._turn_of_alone()
        with self._products():
            self._turn_of_batch()
        return sum(len(row.writer.ids) for row in rows) - before

    @contextmanager
    def _products(self) -> Iterator[None]:
        """On ARM oneDNN multiplies some dozens of rows 2 to 10 times as slowly as BLAS does (LoRA
        on 256 x 512, one thread of a Neoverse-N1: 10 rows 1.74 ms, not 0.17; 100 rows 2.76, not
        0.91). Rows that are alone are computed as `expert sample` does."""
        import torch

        known = torch._C._get_mkldnn_enabled()
        if self._without_onednn:
            torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(known)

    def fail(self, reason: str, *, waiting: bool) -> None:
        """Every row that is being answered ends with this reason; those that wait, too."""
        rows = self.rows
        self._clear()
        if waiting:
            rows += self.waiting
            self.waiting.clear()
        for row in rows:
            row.end(reason)

    def rest(self) -> None:
        """Nobody is left: from here on as many at once as before memory ran out."""
        self.most = self._most_at_first

    def start_over(self, *, halve: bool) -> bool:
        """Put all rows back, to be read again, half as many at once where memory ran out; False
        where one alone was too many."""
        rows = self.rows
        if halve and len(rows) <= 1:
            return False
        self._clear()
        if halve:
            self.most = max(1, min(self.most, len(rows)) // 2)
        self.waiting.extendleft(reversed(rows))
        return True

    def _clear(self) -> None:
        self._slots, self._steps, self._alone, self._joining = [], None, [], []

    def _let_go(self) -> None:
        """Rows that nobody waits for."""
        self.waiting = deque(row for row in self.waiting if not row.cancelled)
        self._slots = [None if row and row.cancelled else row for row in self._slots]
        self._alone = [each for each in self._alone if not each.row.cancelled]

    # --- rows that join ---------------------------------------------------------------------------

    def _admit(self) -> None:
        here, tokens = self.rows, 0
        joining = self._joining
        while self.waiting and len(here) + len(joining) < self.most:
            row = self.waiting[0]
            tokens += len(row.ids)
            if joining and tokens > self._read_at_once:
                break
            if (here or joining) and not self._fits([*here, *joining, row]):
                break
            joining.append(self.waiting.popleft())
        if not joining:
            return
        for row in joining:
            row.begin(self._speaker)
        if self._speaker.fixed:
            joining.sort(key=lambda row: -len(row.ids))
            self._join(joining, _near_in_length([row.ids for row in joining]))
        else:
            self._alone += [_Alone(row, deque(row.writer.ids)) for row in joining]
        self._joining = []

    def _fits(self, rows: Sequence[Row]) -> bool:
        longest = max(row.most for row in rows) + self._speaker.lead
        return len(rows) * longest * self._bytes <= self._budget

    def _join(self, joining: list[Row], groups: list[list[list[int]]]) -> None:
        import torch

        if self._steps is None:
            self._steps = FixedSteps(self._speaker, groups, ENDLESS)
            self._slots = [*joining]
            return
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        more = len(joining) - len(free)
        if more > 0:
            there = len(self._slots)
            # On a card every number of rows is captured once: powers of two are few.
            room = more if self._on_cpu else 2 ** (there + more - 1).bit_length() - there
            index = torch.tensor([*range(there), *[0] * room], device=self.device)
            self._steps.keep(index)
            self._slots += [None] * room
            free += range(there, there + room)
        self._steps.join(groups, free[: len(joining)])
        for slot, row in zip(free, joining, strict=False):
            self._slots[slot] = row

    # --- one token more ---------------------------------------------------------------------------

    def _turn_of_batch(self) -> None:
        import torch

        live = [slot for slot, row in enumerate(self._slots) if row]
        if self._steps is not None and live:
            rows = [row for row in self._slots if row]
            index = torch.tensor(live, device=self.device)
            tokens, doubtful = chosen(self._steps.scores[index], rows, exact=self._exact)
            said = dict(zip(live, tokens, strict=True))
            for slot, row, doubt in zip(live, rows, doubtful, strict=True):
                if doubt:
                    self._alone.append(_Alone(row, deque(row.writer.ids)))
                if doubt or row.take(said[slot]):
                    self._slots[slot] = None
            self._go_on(said)
        if not any(self._slots):
            self._slots, self._steps = [], None

    def _go_on(self, said: dict[int, int]) -> None:
        import torch

        assert self._steps is not None
        device = self.device
        live = [slot for slot, row in enumerate(self._slots) if row]
        if not live:
            return
        tokens = [said.get(slot, 0) for slot in range(len(self._slots))]
        if len(live) <= self._steps.clear_below * len(self._slots):
            self._steps.keep(torch.tensor(live, device=device))
            self._slots = [self._slots[slot] for slot in live]
            tokens = [said[slot] for slot in live]
            live = list(range(len(live)))
        self._steps.make_room(torch.tensor(live, device=device))
        self._steps.go_on(torch.tensor(tokens, device=device))

    def _turn_of_alone(self) -> None:
        import torch

        def one(token: int) -> Tensor:
            return torch.tensor([token], device=self.device)

        for each in list(self._alone):
            if each.steps is None:
                room = each.row.how.max_new_tokens
                each.steps = self._speaker.begin([[each.row.prompt]], room)
            for _ in range(min(REPLAYED, len(each.behind))):
                each.steps.go_on(one(each.behind.popleft()))
            if not each.behind:
                (token,), _ = chosen(each.steps.scores.clone(), [each.row], exact=False)
                if each.row.take(token):
                    self._alone.remove(each)
                else:
                    each.steps.go_on(one(token))


def chosen(scores: Tensor, rows: Sequence[Row], *, exact: bool) -> tuple[list[int], list[bool]]:
    """The next token of every row, and whether rounding may have decided it; `scores` are used up.
    Rows that draw alike draw together."""
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
        some = [rows[place] for place in places]
        draws = torch.stack([r.draws[len(r.writer.ids)] for r in some if r.draws is not None])
        tokens[index] = drawn(scores[index], some[0].how, draws.to(scores.device))
        for place in places:
            doubtful[place] = False
    found: list[int] = tokens.tolist()
    return found, doubtful


def _near_in_length(prompts: Sequence[list[int]]) -> list[list[list[int]]]:
    """Prompts, longest first, in groups that are read together: none is padded to twice its
    length."""
    groups: list[list[list[int]]] = []
    for prompt in prompts:
        if groups and 2 * len(prompt) >= len(groups[-1][0]):
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    return groups
