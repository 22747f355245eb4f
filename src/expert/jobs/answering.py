"""Many prompts answered at once: left-padded, with a key-value cache, each row as if alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.data.records import Example
    from expert.jobs.sampling import Decoding
    from expert.jobs.trained import Trained

MOST_ROWS = {"cpu": 128, "cuda": 512}
"""At once. 300 answers of 25 tokens took `tiny` 4.1 s on one CPU core with 128 rows, 4.0 s with 64,
5.5 s with 32. Launching the kernels of a small model takes a card longer than running them
(docs/LOG.md), however many rows there are: 512 is reckoned from that, not measured."""
CACHE_SHARE = 0.4
"""Of the memory that is free, for keys and values."""
CLEAR_BELOW = 0.75
"""Rows that have ended stay in the batch until this share of it is left: taking them out copies the
whole cache."""
ENDLESS = 2**31
"""Context of a model that does not tell where its own ends."""
TAIL_TOKENS = 32
"""Last tokens that are searched for a stop: a stop of more tokens is found at the end."""

Tell = Callable[[int, int], None]
"""Told of the answers that are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was said to one prompt."""

    text: str
    marked: str
    """The same with its special tokens: some templates mark calls of tools by them."""
    tokens: int
    ended: bool
    """It came to its end; otherwise it was cut."""
    refused: str = ""
    """Why nothing could be said."""


def answer_all(
    trained: Trained,
    questions: Sequence[Example],
    how: Decoding,
    *,
    seed: int = 0,
    rows: int | None = None,
    tell: Tell = lambda done, of: None,
) -> list[Answer]:
    """Answer every question, in its order; an answer does not depend on the other questions.

    Numbers of a batch are rounded in another order than alone: a token that is a tie but for that
    may come out otherwise. `rows`: so many at once; None: as many as fit.
    """
    from expert.jobs.healing import is_out_of_memory

    work = _Work(trained, questions, how, seed)
    done = len(questions) - len(work.order)
    at_once = rows or _rows_that_fit(trained, work)
    left = list(work.order)
    while left:
        some, failed = left[:at_once], False
        try:
            for _ in work.answer(some):
                done += 1
                tell(done, len(questions))
        except RuntimeError as error:
            if not is_out_of_memory(error) or at_once == 1:
                raise
            failed = True
        if failed:  # out here, where the traceback holds no tensors any more
            done -= work.forget(some)
            at_once = max(1, at_once // 2)
            _empty_cache(trained.device)
            continue
        left = left[at_once:]
    return work.answers()


class _Work:
    """All prompts in tokens, and what was said to them so far."""

    def __init__(
        self, trained: Trained, questions: Sequence[Example], how: Decoding, seed: int
    ) -> None:
        from expert.data.encoder import TextEncoder
        from expert.jobs.sampling import end_tokens

        encoder, template = trained.encoder, trained.template
        assert isinstance(encoder, TextEncoder)
        assert template is not None, "the character model answers nothing"
        self.trained, self.how, self.seed = trained, how, seed
        self.tokenizer: Any = encoder.tokenizer
        self.ends = frozenset(end_tokens(encoder, template))
        self.stops = list(how.stop_sequences)
        if self.tokenizer.token_to_id(template.stop) is None:
            self.stops.append(template.stop)
        prompts = trained.loaded.soft_prompts
        self.soft: Tensor | None = prompts.rows().detach() if prompts is not None else None
        self.lead = len(self.soft) if self.soft is not None else 0
        asked = [template.prompt(question.turns, question.tools) for question in questions]
        self.prompts = _encoded(asked, encoder)
        config = trained.loaded.causal_lm.config.get_text_config()
        self.context: int = getattr(config, "max_position_embeddings", None) or ENDLESS
        self.room = [
            min(how.max_new_tokens, self.context - self.lead - len(prompt))
            for prompt in self.prompts
        ]
        # Longest first: what does not fit shows at once, and rows of one length pad each other.
        answerable = [row for row, room in enumerate(self.room) if room > 0]
        self.order = sorted(answerable, key=lambda row: -len(self.prompts[row]))
        self.said: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)

    def forget(self, rows: Sequence[int]) -> int:
        """Begin anew with these rows; how many of them were done."""
        count = sum(self._is_over(row) for row in rows)
        for row in rows:
            self.said[row], self.ended[row] = [], False
        return count

    def answers(self) -> list[Answer]:
        return [
            Answer(
                text=self._text(row, special=bool(self.stops)),
                marked=self._text(row, special=True),
                tokens=len(said),
                ended=self.ended[row],
            )
            if self.room[row] > 0
            else Answer(
                text="", marked="", tokens=0, ended=False, refused="the prompt fills the context"
            )
            for row, said in enumerate(self.said)
        ]

    def answer(self, rows: Sequence[int]) -> Iterator[int]:
        """Answer these rows together; yields each as it ends."""
        import torch

        with torch.inference_mode():
            batch = _Batch(self, rows)
            while batch.rows:
                tokens = batch.next_tokens()
                over = []
                for place, row in enumerate(batch.rows):
                    if row < 0:
                        continue
                    self._take(row, tokens[place])
                    if self._is_over(row):
                        over.append(place)
                yield from (batch.rows[place] for place in over)
                batch.go_on(tokens, over)

    def _take(self, row: int, token: int) -> None:
        said = self.said[row]
        said.append(token)
        self.ended[row] = token in self.ends or bool(self.stops and self._has_stop(said))

    def _has_stop(self, said: list[int]) -> bool:
        text = self.tokenizer.decode(said[-TAIL_TOKENS:], skip_special_tokens=False)
        return any(stop in text for stop in self.stops)

    def _is_over(self, row: int) -> bool:
        return self.ended[row] or len(self.said[row]) >= self.room[row]

    def _text(self, row: int, *, special: bool) -> str:
        """What was said, without what ended it."""
        from expert.jobs.answer_writer import cut_at

        kept = [token for token in self.said[row] if token not in self.ends]
        text = str(self.tokenizer.decode(kept, skip_special_tokens=not special))
        place = cut_at(text, self.stops)
        return (text if place is None else text[:place]).strip()


class _Batch:
    """Some rows on the device: what they have seen, and the scores of their next tokens."""

    def __init__(self, work: _Work, rows: Sequence[int]) -> None:
        import torch

        self._work, self._device = work, work.trained.device
        self._model = work.trained.loaded.causal_lm
        self.rows = list(rows)
        """The row at each place of the batch; -1 where it has ended."""
        prompts = [work.prompts[row] for row in rows]
        self._width = max(map(len, prompts)) + work.lead
        ids = torch.zeros((len(rows), self._width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, prompt in enumerate(prompts):
            ids[place, self._width - len(prompt) :] = torch.tensor(prompt)
            mask[place, self._width - len(prompt) - work.lead :] = 1
        self._seen = self._tokens_seen(ids, prompts)
        self._mask = mask.to(self._device)
        self._choose = _chooser(work.how, _draws(work, rows), self._device)
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        given = self._with_soft(ids.to(self._device), prompts)
        self._forward(positions, past=None, **given)

    def next_tokens(self) -> list[int]:
        """The next token of every place."""
        scores = self._scores
        if self._seen is not None:
            penalty = self._work.how.repetition_penalty
            lower = (scores / penalty).where(scores >= 0, scores * penalty)
            scores = lower.where(self._seen, scores)
        found: list[int] = self._choose(scores).tolist()
        return found

    def go_on(self, tokens: list[int], over: Sequence[int]) -> None:
        """Take up the tokens; places that are over are marked, and taken out when they are many."""
        import torch

        for place in over:
            self.rows[place] = -1
        kept = [place for place, row in enumerate(self.rows) if row >= 0]
        if not kept:
            self.rows = []
            return
        chosen = torch.tensor(tokens, device=self._device)
        if len(kept) <= CLEAR_BELOW * len(self.rows):
            index = torch.tensor(kept, device=self._device)
            self.rows = [self.rows[place] for place in kept]
            self._past.batch_select_indices(index)
            self._mask, chosen = self._mask[index], chosen[index]
            self._seen = self._seen[index] if self._seen is not None else None
            self._choose.keep(index)
        if self._seen is not None:
            self._seen.scatter_(1, chosen[:, None], value=True)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        # Places that have ended go on past the context, and are not looked at.
        positions = (self._mask.sum(1, keepdim=True) - 1).clamp(max=self._work.context - 1)
        self._forward(positions, past=self._past, input_ids=chosen[:, None])

    def _forward(self, positions: Tensor, *, past: Any, **given: Any) -> None:
        output = self._model(
            **given,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        self._past = output.past_key_values
        self._scores: Tensor = output.logits[:, -1].float()

    def _with_soft(self, ids: Tensor, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The prompts as the model takes them; with soft prompts as embeddings, theirs in front."""
        soft = self._work.soft
        if soft is None:
            return {"input_ids": ids}
        words = self._work.trained.loaded.decoder.get_input_embeddings()(ids)  # type: ignore[operator]
        for place, prompt in enumerate(prompts):
            end = self._width - len(prompt)
            words[place, end - len(soft) : end] = soft.to(words.device, words.dtype)
        return {"inputs_embeds": words}

    def _tokens_seen(self, ids: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor | None:
        """Which tokens each row has seen, where repeating them is made less likely."""
        import torch

        if self._work.how.repetition_penalty == 1.0:
            return None
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        seen = torch.zeros((len(prompts), vocabulary), dtype=torch.bool)
        for place, prompt in enumerate(prompts):
            seen[place, torch.tensor(prompt)] = True
        return seen.to(self._device)


def _chooser(how: Decoding, draws: Tensor | None, device: torch.device) -> Any:
    """What takes a token of each row's scores."""
    return _Likeliest() if draws is None else _Drawn(how, draws.to(device))


class _Likeliest:
    def __call__(self, scores: Tensor) -> Tensor:
        return scores.argmax(-1)

    def keep(self, index: Tensor) -> None:
        """Nothing to do: it knows nothing of rows."""


class _Drawn:
    """Tokens drawn with numbers that were drawn before: a row's do not depend on its neighbours."""

    def __init__(self, how: Decoding, draws: Tensor) -> None:
        self._how, self._draws, self._step = how, draws, 0

    def __call__(self, scores: Tensor) -> Tensor:
        import torch

        how = self._how
        ordered, tokens = (scores / how.temperature).sort(-1, descending=True)
        if how.top_k:
            ordered[:, how.top_k :] = float("-inf")
        shares = ordered.softmax(-1)
        before = shares.cumsum(-1) - shares
        shares = shares.where(before < how.top_p, 0.0)
        shares = shares.where(shares >= how.min_p * shares[:, :1], 0.0)
        upto = shares.cumsum(-1)
        aims = self._draws[:, self._step, None] * upto[:, -1:]
        self._step += 1
        places = torch.searchsorted(upto, aims, right=True).clamp(max=scores.shape[1] - 1)
        return tokens.gather(1, places)[:, 0]

    def keep(self, index: Tensor) -> None:
        self._draws = self._draws[index]


def _draws(work: _Work, rows: Sequence[int]) -> Tensor | None:
    """A number from 0 to 1 for every token to come, by the seed and the number of the row."""
    import torch

    if work.how.temperature == 0:
        return None
    most = max(work.room[row] for row in rows)
    drawn = []
    for row in rows:
        generator = torch.Generator().manual_seed(work.seed * 1_000_003 + row)
        drawn.append(torch.rand(work.how.max_new_tokens, generator=generator)[:most])
    return torch.stack(drawn)


def _encoded(texts: Sequence[str], encoder: Any) -> list[list[int]]:
    from expert.data.records import Segment

    found = encoder.encode([[Segment(text, learn=False)] for text in texts])
    ids, prompts, start = found.ids.tolist(), [], 0
    for length in found.lengths.tolist():
        prompts.append(ids[start : start + length])
        start += length
    return prompts


def _rows_that_fit(trained: Trained, work: _Work) -> int:
    """As many rows as leave room for their keys and values; a model that does not tell its shape
    gets few."""
    config = trained.loaded.causal_lm.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if not (heads and layers and width and work.order):
        return 8
    groups = getattr(config, "num_key_value_heads", None) or heads
    longest = max(len(work.prompts[row]) + work.room[row] for row in work.order) + work.lead
    size = next(trained.loaded.module.parameters()).element_size()
    row_bytes = 2 * layers * groups * width * longest * max(2, size)
    # Scores are float32, and sorting them to draw takes as much again a few times.
    row_bytes += 4 * trained.loaded.causal_lm.get_output_embeddings().weight.shape[0] * 4
    most = MOST_ROWS.get(trained.device.type, MOST_ROWS["cpu"])
    return max(1, min(most, int(CACHE_SHARE * _free_bytes(trained.device) / row_bytes)))


def _free_bytes(device: torch.device) -> int:
    import psutil
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _empty_cache(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
