"""Answers requests: one thread computes, any number of coroutines receive the text.

engine = AnswerEngine(load_models(["runs/sql"]))
asked = await engine.ask(ChatRequest(model="sql", messages=[{"role": "user", "content": "…"}]))
async for piece in asked.pieces():
    piece.text  # and at the end one Answer for every answer
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from expert.answer.grammar import BadGrammar
from expert.answer.writer import Answer
from expert.core.text import counted
from expert.jobs.serve.body import RequestError
from expert.jobs.serve.requests import ChatRequest, TextRequest
from expert.jobs.validate.vote import TEMPERATURE, vote
from expert.judging.cases import Case
from expert.judging.judge_pool import JudgeProcess, most_processes

if TYPE_CHECKING:
    from expert.answer.scheduler import AnswerRow, Scheduler
    from expert.jobs.serve.models import ServedModel

QUEUE = 256
"""Largest number of queued answers."""
VOTE_SECONDS = 10.0
"""For comparing the answers to one request; then the first is sent."""
LARGEST_SEED = 2**43
"""Seeds are taken modulo this: generators are seeded with about a million times a seed."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer's text."""

    text: str
    number: int = 0
    scored: Sequence[Any] = ()
    """Its tokens' probabilities, if these were asked for."""


class PendingAnswers:
    """A request being answered, and its pieces of text."""

    def __init__(self) -> None:
        self.rows: list[AnswerRow] = []
        self.prompt_tokens = 0
        self._queue: asyncio.Queue[TextPiece | Answer | RequestError] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, piece: TextPiece | Answer | RequestError) -> None:
        """Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    def end(self, number: int, failed: str) -> None:
        """Called from the engine's thread when an answer has ended, or failed for this reason."""
        if failed:
            self.put(RequestError(503, failed))
        else:
            self.put(replace(self.rows[number].answer(), number=number))

    @property
    def count(self) -> int:
        """Answers that are sent."""
        return len(self.rows)

    async def pieces(self) -> AsyncIterator[TextPiece | Answer]:
        """Text as it is generated, if requested, and the end of each answer; RequestError if one
        failed."""
        left = self.count
        while left:
            piece = await self._queue.get()
            if isinstance(piece, RequestError):
                raise piece
            left -= isinstance(piece, Answer)
            yield piece

    def cancel(self) -> None:
        """Stop generating; answers that have ended are not affected."""
        for row in self.rows:
            row.cancelled = True


class VotedAnswer(PendingAnswers):
    """A request to which several answers are generated, of which one is sent."""

    count = 1

    def __init__(self, vote: Callable[[VotedAnswer], object]) -> None:
        """`vote`: called from the engine's thread once all have ended."""
        super().__init__()
        self._vote = vote
        self.ended: dict[int, Answer] = {}

    def end(self, number: int, failed: str) -> None:
        if failed:
            self.put(RequestError(503, failed))
            return
        self.ended[number] = self.rows[number].answer()
        if len(self.ended) == len(self.rows):
            self._vote(self)


class AnswerEngine:
    """Models that answer questions in batches."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        parallel: int | None = None,
        queue: int = QUEUE,
        votes: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`parallel`: largest batch of a model; None: as many answers as fit in memory. `votes`:
        answers to a conversation, of which one is sent. `note`: called with problems, from the
        engine's thread."""
        from expert.answer.scheduler import Scheduler

        self.models = {model.name: model for model in models}
        self.tokens = 0
        """Tokens generated so far."""
        self._schedulers: dict[str, Scheduler] = {}
        for model in models:
            model.answer_model.note = note
            self._schedulers[model.name] = Scheduler(
                model.answer_model, most=parallel, share=1 / len(models)
            )
        self._queue, self._note, self._votes = queue, note, votes
        self._voting = ThreadPoolExecutor(1, "vote")
        self._judges = [JudgeProcess(VOTE_SECONDS) for _ in range(most_processes())]  # on demand
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
        return len(self._inbox) + sum(len(each.waiting) for each in self._schedulers.values())

    @property
    def running(self) -> int:
        return sum(len(each.rows) for each in self._schedulers.values())

    @property
    def most(self) -> int:
        """Largest number of running and queued answers."""
        return self._queue + sum(each.most for each in self._schedulers.values())

    def model(self, name: str) -> ServedModel:
        if name not in self.models:
            known = f"there is no model {name!r}  (models: {', '.join(self.models)})"
            raise RequestError(404, known, param="model", code="model_not_found")
        return self.models[name]

    async def ask(self, request: ChatRequest | TextRequest) -> PendingAnswers:
        """Put the answers to a request into the queue; RequestError if it is refused."""
        model, pending = self.model(request.model), PendingAnswers()
        if self._votes and isinstance(request, ChatRequest) and request.may_be_voted_on:
            count = partial(self._vote, model, request)
            pending = VotedAnswer(lambda ended: self._voting.submit(count, ended))
            drawn = request.settings(model.decoding).temperature or TEMPERATURE
            more = {"n": self._votes, "temperature": drawn, "stream": False}
            request = request.model_copy(update=more)
        self._check_capacity(request.answers)
        pending.rows = await _in_thread(lambda: _rows(model, request, pending))
        pending.prompt_tokens = sum(len(row.prompt) for row in pending.rows[:: request.n])
        with self._wake:
            self._check_capacity(request.answers)
            self._inbox.extend((model.name, row) for row in pending.rows)
            self._wake.notify()
        return pending

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
        self._voting.shutdown(cancel_futures=True)
        for judge in self._judges:
            judge.stop()

    def _vote(self, model: ServedModel, request: ChatRequest, pending: VotedAnswer) -> None:
        """Send the answer whose result most share, with the tokens of all."""
        answers, began = [pending.ended[number] for number in sorted(pending.ended)], monotonic()

        def go_on(done: int, of: int) -> None:
            if self._closed or any(row.cancelled for row in pending.rows):
                raise RuntimeError("nobody waits for it")
            if monotonic() - began > VOTE_SECONDS:
                raise TimeoutError(f"it takes longer than {VOTE_SECONDS:g} s")

        try:
            go_on(0, 0)
            turns = tuple((turn.role, turn.text) for turn in request.turns())
            case = Case(id="vote", turns=turns, expected="")
            how: dict[str, Any] = {"domain": model.domain, "processes": self._judges}
            (chosen,) = vote([case], [answers], **how, tell=go_on)
        except Exception as error:  # noqa: BLE001 - the first is an answer, too
            self._note(f"the vote failed: {_in_a_line(error)}; the first answer was sent")
            chosen = next((each for each in answers if each.ended), answers[0])
        pending.put(replace(chosen, tokens=sum(each.tokens for each in answers), number=0))

    def _check_capacity(self, count: int) -> None:
        if self._refusal_reason:
            raise RequestError(503, self._refusal_reason)
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
        for scheduler in self._schedulers.values():
            scheduler.fail(reason, waiting=True)

    def _answer_all(self) -> None:
        import torch

        schedulers = self._schedulers.values()
        for scheduler in schedulers:
            if scheduler.device.type == "cuda":  # the current device is per thread
                torch.cuda.set_device(scheduler.device)
        with torch.inference_mode():
            while True:
                with self._wake:
                    while not (self._closed or self._inbox or any(s.busy for s in schedulers)):
                        self._wake.wait()
                    self._take_in()
                if self._closed:
                    return
                for scheduler in schedulers:  # models take turns
                    if scheduler.busy:
                        self._turn(scheduler)
                    if not scheduler.busy:
                        scheduler.restore_batch_size()

    def _take_in(self) -> None:
        while self._inbox:
            name, row = self._inbox.popleft()
            self._schedulers[name].waiting.append(row)

    def _turn(self, scheduler: Scheduler) -> None:
        from expert.model.device_memory import is_out_of_memory

        failure: Exception | None = None
        try:
            self.tokens += scheduler.turn()
        except Exception as error:  # noqa: BLE001 - other questions are still answered
            failure = error
        if failure is None:
            return
        reason, full = _in_a_line(failure), is_out_of_memory(failure)
        if scheduler.retry(failure):
            reason += f"; batches of {scheduler.most} until the queue is empty" if full else ""
        else:
            why = "out of memory" if full else "an internal error"
            scheduler.fail(why, waiting=not scheduler.rows)
        self._note(reason)
        del failure  # its traceback holds tensors
        for other in self._schedulers.values():
            other.drop_idle_cache()
        _release(scheduler)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _release(scheduler: Scheduler) -> None:
    import torch

    from expert.model.device_memory import release_memory

    release_memory(scheduler.device)
    if scheduler.device.type == "cuda":
        torch.cuda.synchronize(scheduler.device)  # raises if the GPU has failed


# --- a request in tokens --------------------------------------------------------------------------


async def _in_thread(work: Callable[[], list[AnswerRow]]) -> list[AnswerRow]:
    """The result of `work`, done in a thread of its own. A template is code of a model's author: if
    the result is not wanted any more, an exception ends the thread."""
    result: Future[list[AnswerRow]] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except SystemExit:
            pass  # nobody waits for it
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    thread = threading.Thread(target=run, name="prompt", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(result)
    finally:
        if not result.done():
            thread_id = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(SystemExit))


def _rows(
    model: ServedModel, request: ChatRequest | TextRequest, pending: PendingAnswers
) -> list[AnswerRow]:
    """The answers to a request, before their first token: all of the first prompt come first."""
    from expert.answer.engine import PromptTooLong, answer_row

    seed = secrets.randbelow(2**31) if request.seed is None else request.seed % LARGEST_SEED
    rows: list[AnswerRow] = []
    how = request.settings(model.decoding)

    def add(text: str, number: int) -> None:
        place, told = len(rows), 0

        def tell(piece: str) -> None:
            nonlocal told
            scored = rows[place].scored[told:]
            told += len(scored)
            pending.put(TextPiece(piece, place, scored))

        rows.append(
            answer_row(
                model.answer_model,
                text,
                how,
                seed=seed,
                number=number,
                plain=isinstance(request, TextRequest),
                special=request.offers_tools,
                stop=request.stop or (),
                logprobs=request.alternatives,
                tell=tell if request.stream else None,
                end=lambda failed: pending.end(place, failed),
            )
        )

    try:
        for text in request.texts(model.template):
            for number in range(request.n):
                add(text, number)
    except PromptTooLong as error:
        code = "context_length_exceeded" if text else None
        param = "prompt" if isinstance(request, TextRequest) else "messages"
        raise RequestError(400, str(error), param=param, code=code) from None
    except BadGrammar as error:
        raise RequestError(400, f"response_format: {error}", param="response_format") from None
    return rows
