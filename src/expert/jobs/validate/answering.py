"""Many prompts answered at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.data.records import Example, Segment
from expert.jobs.sample.answer_steps import CACHE_SHARE, MOST_ROWS, Speaker
from expert.jobs.sample.answer_writer import AnswerWriter
from expert.jobs.sample.decoding import DecodingSettings, end_tokens
from expert.jobs.sample.token_choice import TokenChoice
from expert.run.session.failures import is_out_of_memory
from expert.run.session.session import release_memory

if TYPE_CHECKING:
    from expert.run.stored.load import Trained

NEAR = 0.5
"""Prompts that are read together are at least so long for the longest of them."""
WORTH_A_PASS = 8192
"""Tokens and padding; fewer are read together however long they are: another pass has to be
launched, too."""
READING_SHARE = 0.2
"""The same for reading prompts: what their layers compute, and a mask of each."""

Tell = Callable[[int, int], None]
"""Told of the answers that are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class GivenAnswer:
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
    how: DecodingSettings,
    *,
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    rows: int | None = None,
    tell: Tell = lambda done, of: None,
    note: Callable[[str], None] = lambda text: None,
) -> list[GivenAnswer]:
    """Answer every question, in its order; an answer does not depend on the other questions.

    Numbers of a batch are rounded in another order than alone: a token that is a tie but for that
    may come out otherwise. `numbers`: of the questions, where they are some of several; what is
    drawn for an answer depends on its number. `rows`: so many at once; None: as many as fit.
    """
    work = _Work(trained, questions, how, seed, note, numbers)
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
            again = rows_after(error, at_once, note)
        if again:  # out here, where the traceback holds no tensors any more
            done -= work.forget(some)
            most = again
            release_memory(trained.device)
            continue
        left = left[at_once:]
    return work.answers()


def rows_after(error: RuntimeError, rows: int, note: Callable[[str], None]) -> int:
    """How many rows to try again with: as many without cuDNN's attention where that failed, half of
    them where memory did not hold them; the error itself where neither helps."""
    from expert.model.attention import without_cudnn

    if told := without_cudnn(error):
        note(told)
        return rows
    if is_out_of_memory(error) and rows > 1:
        return rows // 2
    raise error


class _Work:
    """All prompts in tokens, and what was said to them so far."""

    def __init__(
        self,
        trained: Trained,
        questions: Sequence[Example],
        how: DecodingSettings,
        seed: int,
        note: Callable[[str], None],
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
        self._stops = list(how.stop_sequences)
        if self.tokenizer.token_to_id(template.stop) is None:
            self._stops.append(template.stop)
        self.speaker = speaker = Speaker(trained, note)
        asked = [template.prompt(question.turns, question.tools) for question in questions]
        self.prompts = _encoded(asked, encoder)
        self.room = [
            min(how.max_new_tokens, speaker.context - speaker.lead - len(prompt))
            for prompt in self.prompts
        ]
        # Longest first: what does not fit shows at once, and rows of one length pad each other.
        answerable = [row for row, room in enumerate(self.room) if room > 0]
        self.order = sorted(answerable, key=lambda row: -len(self.prompts[row]))
        self._said = [self._writer() for _ in self.prompts]

    def _writer(self) -> AnswerWriter:
        return AnswerWriter(self.tokenizer, sorted(self.ends), self._stops, None, strip=True)

    def forget(self, rows: Sequence[int]) -> int:
        """Start over with these rows; returns how many of them were done."""
        count = sum(self._is_over(row) for row in rows)
        for row in rows:
            self._said[row] = self._writer()
        return count

    def answers(self) -> list[GivenAnswer]:
        full = GivenAnswer(
            text="", marked="", tokens=0, ended=False, refused="the prompt fills the context"
        )
        return [
            GivenAnswer(
                text=said.text(),
                marked=said.text(special=True),
                tokens=len(said.ids),
                ended=said.ended,
            )
            if room > 0
            else full
            for said, room in zip(self._said, self.room, strict=True)
        ]

    def answer(self, rows: Sequence[int]) -> Iterator[int]:
        """Answer these rows together; yields each as it ends. Rows that have ended are taken out of
        the batch when they are many."""
        import torch

        own = [self.prompts[row] for row in rows]
        prompts = {self.numbers[row]: prompt for row, prompt in zip(rows, own, strict=True)}
        live = list(rows)
        """The row at each place of the batch; -1 where it has ended."""
        with torch.inference_mode():
            choice = TokenChoice(self.how, prompts, self.seed, self.speaker)
            groups = _groups(self, own) if self.speaker.fixed else [own]
            steps = self.speaker.begin(groups, max(self.room[row] for row in rows))
            while True:
                tokens = choice.of(steps.scores)
                for place, token in enumerate(tokens.tolist()):
                    row = live[place]
                    if row < 0:
                        continue
                    self._said[row].take(token)
                    if self._is_over(row):
                        live[place] = -1
                        yield row
                kept = [place for place, row in enumerate(live) if row >= 0]
                if not kept:
                    return
                if len(kept) <= steps.clear_below * len(live):
                    index = torch.tensor(kept, device=tokens.device)
                    live, tokens = [live[place] for place in kept], tokens[index]
                    steps.keep(index)
                    choice.keep(index)
                choice.took(tokens)
                steps.go_on(tokens)

    def _is_over(self, row: int) -> bool:
        return self._said[row].ended or len(self._said[row].ids) >= self.room[row]


def _encoded(texts: Sequence[str], encoder: Any) -> list[list[int]]:
    found = encoder.encode([[Segment(text, learn=False)] for text in texts])
    ids, prompts, start = found.ids.tolist(), [], 0
    for length in found.lengths.tolist():
        prompts.append(ids[start : start + length])
        start += length
    return prompts


def _rows_that_fit(work: _Work, left: Sequence[int]) -> int:
    """As many rows as leave room for their keys and values; a model that does not tell its shape
    gets few. The first of them is the longest."""
    from expert.model.fixed_cache import even

    token_bytes = work.speaker.remembered_bytes
    if not token_bytes:
        return 8
    longest = len(work.prompts[left[0]]) + work.speaker.lead
    most = longest + max(work.room[row] for row in left)
    row_bytes = token_bytes * even(most)
    # Scores are float32; sorted and added up to draw from, they are held about ten times.
    row_bytes += work.speaker.vocabulary * 4 * (10 if work.how.temperature else 4)
    fitting = max(1, int(CACHE_SHARE * work.speaker.free_bytes() / row_bytes))
    return fitting if work.speaker.fixed else min(fitting, _rows_read_at_once(work, longest))


def _rows_read_at_once(work: _Work, longest: int) -> int:
    """How many prompts of this length go through the model together."""
    config = work.trained.loaded.causal_lm.config.get_text_config()
    size = work.speaker.number_bytes
    hidden = getattr(config, "hidden_size", 0) or 0
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    # What one layer has at hand of a token, its mask once as bits and once as numbers, and what
    # all layers remember of it until that is put to the other rows'.
    token_bytes = size * (8 * hidden + 3 * inner) + (1 + size) * longest
    token_bytes += work.speaker.remembered_bytes
    share = READING_SHARE * work.speaker.free_bytes()
    return max(1, int(share / max(1, longest * token_bytes)))


def _groups(work: _Work, prompts: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    """The prompts of a batch, longest first, in groups that are read together: shorter ones are not
    padded to the longest of the batch."""
    groups: list[Sequence[Sequence[int]]] = []
    left = list(prompts)
    while left:
        longest = len(left[0]) + work.speaker.lead
        count = min(len(left), _rows_read_at_once(work, longest))
        near = sum(len(prompt) + work.speaker.lead >= NEAR * longest for prompt in left[:count])
        count = near if longest * count > WORTH_A_PASS else count
        groups.append(left[:count])
        left = left[count:]
    return groups
