"""Batched generation: many prompts answered together, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.data.records import Example, Segment
from expert.jobs.sample.answer_steps import CACHE_SHARE, MOST_ROWS, AnswerModel
from expert.jobs.sample.answer_writer import AnswerWriter
from expert.jobs.sample.decoding import DecodingSettings, end_tokens, stop_texts
from expert.jobs.sample.token_choice import TokenChoice
from expert.run.session.failures import is_out_of_memory
from expert.run.session.session import release_memory

if TYPE_CHECKING:
    from expert.run.stored.load import Trained

MIN_LENGTH_RATIO = 0.5
"""Prompts read in one pass are at least this long relative to the longest of them."""
MIN_PASS_TOKENS = 8192
"""Tokens including padding; fewer are read in one pass whatever their lengths: passes cost a
launch."""
READING_SHARE = 0.2
"""Share of free memory for reading prompts: layer activations and a mask for each prompt."""

Tell = Callable[[int, int], None]
"""Called with the number of finished answers or rows, and the total."""
Note = Callable[[str], None]
"""Called with a remark for the user."""


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """The answer to one prompt."""

    text: str
    marked: str
    """The same with its special tokens: some templates mark tool calls by them."""
    tokens: int
    ended: bool
    """It ended by itself; otherwise it was cut."""
    refused: str = ""
    """Why there is no answer."""


def answer_all(
    trained: Trained,
    questions: Sequence[Example],
    how: DecodingSettings,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    rows: int | None = None,
    tell: Tell = lambda done, of: None,
    note: Note = lambda text: None,
) -> list[GeneratedAnswer]:
    """Answer every question, in order; an answer does not depend on the other questions.

    Batched arithmetic rounds in a different order than a single prompt, so a token that is
    otherwise a tie may differ. `numbers`: the questions' indices, if they are some of several;
    sampling depends on them. `rows`: batch size; None: as many as fit.
    """
    work = _AnswerJob(trained, questions, how, seed, note, numbers)
    done = len(questions) - len(work.order)
    most = rows or MOST_ROWS.get(trained.device.type, MOST_ROWS["cpu"])
    left = list(work.order)
    while left:
        at_once = min(most, len(left)) if rows else min(most, _rows_that_fit(work, left))
        some, again = left[:at_once], 0
        try:
            for _ in work.answer(some):
                done += 1
                tell(done, len(questions))
        except RuntimeError as error:
            again = retry_batch_size(error, at_once, note)
        if again:  # out here, where the traceback no longer holds tensors
            done -= work.forget(some)
            most = again
            release_memory(trained.device)
            continue
        left = left[at_once:]
    return work.answers()


def retry_batch_size(error: RuntimeError, rows: int, note: Note) -> int:
    """The batch size to retry with: the same without cuDNN's attention if that failed, half if
    memory ran out; raises the error if neither helps."""
    from expert.model.attention import disable_failed_cudnn

    if text := disable_failed_cudnn(error):
        note(text)
        return rows
    if is_out_of_memory(error) and rows > 1:
        return rows // 2
    raise error


class _AnswerJob:
    """All prompts as tokens, and the answers so far."""

    def __init__(
        self,
        trained: Trained,
        questions: Sequence[Example],
        how: DecodingSettings,
        seed: int,
        note: Note,
        numbers: Sequence[int] | None = None,
    ) -> None:
        from expert.data.tokens.encoder import TextEncoder

        encoder, template = trained.encoder, trained.template
        assert isinstance(encoder, TextEncoder)
        assert template is not None, "the character model answers nothing"
        self.trained, self.how, self.seed = trained, how, seed
        self.numbers = range(len(questions)) if numbers is None else numbers
        self.tokenizer: Any = encoder.tokenizer
        self.ends = frozenset(end_tokens(encoder, template))
        self._stops = stop_texts(how, encoder, template)
        self.answer_model = answer_model = AnswerModel(trained, note)
        asked = [template.prompt(question.turns, question.tools) for question in questions]
        self.prompts = _encoded(asked, encoder)
        self.room = [
            min(how.max_new_tokens, answer_model.context - answer_model.soft_tokens - len(prompt))
            for prompt in self.prompts
        ]
        # Longest first: a lack of memory shows at once, and rows of similar length need less
        # padding.
        answerable = [row for row, room in enumerate(self.room) if room > 0]
        self.order = sorted(answerable, key=lambda row: -len(self.prompts[row]))
        self._writers = [self._writer() for _ in self.prompts]

    def _writer(self) -> AnswerWriter:
        return AnswerWriter(self.tokenizer, sorted(self.ends), self._stops, None, strip=True)

    def forget(self, rows: Sequence[int]) -> int:
        """Start over with these rows; returns how many of them were done."""
        count = sum(self._is_over(row) for row in rows)
        for row in rows:
            self._writers[row] = self._writer()
        return count

    def answers(self) -> list[GeneratedAnswer]:
        full = GeneratedAnswer(
            text="", marked="", tokens=0, ended=False, refused="the prompt fills the context"
        )
        return [
            GeneratedAnswer(
                text=said.text(),
                marked=said.text(special=True),
                tokens=len(said.ids),
                ended=said.ended,
            )
            if room > 0
            else full
            for said, room in zip(self._writers, self.room, strict=True)
        ]

    def answer(self, rows: Sequence[int]) -> Iterator[int]:
        """Answer these rows together; yields each as it ends. Finished rows are removed from the
        batch once there are many."""
        import torch

        own = [self.prompts[row] for row in rows]
        prompts = {self.numbers[row]: prompt for row, prompt in zip(rows, own, strict=True)}
        live = list(rows)
        """The row at each place of the batch; -1 once it has ended."""
        with torch.inference_mode():
            choice = TokenChoice(self.how, prompts, self.seed, self.answer_model)
            groups = _groups(self, own) if self.answer_model.fixed else [own]
            steps = self.answer_model.begin(groups, max(self.room[row] for row in rows))
            while True:
                tokens = choice.of(steps.scores)
                for place, token in enumerate(tokens.tolist()):
                    row = live[place]
                    if row < 0:
                        continue
                    self._writers[row].take(token)
                    if self._is_over(row):
                        live[place] = -1
                        yield row
                kept = [place for place, row in enumerate(live) if row >= 0]
                if not kept:
                    return
                if len(kept) <= steps.compact_below * len(live):
                    index = torch.tensor(kept, device=tokens.device)
                    live, tokens = [live[place] for place in kept], tokens[index]
                    steps.keep(index)
                    choice.keep(index)
                choice.append_tokens(tokens)
                steps.advance(tokens)

    def _is_over(self, row: int) -> bool:
        return self._writers[row].ended or len(self._writers[row].ids) >= self.room[row]


def _encoded(texts: Sequence[str], encoder: Any) -> list[list[int]]:
    found = encoder.encode([[Segment(text, learn=False)] for text in texts])
    ids, prompts, start = found.ids.tolist(), [], 0
    for length in found.lengths.tolist():
        prompts.append(ids[start : start + length])
        start += length
    return prompts


def _rows_that_fit(work: _AnswerJob, left: Sequence[int]) -> int:
    """As many rows as leave room for their keys and values; few if the model's shape is unknown.
    The first row is the longest."""
    from expert.model.fixed_cache import aligned_length

    token_bytes = work.answer_model.kv_bytes_per_token
    if not token_bytes:
        return 8
    longest = len(work.prompts[left[0]]) + work.answer_model.soft_tokens
    most = longest + max(work.room[row] for row in left)
    row_bytes = token_bytes * aligned_length(most)
    # Scores are float32; sorting and summing them for sampling takes about ten times their size.
    row_bytes += work.answer_model.vocabulary * 4 * (10 if work.how.temperature else 4)
    fitting = max(1, int(CACHE_SHARE * work.answer_model.free_bytes() / row_bytes))
    return fitting if work.answer_model.fixed else min(fitting, _rows_read_at_once(work, longest))


def _rows_read_at_once(work: _AnswerJob, longest: int) -> int:
    """How many prompts of this length go through the model together."""
    config = work.trained.loaded.causal_lm.config.get_text_config()
    size = work.answer_model.element_bytes
    hidden = getattr(config, "hidden_size", 0) or 0
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # The activations of one layer for a token, its mask once as bits and once as numbers, and its
    # keys and values in all layers until they are merged with the other rows'.
    token_bytes = size * (8 * hidden + 3 * inner) + (1 + size) * longest
    token_bytes += work.answer_model.kv_bytes_per_token
    share = READING_SHARE * work.answer_model.free_bytes()
    return max(1, int(share / max(1, longest * token_bytes)))


def _groups(work: _AnswerJob, prompts: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    """The prompts of a batch, longest first, in groups that are read together, so that short ones
    are not padded to the longest of the batch."""
    groups: list[Sequence[Sequence[int]]] = []
    left = list(prompts)
    while left:
        longest = len(left[0]) + work.answer_model.soft_tokens
        count = min(len(left), _rows_read_at_once(work, longest))
        near = sum(
            len(prompt) + work.answer_model.soft_tokens >= MIN_LENGTH_RATIO * longest
            for prompt in left[:count]
        )
        count = near if longest * count > MIN_PASS_TOKENS else count
        groups.append(left[:count])
        left = left[count:]
    return groups
