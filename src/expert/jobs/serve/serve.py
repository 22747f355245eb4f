"""The job behind `expert serve`: loads models and answers requests until a signal."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expert.core.errors import ExpertError
from expert.core.text import duration, visible
from expert.jobs.serve.app import ANSWER_SECONDS, Endpoint, Limits, LogEntry
from expert.jobs.serve.engine import QUEUE, AnswerEngine
from expert.jobs.serve.listen import (
    address_of,
    is_loopback,
    listening_socket,
    make_server,
)
from expert.jobs.serve.models import load_models

if TYPE_CHECKING:
    import uvicorn

TOKEN = "EXPERT_SERVE_TOKEN"
MIN_TOKEN_LENGTH = 16
"""Characters of a token, if other machines can connect."""
SPARE = 64
"""Connections beyond the running and queued answers."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server that is ready to run."""

    address: str
    engine: AnswerEngine
    server: uvicorn.Server
    socket: socket.socket
    generated_token: str
    """A generated token, if other machines can connect and none was given; else ""."""
    needs_token: bool

    def run(self) -> None:
        """Answer requests until a signal."""
        try:
            self.server.run(sockets=[self.socket])
        finally:
            self.engine.close()
            self.socket.close()

    def lines(self) -> list[str]:
        """The address, the models, and example requests."""
        models = list(self.engine.models.values())
        first, width = models[0], max(len(model.name) for model in models)
        lines = [f"serving {self.address}/v1"]
        for model in models:
            lines.append(f"  {model.name.ljust(width)}  {visible(model.checkpoint)} of {model.run}")
            lines += [f"  {' ' * width}  {note}" for note in model.notes]
        messages = '[{"role": "user", "content": "…"}]'
        head = "-H 'Content-Type: application/json'"
        if self.needs_token:
            head += f' -H "Authorization: Bearer ${TOKEN}"'
        key = f'os.environ["{TOKEN}"]' if self.needs_token else '"-"'
        return [
            *lines,
            "",
            f"curl {self.address}/v1/chat/completions {head} -d "
            f'\'{{"model": "{first.name}", "messages": {messages}}}\'',
            f'openai.OpenAI(base_url="{self.address}/v1", api_key={key}).chat.completions.create('
            f'model="{first.name}", messages={messages})',
        ]


def serving(
    places: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    environment: Mapping[str, str],
    parallel: int | None = None,
    queue: int = QUEUE,
    votes: int = 0,
    seconds: float = ANSWER_SECONDS,
    log: Callable[[LogEntry], None] = lambda entry: None,
    note: Callable[[str], None] = lambda text: None,
    **which: Any,
) -> Serving:
    """Prepare a server; addresses and tokens are checked before models are loaded.

    `which`: arguments of `load_models`. `log` is called for every request, `note` for problems,
    from another thread. `votes`: answers to each conversation, of which one is sent.
    """
    if votes > queue:
        what = f"--vote {votes} puts as many answers into the queue, which holds {queue}"
        raise ExpertError(f"{what}  (set --queue to {votes} or more)")
    token, made = _token(environment.get(TOKEN, ""), host)
    listening = listening_socket(host, port)
    try:
        models = load_models(places, **which)
        engine = AnswerEngine(models, parallel=parallel, queue=queue, votes=votes, note=note)
    except BaseException:
        listening.close()
        raise
    limits = Limits(token=token, loopback=is_loopback(host), answer_seconds=seconds)
    return Serving(
        address=address_of(listening),
        engine=engine,
        server=http_server(engine, Endpoint(engine, limits, log=log)),
        socket=listening,
        generated_token=made,
        needs_token=bool(token),
    )


def http_server(engine: AnswerEngine, app: Any) -> uvicorn.Server:
    """The HTTP server of an engine, with a connection for every running or queued answer."""
    most = engine.most + SPARE
    return make_server(app, most=most, stopping=engine.stop_accepting, stopped=engine.cut)


def _token(given: str, host: str) -> tuple[str, str]:
    """The required token, and the same if it was generated here."""
    if given and not (given.isascii() and given.isprintable() and " " not in given):
        raise ExpertError(f"{TOKEN}: a token must be printable ASCII without spaces")
    if is_loopback(host):
        return given, ""
    if given and len(given) < MIN_TOKEN_LENGTH:
        what = f"a token for other machines needs at least {MIN_TOKEN_LENGTH} characters"
        raise ExpertError(f"{TOKEN}: {what}  (leave it out to generate one)")
    made = "" if given else secrets.token_urlsafe(24)
    return given or made, made


def log_line(entry: LogEntry, engine: AnswerEngine) -> str:
    """A log line for a request."""
    asked = visible(entry.model or entry.path, keep="")[:100]
    parts = [str(entry.status or "cut"), asked]
    if entry.prompt_tokens:
        parts.append(f"{entry.prompt_tokens:,} + {entry.tokens:,} tokens")
    parts.append(duration(entry.seconds))
    if entry.tokens and entry.seconds:
        parts.append(f"{entry.tokens / entry.seconds:,.0f} tokens/s")
    parts.append(f"{engine.running} running, {engine.waiting} waiting")
    if entry.note:
        parts.append(visible(entry.note, keep="")[:300])
    return "  ".join(parts)
