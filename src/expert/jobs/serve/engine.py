"""Answers questions: one thread computes, any number of coroutines receive the text.

engine = AnswerEngine(load_models(["runs/sql"]))
asked = await engine.ask(Question(model="sql", turns=(Turn("user", "…"),)))
async for piece in asked.pieces():
    piece.text  # and at the end one Finished for every answer
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from expert.core.text import counted, duration
from expert.data.records import Segment, Turn
from expert.jobs.sample.answer_writer import AnswerWriter
from expert.jobs.sample.decoding import DecodingSettings, end_tokens, stop_texts
from expert.jobs.sample.sample import prompt_text
from expert.jobs.serve.body import RequestError
from expert.jobs.serve.lane import AnswerRow, Lane

if TYPE_CHECKING:
    from expert.jobs.serve.models import ServedModel

QUEUE = 256
"""Largest number of queued answers."""
LARGEST_SEED = 2**43
"""Seeds are taken modulo this: generators are seeded with about a million times a seed."""


class Stopped(RequestError):
    """The engine failed or is shutting down, or an answer took too long."""

    def __init__(self, message: str, status: int = 503, code: str | None = None) -> None:
        super().__init__(status, message, code=code)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation to answer, or a text to continue."""

    model: str
    turns: tuple[Turn, ...] = ()
    text: str | None = None
    """Text to continue as it is, instead of turns."""
    tools: str = ""
    """Offered tools, as JSON."""
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Settings that override the manifest's."""
    stop: tuple[str, ...] = ()
    """Further texts that end an answer."""
    seed: int | None = None
    count: int = 1
    """Number of answers to generate."""
    streams: bool = True
    """Whether text is delivered as it is generated, or only at the end."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer's text."""

    text: str
    answer: int = 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of an answer."""

    text: str
    """The complete text."""
    marked: str
    """The text with special tokens, which mark tool calls in some templates."""
    tokens: int
    reason: Literal["stop", "length"]
    note: str = ""
    answer: int = 0


class PendingAnswers:
    """A question being answered, and its pieces of text."""

    def __init__(self, prompt_tokens: int, loop: asyncio.AbstractEventLoop) -> None:
        self.prompt_tokens = prompt_tokens
        self.rows: list[AnswerRow] = []
        self._queue: asyncio.Queue[TextPiece | Finished | Stopped] = asyncio.Queue()
        self._loop = loop

    def put(self, piece: TextPiece | Finished | Stopped) -> None:
        """Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def pieces(self, seconds: float | None = None) -> AsyncIterator[TextPiece | Finished]:
        """Text as it is generated, if requested, and the end of each answer; Stopped if one failed,
        or took longer than `seconds`."""
        left = len(self.rows)
        until = None if seconds is None else self._loop.time() + seconds
        while left:
            try:
                async with asyncio.timeout_at(until):
                    piece = await self._queue.get()
            except TimeoutError:
                late = f"not answered within {duration(seconds or 0)}"
                raise Stopped(late, 504, "timeout") from None
            if isinstance(piece, Stopped):
                raise piece
            left -= isinstance(piece, Finished)
            yield piece

    def cancel(self) -> None:
        """Stop generating; answers that have ended are not affected."""
        for row in self.rows:
            row.cancelled = True


class AnswerEngine:
    """Models that answer questions in batches."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        parallel: int | None = None,
        queue: int = QUEUE,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`parallel`: largest batch of a model; None: as many answers as fit in memory. `note`:
        called with problems, from the engine's thread."""
        self.models = {model.name: model for model in models}
        self.tokens = 0
        """Tokens generated so far."""
        share = 1 / len(models)
        self._lanes = {m.name: Lane(m.answer_model, most=parallel, share=share) for m in models}
        self._queue, self._note = queue, note
        for model in models:
            model.answer_model.note = note
        self._inbox: deque[tuple[str, AnswerRow]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._refusal_reason = ""
        """Why new questions are refused, or ""."""
        self.failed = False
        """Whether the thread has failed; only a restart helps."""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Answers not started yet."""
        return len(self._inbox) + sum(len(lane.waiting) for lane in self._lanes.values())

    @property
    def running(self) -> int:
        return sum(len(lane.rows) for lane in self._lanes.values())

    async def ask(self, question: Question) -> PendingAnswers:
        """Put a question into the queue; RequestError if it is refused."""
        model = self.models.get(question.model)
        if model is None:
            known = f"there is no model {question.model!r}  (models: {', '.join(self.models)})"
            raise RequestError(404, known, param="model", code="model_not_found")
        self._check_capacity(question.count)
        # In a thread: templates and tokenizers may take a while.
        pending = await asyncio.to_thread(_asked, model, question, asyncio.get_running_loop())
        with self._wake:
            self._check_capacity(question.count)
            self._inbox.extend((model.name, row) for row in pending.rows)
            self._wake.notify()
        return pending

    @property
    def most(self) -> int:
        """Largest number of running and queued answers."""
        return self._queue + sum(lane.most for lane in self._lanes.values())

    def stop_accepting(self) -> None:
        """Refuse new questions; queued ones are still answered."""
        self._refusal_reason = self._refusal_reason or "the server is shutting down"

    def cut(self) -> None:
        """End all answers with an error."""
        with self._wake:
            self.stop_accepting()
            self._closed = True
            self._wake.notify()

    def close(self) -> None:
        """End all answers and wait for the thread."""
        self.cut()
        self._thread.join()

    def _check_capacity(self, count: int) -> None:
        if self._refusal_reason:
            raise Stopped(self._refusal_reason)
        if self.waiting + count > self._queue:
            full = f"the queue is full: {counted(self.waiting, 'answer')} waiting; try again later"
            raise RequestError(429, full, code="rate_limit_exceeded")

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        reason = "the server was stopped"
        try:
            self._answer_all()
        except Exception as error:  # noqa: BLE001 - a failed GPU cannot be used again
            self._note(f"{_in_a_line(error)}; the server has failed: restart it")
            reason, self.failed = "the server has failed and must be restarted", True
        with self._wake:
            self._refusal_reason = self._refusal_reason or reason
            self._take_in()
        for lane in self._lanes.values():
            lane.fail(reason, waiting=True)

    def _answer_all(self) -> None:
        import torch

        for lane in self._lanes.values():
            if lane.device.type == "cuda":  # the current device is per thread
                torch.cuda.set_device(lane.device)
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not (self._closed or self._inbox or self._busy):
                        self._wake.wait()
                    self._take_in()
                if self._closed:
                    return
                for lane in self._lanes.values():  # models take turns
                    if lane.busy:
                        self._turn(lane)
                    if not lane.busy:
                        lane.restore_batch_size()

    def _take_in(self) -> None:
        while self._inbox:
            name, row = self._inbox.popleft()
            self._lanes[name].waiting.append(row)

    @property
    def _busy(self) -> bool:
        return any(lane.busy for lane in self._lanes.values())

    def _turn(self, lane: Lane) -> None:
        try:
            self.tokens += lane.turn()
            return
        except Exception as error:  # noqa: BLE001 - other questions are still answered
            reason = _in_a_line(error)
            again, halve = _can_retry(error)
        # Outside the except block, where no traceback holds tensors.
        if again and lane.requeue(halve=halve):
            smaller = f"; batches of {lane.most} until the queue is empty"
            reason += smaller if halve else ""
        else:
            lane.fail("out of memory" if halve else "an internal error", waiting=not lane.rows)
        self._note(reason)
        for other in self._lanes.values():
            other.drop_idle_cache()
        _release(lane)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _can_retry(error: Exception) -> tuple[bool, bool]:
    """Whether to retry the same rows after an error, and whether to halve the batch."""
    from expert.model.attention import disable_failed_cudnn
    from expert.run.session.failures import is_out_of_memory

    if isinstance(error, RuntimeError) and disable_failed_cudnn(error):
        return True, False
    out_of_memory = is_out_of_memory(error)
    return out_of_memory, out_of_memory


def _release(lane: Lane) -> None:
    import torch

    from expert.run.session.session import release_memory

    release_memory(lane.device)
    if lane.device.type == "cuda":
        torch.cuda.synchronize(lane.device)  # raises if the GPU has failed


# --- a question in tokens -------------------------------------------------------------------------


def _asked(
    model: ServedModel, question: Question, loop: asyncio.AbstractEventLoop
) -> PendingAnswers:
    continues = question.text is not None
    if question.text is not None:
        text = prompt_text(model.template, question.text, plain=True)
    else:
        text = model.template.prompt(question.turns, question.tools)
    encoder: Any = model.trained.encoder
    ids = encoder.encode([[Segment(text, learn=False)]]).ids.tolist()
    how, room = _settled(model, question, len(ids))
    ends = end_tokens(encoder, model.template)
    stops = [*stop_texts(how, encoder, model.template, plain=continues), *question.stop]
    seed = secrets.randbelow(2**31) if question.seed is None else question.seed % LARGEST_SEED
    pending = PendingAnswers(len(ids), loop)
    fitting = replace(how, max_new_tokens=min(how.max_new_tokens, room))
    note = ""
    if room < how.max_new_tokens:
        note = f"cut after {counted(room, 'token')}: the model's context is full"
    for number in range(question.count):
        tell = (
            (lambda piece, n=number: pending.put(TextPiece(piece, n))) if question.streams else None
        )
        writer = AnswerWriter(
            encoder.tokenizer, ends, stops, tell, strip=not continues, special=bool(question.tools)
        )
        end = _end(pending, writer, number, note)
        pending.rows.append(AnswerRow(ids, fitting, writer, seed=seed, number=number, end=end))
    return pending


def _end(
    pending: PendingAnswers, writer: AnswerWriter, number: int, note: str
) -> Callable[[str], None]:
    def end(failed: str) -> None:
        if failed:
            pending.put(Stopped(failed))
            return
        pending.put(
            Finished(
                text=writer.text(),
                marked=writer.text(special=True),
                tokens=len(writer.ids),
                reason="stop" if writer.ended else "length",
                note="" if writer.ended else note,
                answer=number,
            )
        )

    return end


def _settled(model: ServedModel, question: Question, tokens: int) -> tuple[DecodingSettings, int]:
    """Decoding settings, and how many tokens fit into the context."""
    how = replace(model.decoding, **question.decoding)
    taken = tokens + model.answer_model.soft_tokens
    if not tokens:
        raise RequestError(400, "an empty text cannot be continued", param="messages")
    if taken >= model.answer_model.context:
        raise RequestError(
            400,
            f"the prompt has {taken:,} tokens with its template, and the context of {model.name} "
            f"is {model.answer_model.context:,} including the answer  (shorten the prompt)",
            param="messages",
            code="context_length_exceeded",
        )
    return how, model.answer_model.context - taken
