"""The HTTP endpoint: access checks, limits, and OpenAI's routes."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from expert.answer.writer import Answer
from expert.core.errors import ExpertError
from expert.jobs.serve.answers import Reply
from expert.jobs.serve.body import RequestError, read_body
from expert.jobs.serve.engine import AnswerEngine, PendingAnswers, Stopped
from expert.jobs.serve.listen import host_name, is_loopback
from expert.jobs.serve.requests import ChatRequest, TextRequest, checked

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

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
    """The outcome of a request, for the log."""

    path: str
    status: int = 0
    model: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    note: str = ""


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
    from starlette.responses import JSONResponse

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


def make_app(
    engine: AnswerEngine,
    limits: Limits,
    *,
    log: Callable[[LogEntry], None] = lambda entry: None,
    front: Sequence[str] = (),
) -> RequestGuard:
    """The endpoint as an ASGI application; `front`: the lines shown at /."""
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route, Router

    endpoint = Endpoint(engine, limits)

    async def page(request: Request) -> Response:
        return PlainTextResponse("\n".join(front))

    routes = [
        Route("/", page),
        Route("/health", endpoint.health),
        Route("/v1/models", endpoint.models),
        Route("/v1/models/{name}", endpoint.model),
        Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
        Route("/v1/completions", endpoint.complete, methods=["POST"]),
    ]
    return RequestGuard(Router(routes, redirect_slashes=False), limits, log)


class RequestGuard:
    """Checks host, origin and token of every request, and reports its outcome."""

    def __init__(self, app: Any, limits: Limits, log: Callable[[LogEntry], None]) -> None:
        self._app, self._limits, self._log = app, limits, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        entry = scope["entry"] = LogEntry(f"{scope['method']} {scope['path']}")
        began = time.monotonic()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
            await send(message)

        try:
            # Beyond the limit of an answer: ends clients that do not read theirs.
            async with asyncio.timeout(self._limits.answer_seconds + 2 * self._limits.body_seconds):
                await self._answer(scope, receive, watched, entry)
        except TimeoutError:
            entry.note = entry.note or "the client did not read its answer"
            raise
        finally:
            entry.seconds = time.monotonic() - began
            if entry.status != 200 or scope["path"] not in NOT_LOGGED:
                self._log(entry)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, entry: LogEntry) -> None:
        from starlette.exceptions import HTTPException

        scope["app"] = self._app  # makes unknown paths raise
        try:
            self._check(scope)
            await self._app(scope, receive, send)
        except RequestError as refused:
            entry.note = str(refused)
            await _response(refused)(scope, receive, send)
        except HTTPException as error:
            entry.note = f"{entry.path}: {error.detail}"
            await _response(RequestError(error.status_code, entry.note))(scope, receive, send)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - only this request fails
            entry.note = f"internal error: {type(error).__name__}: {error}"
            if not entry.status:
                await _response(RequestError(500, "an internal error"))(scope, receive, send)

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


class Endpoint:
    """OpenAI's routes."""

    def __init__(self, engine: AnswerEngine, limits: Limits) -> None:
        self._engine, self._limits = engine, limits

    async def health(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        engine = self._engine
        status = "failed" if engine.failed else "ok"
        state = {"status": status, "running": engine.running, "waiting": engine.waiting}
        return JSONResponse({**state, "tokens": engine.tokens}, 503 if engine.failed else 200)

    async def models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        data = [model.entry() for model in self._engine.models.values()]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        model = self._engine.models.get(request.path_params["name"])
        if model is None:
            raise RequestError(404, "there is no such model", param="model", code="model_not_found")
        return JSONResponse(model.entry())

    async def chat(self, request: Request) -> Response:
        return await self._reply(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._reply(request, TextRequest)

    async def _reply(
        self, request: Request, kind: type[ChatRequest] | type[TextRequest]
    ) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        entry: LogEntry = request.scope["entry"]
        limits = self._limits
        body = await read_body(request, most=limits.body_bytes, seconds=limits.body_seconds)
        wanted = checked(kind, body)
        entry.model = wanted.model
        question = wanted.question()
        try:
            pending = await _while_connected(request, self._engine.ask(question))
        except RequestError:
            raise
        except ExpertError as fault:  # of the template that cannot write it
            raise RequestError(400, str(fault), param="messages") from None
        reply = Reply(
            self._engine.models[question.model],
            pending.prompt_tokens,
            chat=isinstance(wanted, ChatRequest),
            offers_tools=bool(question.tools),
            counts_usage=wanted.counts_usage,
        )
        entry.prompt_tokens = pending.prompt_tokens
        if wanted.stream:
            events = self._events(pending, reply, entry)
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(events, 200, headers, "text/event-stream")

        async def whole() -> list[Answer]:
            pieces = pending.pieces(limits.answer_seconds)
            return [piece async for piece in pieces if isinstance(piece, Answer)]

        try:
            response = reply.whole(await _while_connected(request, whole()))
        finally:
            pending.cancel()
        entry.tokens, entry.note = reply.tokens, "; ".join(reply.notes)
        return JSONResponse(response)

    async def _events(
        self, pending: PendingAnswers, reply: Reply, entry: LogEntry
    ) -> AsyncIterator[str]:
        """Server-sent events; an error after the first one is an event, too."""
        ended = False
        try:
            async for piece in pending.pieces(self._limits.answer_seconds):
                for chunk in reply.chunks(piece):
                    yield _event(chunk)
            for chunk in reply.last_chunks():
                yield _event(chunk)
            ended = True
            yield "data: [DONE]\n\n"
        except Stopped as fault:
            ended = True
            entry.note = str(fault)
            yield _event(_error(fault))
        finally:
            pending.cancel()
            entry.tokens = reply.tokens
            left = "" if ended else "the client left"
            entry.note = entry.note or "; ".join(reply.notes) or left


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


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
