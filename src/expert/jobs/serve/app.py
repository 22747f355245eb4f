"""The HTTP endpoint: access checks, limits, and OpenAI's routes.

A request has one deadline, and its work ends with it: when the client leaves, when the time is
over, and when the answer is complete.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from expert.answer.writer import Answer
from expert.core.errors import ExpertError
from expert.core.text import duration
from expert.jobs.serve.answers import Reply
from expert.jobs.serve.body import RequestError, read_body
from expert.jobs.serve.engine import AnswerEngine, PendingAnswers
from expert.jobs.serve.listen import host_name, is_loopback
from expert.jobs.serve.requests import ChatRequest, TextRequest, checked

T = TypeVar("T")
MAX_BODY_BYTES = 2**20
"""Bytes; 100,000 words take about half of it."""
BODY_SECONDS = 20
ANSWER_SECONDS = 300
RETRY_SECONDS = 2
NOT_LOGGED = ("/health", "/v1/models")
"""Paths that machines poll; not logged unless they fail."""


@dataclass
class LogEntry:
    """A request and its outcome, for the log."""

    path: str
    status: int = 0
    model: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    note: str = ""
    pending: PendingAnswers | None = None
    streams: bool = False


@dataclass(frozen=True, kw_only=True)
class Limits:
    token: str = ""
    """Required of every request, unless ""."""
    loopback: bool = True
    """Listening on this machine only: other Host names are refused, since they could be a website's
    that resolves here (DNS rebinding)."""
    body_bytes: int = MAX_BODY_BYTES
    body_seconds: float = BODY_SECONDS
    answer_seconds: float = ANSWER_SECONDS


def _response(refused: RequestError) -> Response:
    headers = {"retry-after": str(RETRY_SECONDS)} if refused.status in (429, 503) else {}
    if refused.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(_error(refused), refused.status, headers)


def _error(refused: RequestError) -> dict[str, Any]:
    """In OpenAI's format."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    kind, about = kinds.get(refused.status, kind), {"param": refused.param, "code": refused.code}
    return {"error": {"message": str(refused), "type": kind, **about}}


class Endpoint:
    """OpenAI's routes as an ASGI application."""

    def __init__(
        self,
        engine: AnswerEngine,
        limits: Limits,
        *,
        log: Callable[[LogEntry], None] = lambda entry: None,
    ) -> None:
        """`log` gets the outcome of every request."""
        self._engine, self._limits, self._log = engine, limits, log
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/models/{name}", self._model),
            Route("/v1/chat/completions", self._reply, methods=["POST"]),
            Route("/v1/completions", self._reply, methods=["POST"]),
        ]
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        entry = scope["entry"] = LogEntry(f"{scope['method']} {scope['path']}")
        scope["app"] = self  # makes unknown paths raise
        began = time.monotonic()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            await self._answer_in_time(scope, receive, watched)
        except RequestError as refused:
            entry.note = entry.note if refused.status == 500 else str(refused)
            async with asyncio.timeout(self._limits.body_seconds):  # it may not read its answer
                if not entry.status:
                    await _response(refused)(scope, receive, watched)
                elif entry.streams:  # after the first event, errors are events too
                    await send({"type": "http.response.body", "body": _event(_error(refused))})
        finally:
            if entry.pending is not None:
                entry.pending.cancel()
            entry.seconds = time.monotonic() - began
            if entry.status != 200 or scope["path"] not in NOT_LOGGED:
                self._log(entry)

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; RequestError, whatever else goes wrong."""
        seconds = self._limits.answer_seconds
        try:
            async with asyncio.timeout(seconds):
                self._check(scope)
                await self._router(scope, receive, send)
        except RequestError:
            raise
        except TimeoutError:
            late = f"not answered within {duration(seconds)}"
            raise RequestError(504, late, code="timeout") from None
        except HTTPException as error:
            words = f"{scope['entry'].path}: {error.detail}"
            raise RequestError(error.status_code, words) from None
        except ExpertError as fault:  # of the template that cannot write the conversation
            raise RequestError(400, str(fault), param="messages") from None
        except Exception as error:  # noqa: BLE001 - only this request fails
            scope["entry"].note = f"internal error: {type(error).__name__}: {error}"
            raise RequestError(500, "an internal error") from None

    def _check(self, scope: Scope) -> None:
        def of(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in scope["headers"] if key == name]

        host, origin = of(b"host"), of(b"origin")
        if len(host) != 1:
            raise RequestError(400, "a request needs exactly one Host header")
        if self._limits.loopback and not is_loopback(host_name(host[0])):
            raise RequestError(403, f"the host {host[0]!r} is refused: only this machine is served")
        # Browsers send the origin of a page; pages of other sites are refused.
        if origin and origin[0].partition("://")[2] != host[0]:
            raise RequestError(403, f"requests from pages of {origin[0]!r} are refused")
        if self._limits.token:
            given = (of(b"authorization") or [""])[0]
            wanted = f"Bearer {self._limits.token}"
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                raise RequestError(401, "the token is missing or wrong", code="invalid_api_key")

    async def _health(self, request: Request) -> Response:
        engine = self._engine
        status = "failed" if engine.failed else "ok"
        state = {"status": status, "running": engine.running, "waiting": engine.waiting}
        return JSONResponse({**state, "tokens": engine.tokens}, 503 if engine.failed else 200)

    async def _models(self, request: Request) -> Response:
        data = [model.entry() for model in self._engine.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(self._engine.model(request.path_params["name"]).entry())

    async def _reply(self, request: Request) -> Response:
        entry: LogEntry = request.scope["entry"]
        limits, is_chat = self._limits, "/chat/" in request.url.path
        body = await read_body(request, most=limits.body_bytes, seconds=limits.body_seconds)
        wanted: ChatRequest | TextRequest
        wanted = checked(ChatRequest, body) if is_chat else checked(TextRequest, body)
        entry.model, entry.streams = wanted.model, wanted.stream

        async def asked() -> tuple[PendingAnswers, list[Answer]]:
            pending = entry.pending = await self._engine.ask(wanted)
            if wanted.stream:
                return pending, []
            return pending, [piece async for piece in pending.pieces() if isinstance(piece, Answer)]

        pending, finished = await _while_connected(request, asked())
        reply = Reply(self._engine.model(wanted.model), wanted, pending.prompt_tokens)
        entry.prompt_tokens = pending.prompt_tokens
        if wanted.stream:
            events = _events(pending, reply, entry)
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(events, 200, headers, "text/event-stream")
        response = reply.whole(finished)
        entry.tokens, entry.note = reply.tokens, "; ".join(reply.notes)
        return JSONResponse(response)


async def _events(pending: PendingAnswers, reply: Reply, entry: LogEntry) -> AsyncIterator[bytes]:
    """The answers as server-sent events."""
    entry.note = "the client left"  # unless this gets to its end
    async for piece in pending.pieces():
        for chunk in reply.chunks(piece):
            yield _event(chunk)
    for chunk in reply.last_chunks():
        yield _event(chunk)
    entry.tokens, entry.note = reply.tokens, "; ".join(reply.notes)
    yield b"data: [DONE]\n\n"


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which ends with its client: RequestError if that disconnects first."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise RequestError(499, "the client left")
        return await doing
    finally:
        doing.cancel()
        leaving.cancel()


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
