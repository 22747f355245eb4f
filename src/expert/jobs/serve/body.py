"""The JSON body of a request, within limits of size and time, and requests that are refused."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.stored_json import parse_json
from expert.core.text import duration, gib, visible

if TYPE_CHECKING:
    from starlette.requests import Request


DROPPED_TIMES = 32


class RequestError(ExpertError):
    """A request that ends with an error, with what OpenAI's errors say of it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


async def read_body(request: Request, *, most: int, seconds: float) -> dict[str, Any]:
    """The JSON object of a request, a content type that pages of other sites cannot send.

    A body that is too large is received and dropped up to DROPPED_TIMES as much: a client that is
    still sending when the connection is closed sees a reset, not the answer.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, "the Content-Type must be application/json")
    body, size = bytearray(), 0
    length = request.headers.get("content-length", "")
    announced = int(length[:20]) if length.isdigit() else 0
    try:
        async with asyncio.timeout(seconds):
            if announced <= DROPPED_TIMES * most:
                async for chunk in request.stream():
                    size += len(chunk)
                    if size <= most:
                        body += chunk
                    elif size > DROPPED_TIMES * most:
                        break
    except TimeoutError:
        if size <= most:
            within = duration(seconds)
            raise RequestError(408, f"the body was not sent within {within}") from None
    if max(size, announced) > most:
        raise RequestError(413, f"the body is larger than {gib(most)}")
    return _read_json(bytes(body))


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        value = parse_json(body)
        # Tokenizers cannot encode lone UTF-16 surrogates.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ValueError as error:  # UnicodeError is one
        words = str(error).partition("\n")[0]
        shown = visible(words, keep="")[:200]
        raise RequestError(400, f"the body is not JSON in UTF-8: {shown}") from None
    if not isinstance(value, dict):
        raise RequestError(400, "the body is not a JSON object")
    return value
